"""Slots that the next step is about to lack (docs/protocol.md, section 7.7).

Dropping bad draws must gain nothing. So a slot that is late goes to another node before a step needs it, a step waits
for those whose last chance it is, and what is missing even then is logged as a gap, with everybody who had it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, func, not_, or_, select

from coordinator.storage.progress import Progress
from coordinator.storage.schema import (
    LeaseState,
    SlotState,
    SubmissionState,
    groups,
    leases,
    nodes,
    policies,
    slots,
    submissions,
)
from coordinator.storage.standing import is_unproven
from node.protocol.admission import Outcome
from node.protocol.messages import MOST_MISSED, MOST_MISSED_OF_SLOT, Gap, MissedSlot
from node.protocol.run import RunSpec

LATE_FACTOR: Final = 4.0
"""A lease is late after this multiple of the lower quartile of what recent admitted groups took: who delivers slowly on
purpose would have to send three quarters of them to move it."""
HOLDERS_SECONDS: Final = 60.0
"""Who asked for work within a lease's length and this may ask again."""
LEAST_TIMES: Final = 8
CLOCK_STEP_SECONDS: Final = 5.0
"""A clock correction by less than this ends no lease and no wait."""

_UNDELIVERED = or_(slots.c.state == SlotState.OPEN, slots.c.state == SlotState.LEASED)
_MISSING = (
    select(slots.c.id, slots.c.version, slots.c.number, slots.c.state == SlotState.LEASED)
    .where(_UNDELIVERED, slots.c.version <= bindparam("last_chance"))
    .order_by(slots.c.version, slots.c.number)
)
_OLDEST_HELD = select(func.min(nodes.c.held_from)).where(nodes.c.seen_at > bindparam("seen_since"), not_(is_unproven()))
_READY_AT = (
    select(submissions.c.decided_at)
    .join(groups, groups.c.submission == submissions.c.submission)
    .where(groups.c.step.is_(None))
    .order_by(submissions.c.decided_at)
    .limit(1)
    .offset(bindparam("others"))
)
_PUBLISHED_AT = select(policies.c.published_at).where(policies.c.version == bindparam("version"))
_UNDER_WAY = (
    select(leases.c.lease, leases.c.node, leases.c.issued_at, nodes.c.place)
    .join(slots, slots.c.id == leases.c.slot_id)
    .join(nodes, nodes.c.node == leases.c.node)
    .where(
        slots.c.state == SlotState.LEASED,
        slots.c.version.in_(bindparam("versions", expanding=True)),
        leases.c.state == LeaseState.ACTIVE,
        leases.c.node != bindparam("node"),
    )
    .order_by(slots.c.id)
)
_RECENT_TIMES = (
    select(submissions.c.received_at - leases.c.issued_at)
    .join(leases, leases.c.lease == submissions.c.lease)
    # Junk is sent at once: counted, it would make honest leases late.
    .where(submissions.c.state == SubmissionState.DONE, submissions.c.outcome == Outcome.ADMITTED)
    .order_by(submissions.c.received_at.desc())
    .limit(64)
)
_ENDED_WITHOUT = (
    select(slots.c.version, slots.c.number, leases.c.node, leases.c.state, submissions.c.node.label("author"))
    .select_from(slots)
    .join(leases, leases.c.slot_id == slots.c.id)
    .outerjoin(groups, groups.c.slot_id == slots.c.id)
    .outerjoin(submissions, submissions.c.submission == groups.c.submission)
    .where(
        slots.c.id.in_(bindparam("ids", expanding=True)),
        # An inequality, which no index serves: by slot there are a few, and by state all that ever ended.
        leases.c.state.not_in((LeaseState.ACTIVE, LeaseState.SUBMITTED)),
    )
    .order_by(slots.c.version, slots.c.number, leases.c.ended_at.desc())
)


@dataclass(frozen=True, slots=True)
class MissingSlot:
    """A slot without a submission, of a version that no step after the next one may train on."""

    id: int
    version: int
    number: int
    is_leased: bool

    @property
    def gap(self) -> Gap:
        return Gap(version=self.version, slot=self.number)


