"""The slots that a lease request takes: reopened ones, then new ones of the newest policy, within the capacity.

Every function takes the write transaction of `work.lease`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import UnsetType
from sqlalchemy import Connection

from coordinator.storage import pools
from coordinator.storage import work_statements as statements
from coordinator.storage.counters import count_opened
from coordinator.storage.prepared import Rows
from coordinator.storage.progress import Progress
from coordinator.storage.schema import SlotState
from node.protocol.environment_spec import PackageSpec
from node.protocol.messages import LeaseRequest
from node.protocol.run import RunSpec

_NOTHING_DRAWN: Mapping[str, int | None] = {"candidate": None, "environment": None, "problem": None}


@dataclass(frozen=True, slots=True)
class TakenSlot:
    """A slot that nobody else is leased, and the digest of its policy's manifest."""

    version: int
    number: int
    manifest_digest: str
    candidate: int | None = None


class Demand(NamedTuple):
    """At most `most` slots, all of one version of `versions`, none of the environments `lacks`."""

    versions: list[int]
    most: int
    lacks: Collection[int]


def capacity_of(at: Progress, *, spec: RunSpec) -> int:
    """Return how many slots may be in flight."""
    return (min(at.head + spec.batch.max_async + 1, spec.training.steps) - at.next_step) * spec.batch.groups_per_step


def lacked_environments(request: LeaseRequest, spec: RunSpec) -> frozenset[int]:
    """Return which of the run's environments the node says it lacks; only those of packages can be missing."""
    if isinstance(request.lacks, UnsetType):
        return frozenset()
    packaged = {number for number, one in enumerate(spec.environments) if isinstance(one.package, PackageSpec)}
    return frozenset(request.lacks) & packaged


def take(
    connection: Connection,
    who: Mapping[str, str | float],
    what: Demand,
    *,
    proven: bool,
    at: Progress,
    manifest: str,
    spec: RunSpec,
    now: float,
) -> list[TakenSlot]:
    """Take slots; `who` has the node, its place, and between which times that place may not have given the slot up:
    `lately` and `ahead`, a little after now.

    `manifest` is the digest of the newest policy's.
    """
    versions, most, lacks = what
    found = _ask_for_open(connection, who, what, proven=proven)
    counted = statements.SLOTS_NOW.ask(connection, {"version": at.head}) if at.head in versions else None
    rows = found()
    rows = [row for row in rows if row[1] == rows[0][1]]
    chosen = [TakenSlot(*slot) for _, *slot in rows]
    if counted is not None and len(chosen) < most and all(slot.version == at.head for slot in chosen):
        ((unsettled, waiting, last),) = counted()  # before any is taken, on SQLite as well
        waiting -= len(chosen)
        slots = _SlotsNow(unsettled - waiting, waiting, last)
        most -= len(chosen)
        chosen += _open_new(connection, slots, at=at, manifest=manifest, most=most, lacks=lacks, spec=spec, now=now)
    for slot_id, *_ in rows:
        statements.SLOT_STATE.send(connection, {"slot": slot_id, "new_state": SlotState.LEASED})
    return chosen


def _ask_for_open(
    connection: Connection, who: Mapping[str, str | float], what: Demand, *, proven: bool
) -> Callable[[], Rows]:
    """Look for reopened slots, oldest first.

    Those that failed MOST_FAILURES times go to proven nodes only: near a run's end, free keys could otherwise fail the
    few remaining slots again and again.
    """
    given: dict[str, Any] = {**who, "versions": what.versions, "most": what.most}
    if what.lacks:
        query = statements.OPEN_SLOTS_IT_HAS if proven else statements.OPEN_SLOTS_IT_HAS_FOR_UNPROVEN
        given["lacks"] = sorted(what.lacks)
    else:
        query = statements.OPEN_SLOTS if proven else statements.OPEN_SLOTS_FOR_UNPROVEN
    return query.send(connection, given)


class _SlotsNow(NamedTuple):
    """How many slots are in flight, how many are open, and the highest number of the newest policy's, None for none."""

    under_way: int
    waiting: int
    last: int | None


def _open_new(
    connection: Connection,
    slots: _SlotsNow,
    *,
    at: Progress,
    manifest: str,
    most: int,
    lacks: Collection[int],
    spec: RunSpec,
    now: float,
) -> list[TakenSlot]:
    """Open and take new slots of the newest policy, whose digest is `manifest`, within the capacity.

    Slots already open are not for this node: it lacks the policy or failed them. They do not count where the next step
    would lack groups if no other node took them. Stops if a newer policy is recorded meanwhile.

    New slots of the environments `lacks` are left open for others. They count, or a node could have slots opened until
    enough are of the environments that it likes.
    """
    capacity = capacity_of(at, spec=spec)
    reserve = 0 if lacks else min(capacity, spec.batch.groups_per_step)
    room = min(most, max(capacity - slots.waiting, reserve) - slots.under_way)
    first = 0 if slots.last is None else slots.last + 1
    taken, opened = [], 0
    for number in range(first, first + room):
        try:
            drawn = pools.slot_columns(connection, spec=spec, version=at.head, manifest_digest=manifest, number=number)
        except pools.HeadMoved:
            break
        state = SlotState.OPEN if drawn.get("environment") in lacks else SlotState.LEASED
        values = {"version": at.head, "number": number, "state": state, "opened_at": now, **_NOTHING_DRAWN, **drawn}
        statements.NEW_SLOT.send(connection, values)
        opened += 1
        if state is SlotState.LEASED:
            taken.append(TakenSlot(at.head, number, manifest, drawn.get("candidate")))
    count_opened(connection, opened)
    return taken