def missing_slots(connection: Connection, at: Progress, *, spec: RunSpec) -> list[MissingSlot]:
    """Return what the next step is the last chance of, and nobody has delivered."""
    rows = connection.execute(_MISSING, {"last_chance": at.last_chance(spec.batch)})
    return [MissingSlot(*row) for row in rows]


def awaited_slots(connection: Connection, at: Progress, *, spec: RunSpec, now: float) -> int:
    """Return how many of `missing_slots` somebody may still deliver.

    Those are under a lease, or of a policy that a proven node had when it asked for work of late: a node that starts
    again fetches the newest policy alone.
    """
    missing = missing_slots(connection, at, spec=spec)
    if not missing:
        return 0
    seen_since = now - spec.batch.lease_seconds - HOLDERS_SECONDS
    held_from = connection.execute(_OLDEST_HELD, {"seen_since": seen_since}).scalar()
    return sum(held_from is None or slot.is_leased or slot.version >= held_from for slot in missing)


def seconds_to_wait(connection: Connection, at: Progress, *, missing: int, spec: RunSpec, now: float) -> float:
    """Return for how long the next step still waits for `missing` slots; 0 if it goes on without them.

    Meant for a step that has its groups: it waits from the moment when it had them, and its policy.
    """
    longest = spec.batch.gap_wait_seconds(missing)
    ready = connection.execute(_READY_AT, {"others": spec.batch.groups_per_step - 1}).scalar()
    published = connection.execute(_PUBLISHED_AT, {"version": at.next_step}).scalar()
    if missing == 0 or ready is None or published is None:
        return 0.0
    left = max(ready, published) + longest - now
    # Longer than a whole wait means that the clock was, or is, wrong.
    return max(0.0, left) if left <= longest + CLOCK_STEP_SECONDS else 0.0


def late_leases(
    connection: Connection,
    at: Progress,
    *,
    node: str,
    place: str,
    versions: Collection[int],
    spec: RunSpec,
    now: float,
) -> list[tuple[str, str]]:
    """Return (lease, holder) of late leases that `node` may take over, oldest slots first.

    Only slots of `versions` in the older half of their time count: steps are about to need them. For as long again,
    they go to nodes of other networks alone.
    """
    horizon = at.last_chance(spec.batch) + spec.batch.max_async // 2
    needed = [version for version in versions if version <= horizon]
    if not needed:
        return []
    under_way = connection.execute(_UNDER_WAY, {"versions": needed, "node": node}).all()
    if not under_way:
        return []
    late = _late_seconds(connection, spec=spec)
    return [
        (row.lease, row.node)
        for row in under_way
        if now - row.issued_at > (2 * late if place and row.place == place else late)
    ]


def _late_seconds(connection: Connection, *, spec: RunSpec) -> float:
    """Return the age at which a lease is late; none is before its end until enough groups were admitted."""
    times: list[float] = sorted(connection.execute(_RECENT_TIMES).scalars())
    if len(times) < LEAST_TIMES:
        return spec.batch.lease_seconds
    return min(spec.batch.lease_seconds, LATE_FACTOR * max(0.0, times[len(times) // 4]))


def missed_slots(connection: Connection, ids: Sequence[int]) -> tuple[MissedSlot, ...]:
    """Return who had one of these slots and delivered nothing, each node once a slot, in the order of the slots."""
    found, of_slot = dict[tuple[int, int, str], MissedSlot](), Counter[tuple[int, int]]()
    for row in connection.execute(_ENDED_WITHOUT, {"ids": list(ids)}):
        slot, key = (row.version, row.number), (row.version, row.number, row.node)
        if row.node == row.author or key in found or of_slot[slot] == MOST_MISSED_OF_SLOT:
            continue
        of_slot[slot] += 1
        found[key] = MissedSlot(version=row.version, slot=row.number, node=row.node, how=row.state)
    return tuple(found.values())[:MOST_MISSED]
