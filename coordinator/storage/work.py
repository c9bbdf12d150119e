"""Slots, leases and submissions: who works on what (docs/protocol.md, sections 5 and 6).

Every function takes a write transaction, a clock reading and the run's spec, and keeps these invariants:

- A slot is leased to one node at a time, and never again to a node whose submission for it was rejected.
- A new node gets one slot at a time, and one more with each fully measured and admitted group, until one is rejected;
  nodes without standing hold at most half of all slots in flight together, those of one address so many leases.
- A banned node gets nothing.
- At most (max_async + 1) training steps' worth of slots is in flight, so that no admitted group grows stale
  before a step can take it; and as many more as are open, where else the next step would lack groups.
- Once the last step has its groups, nothing is leased.
- A slot whose version no coming step may train on is stale; nothing of it is leased or accepted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, func, insert, not_, or_, select, true, update

from coordinator.storage.schema import (
    LeaseState,
    SlotState,
    SubmissionState,
    groups,
    leases,
    nodes,
    policies,
    slots,
    steps,
    submissions,
)
from coordinator.storage.standing import is_unproven, make_wait
from node.protocol.admission import DRIFT, Outcome
from node.protocol.messages import Lease, LeaseReply, LeaseRequest
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import BatchSpec, RunSpec
from node.protocol.standing import Standing

IDLE_RETRY_SECONDS = 0.25
MOST_FAILURES = 2
"""After so many a slot is not for nodes that have shown nothing."""

CLOCK_STEP_SECONDS = 5.0
"""By less, a clock that is set right may go back without anybody losing a lease."""

_UNDER_WAY = (SlotState.LEASED, SlotState.SUBMITTED, SlotState.ADMITTED)
_WITHOUT_VERDICT = (submissions.c.state != SubmissionState.DONE, submissions.c.outcome.is_(None))
"""Not those that wait for a second one: else a node that is caught would keep others from working."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the run is: the newest policy (-1 before the first) and the next step that has no batch yet."""

    head: int
    next_step: int

    def floor(self, batch: BatchSpec) -> int:
        """The oldest policy version that a coming step may still train on."""
        return max(0, self.next_step - batch.max_async)

    def is_over(self, spec: RunSpec) -> bool:
        """Whether the last step has its groups."""
        return self.next_step >= spec.training.steps


def progress(connection: Connection) -> Progress:
    """Read where the run is."""
    head = connection.execute(select(func.max(policies.c.version))).scalar()
    assigned = connection.execute(select(func.max(steps.c.step))).scalar()
    return Progress(head=-1 if head is None else head, next_step=0 if assigned is None else assigned + 1)


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a request comes from, and how many leases all nodes there may hold together (0: any number)."""

    address: str = ""
    most_leases: int = 0


def lease(
    connection: Connection,
    *,
    node: str,
    request: LeaseRequest,
    spec: RunSpec,
    now: float,
    caller: Caller = Caller(),
) -> LeaseReply:
    """Lease up to `request.slots` slots of one policy version that the node holds, which asks from `caller`.

    Raises Refusal for an unknown or a banned node.
    """
    expire_leases(connection, spec=spec, now=now)
    at = progress(connection)
    standing = _standing(connection, node=node, address=caller.address, now=now)
    if standing.of_slots.is_banned(spec.standing):
        raise Refusal(Reason.BANNED, f"{standing.of_slots.strikes} slots of node {node[:16]}… were rejected.")
    wait = max(0.0, standing.not_before - now)
    if wait > spec.batch.rejection_backoff_max_seconds:
        wait = 0.0  # nobody waits so long: it was set while this machine's clock was wrong, or is set back now
    most = min(spec.batch.max_leases_per_node, standing.of_slots.verified + 1) - _unfinished(connection, node)
    if caller.most_leases:
        most = min(most, caller.most_leases - _held_at(connection, caller.address))
    if not standing.proven:
        most = min(most, _room_for_the_unproven(connection, at, spec=spec))
    quota = min(request.slots, most)
    if wait > 0 or quota <= 0 or at.head < 0 or at.is_over(spec):
        return LeaseReply(leases=(), head_version=at.head, retry_after_seconds=max(wait, IDLE_RETRY_SECONDS))
    # Once the next step has its groups, it only waits for verdicts of its last chances: no more are given out.
    oldest = max(0, at.next_step - spec.batch.max_async + int(_batch_is_ready(connection, spec=spec)))
    usable = [v for v in request.held_versions if oldest <= v <= at.head]
    chosen = _reopened(connection, node=node, proven=standing.proven, versions=usable, most=quota)
    if at.head in usable and len(chosen) < quota and all(row.version == at.head for row in chosen):
        chosen += _open_new(connection, at=at, taken=len(chosen), most=quota - len(chosen), spec=spec, now=now)
    granted = tuple(_grant(connection, row, node=node, spec=spec, now=now) for row in chosen)
    return LeaseReply(leases=granted, head_version=at.head, retry_after_seconds=0.0 if granted else IDLE_RETRY_SECONDS)


def expire_leases(connection: Connection, *, spec: RunSpec, now: float) -> None:
    """End the leases whose time is over; their slots go to whoever asks next, their nodes wait as if rejected.

    So end those of a time to come, given while this machine's clock was ahead: their holders may be gone for good.
    """
    over = or_(leases.c.expires_at <= now, leases.c.issued_at > now + CLOCK_STEP_SECONDS)
    ended = select(leases.c.lease, leases.c.node).where(leases.c.state == LeaseState.ACTIVE, over)
    for name, node in connection.execute(ended).all():
        _end_lease(connection, name, LeaseState.EXPIRED)
        make_wait(connection, node, batch=spec.batch, now=now)


def give_back(connection: Connection, *, node: str, lease_id: str, now: float) -> None:
    """A node hands a lease back; the slot goes on unchanged. Raises Refusal."""
    _active_lease(connection, node=node, lease_id=lease_id, now=now)
    _end_lease(connection, lease_id, LeaseState.RETURNED)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A submission whose body is stored: the blobs of its signed request and of the Parquet file."""

    submission: str
    request: str
    body: str
    body_bytes: int


def check_lease(connection: Connection, *, node: str, lease_id: str, spec: RunSpec, now: float) -> int:
    """The slot (by id) that `node` may submit under `lease_id`. Raises Refusal."""
    row = _active_lease(connection, node=node, lease_id=lease_id, now=now)
    floor = progress(connection).floor(spec.batch)
    if row.version < floor:
        raise Refusal(Reason.STALE_POLICY, f"The slot is of policy {row.version}, the oldest still taken is {floor}.")
    slot_id: int = row.slot_id
    return slot_id


def submit(connection: Connection, arrival: Arrival, *, node: str, lease_id: str, spec: RunSpec, now: float) -> None:
    """Put a stored submission into the verifiers' queue. Raises Refusal."""
    slot_id = check_lease(connection, node=node, lease_id=lease_id, spec=spec, now=now)
    # Honest nodes generate the same bytes for a slot, so a file counts as known only where it is right (it was
    # admitted) or was judged or waits (for this slot). Otherwise a copy under another slot would bar its author, and
    # a node that was stopped for its earlier slots, its successor.
    judged = or_(submissions.c.figure.is_(None), not_(submissions.c.figure.endswith(DRIFT, autoescape=True)))
    known = select(submissions.c.submission, submissions.c.node).where(
        submissions.c.body == arrival.body,
        or_(
            # What a second verdict left undecided may come again: nobody said that it is wrong.
            and_(
                submissions.c.outcome == Outcome.ADMITTED,
                submissions.c.recheck.is_distinct_from(Outcome.INDETERMINATE),
            ),
            and_(
                submissions.c.slot_id == slot_id,
                or_(submissions.c.outcome.is_(None), and_(submissions.c.outcome == Outcome.REJECTED, judged)),
            ),
        ),
    )
    earlier = connection.execute(known).first()
    if earlier is not None:
        own = earlier.submission if earlier.node == node else None
        raise Refusal(Reason.DUPLICATE_SUBMISSION, "This very file was submitted before.", submission=own)
    connection.execute(update(leases).where(leases.c.lease == lease_id).values(state=LeaseState.SUBMITTED))
    connection.execute(update(slots).where(slots.c.id == slot_id).values(state=SlotState.SUBMITTED))
    connection.execute(
        insert(submissions).values(
            submission=arrival.submission,
            lease=lease_id,
            slot_id=slot_id,
            node=node,
            request=arrival.request,
            body=arrival.body,
            body_bytes=arrival.body_bytes,
            received_at=now,
            state=SubmissionState.QUEUED,
            attempts=0,
            # Drawn once, where no verifier that dies and nobody who asks again can have it drawn anew.
            draw=secrets.SystemRandom().random(),
        )
    )


def _active_lease(connection: Connection, *, node: str, lease_id: str, now: float) -> _LeaseRow:
    query = (
        select(leases.c.node, leases.c.state, leases.c.expires_at, leases.c.slot_id, slots.c.version, slots.c.state)
        .join(slots, slots.c.id == leases.c.slot_id)
        .where(leases.c.lease == lease_id)
    )
    row = connection.execute(query).first()
    if row is None:
        raise Refusal(Reason.UNKNOWN_LEASE, f"Lease {lease_id[:16]}….")
    holder, state, expires_at, slot_id, version, slot_state = row
    if holder != node:
        raise Refusal(Reason.FOREIGN_LEASE, f"Lease {lease_id[:16]}….")
    if state == LeaseState.SUBMITTED:
        own = connection.execute(select(submissions.c.submission).where(submissions.c.lease == lease_id)).scalar()
        raise Refusal(Reason.DUPLICATE_SUBMISSION, f"Lease {lease_id[:16]}… was used.", submission=own)
    if slot_state == SlotState.STALE:
        raise Refusal(Reason.STALE_POLICY, f"Policy {version} is too old now.")
    if state != LeaseState.ACTIVE or expires_at <= now:
        raise Refusal(Reason.EXPIRED_LEASE, f"Lease {lease_id[:16]}… ended.")
    return _LeaseRow(slot_id=slot_id, version=version)


@dataclass(frozen=True, slots=True)
class _LeaseRow:
    slot_id: int
    version: int


@dataclass(frozen=True, slots=True)
class _SlotRow:
    id: int
    version: int
    number: int


def _end_lease(connection: Connection, name: str, state: LeaseState) -> None:
    slot_id = connection.execute(select(leases.c.slot_id).where(leases.c.lease == name)).scalar_one()
    connection.execute(update(leases).where(leases.c.lease == name).values(state=state))
    reopen = update(slots).where(slots.c.id == slot_id, slots.c.state == SlotState.LEASED)
    connection.execute(reopen.values(state=SlotState.OPEN))


@dataclass(frozen=True, slots=True)
class _Standing:
    """What a node has shown so far. It is proven while its last submission was admitted."""

    admitted: int
    rejected_streak: int
    not_before: float
    of_slots: Standing

    @property
    def proven(self) -> bool:
        return self.admitted > 0 and self.rejected_streak == 0


def _standing(connection: Connection, *, node: str, address: str, now: float) -> _Standing:
    """A node's standing; raises Refusal for an unknown node."""
    row = connection.execute(select(nodes).where(nodes.c.node == node)).first()
    if row is None:
        raise Refusal(Reason.UNKNOWN_IDENTITY, f"Node {node[:16]}….")
    connection.execute(update(nodes).where(nodes.c.node == node).values(seen_at=now, address=address))
    of_slots = Standing(verified=row.verified, strikes=row.strikes)
    return _Standing(row.admitted, row.rejected_streak, row.not_before, of_slots)


def _held_at(connection: Connection, address: str) -> int:
    """Leases of all nodes that were last seen at this address."""
    active = leases.c.state == LeaseState.ACTIVE
    return _count(connection, active, leases.c.node == nodes.c.node, nodes.c.address == address)


def _room_for_the_unproven(connection: Connection, at: Progress, *, spec: RunSpec) -> int:
    """Slots that nodes without standing may still take: together they hold at most half, so that new keys,
    which cost nothing, cannot keep the proven from working."""
    unproven = is_unproven()
    held = _count(connection, leases.c.state == LeaseState.ACTIVE, leases.c.node == nodes.c.node, unproven)
    waiting = _count(connection, *_WITHOUT_VERDICT, submissions.c.node == nodes.c.node, unproven)
    return max(1, _capacity(at, spec=spec) // 2) - held - waiting


def _count(connection: Connection, *conditions: ColumnElement[bool]) -> int:
    return int(connection.execute(select(func.count()).where(*conditions)).scalar_one())


def _batch_is_ready(connection: Connection, *, spec: RunSpec) -> bool:
    """Whether enough is admitted for the next step."""
    return _count(connection, groups.c.step.is_(None)) >= spec.batch.groups_per_step


def _capacity(at: Progress, *, spec: RunSpec) -> int:
    """How many slots may be in flight."""
    return (min(at.head + spec.batch.max_async + 1, spec.training.steps) - at.next_step) * spec.batch.groups_per_step


def _unfinished(connection: Connection, node: str) -> int:
    """Leases that the node holds plus its submissions without a verdict."""
    held = _count(connection, leases.c.node == node, leases.c.state == LeaseState.ACTIVE)
    return held + _count(connection, submissions.c.node == node, *_WITHOUT_VERDICT)


def _reopened(connection: Connection, *, node: str, proven: bool, versions: list[int], most: int) -> list[_SlotRow]:
    """Open slots that wait for another try, oldest first, all of one version.

    What failed a few times goes to the proven only: near a run's end few slots are left, and keys that cost nothing
    could fail each of them again and again.
    """
    failed_here = select(submissions.c.slot_id).where(
        submissions.c.node == node,
        or_(submissions.c.outcome == Outcome.REJECTED, submissions.c.recheck == Outcome.REJECTED),
    )
    query = (
        select(slots.c.id, slots.c.version, slots.c.number)
        .where(slots.c.state == SlotState.OPEN, slots.c.version.in_(versions), slots.c.id.not_in(failed_here))
        .where(true() if proven else _failures() < MOST_FAILURES)
        .order_by(slots.c.id)
        .limit(most)
        .with_for_update(skip_locked=True)
    )
    rows = [_SlotRow(*row) for row in connection.execute(query)]
    return [row for row in rows if row.version == rows[0].version]


def _failures() -> ColumnElement[int]:
    """How often a slot that is open now was let lapse, or submitted without being admitted."""
    failed = leases.c.state.in_((LeaseState.EXPIRED, LeaseState.SUBMITTED))
    return select(func.count()).where(leases.c.slot_id == slots.c.id, failed).scalar_subquery()


def _open_new(
    connection: Connection, *, at: Progress, taken: int, most: int, spec: RunSpec, now: float
) -> list[_SlotRow]:
    """Open new slots of the newest policy, as many as the coming steps can take in time.

    What is open already, but for the `taken`, is not for this node: it does not hold the policy, or failed. Should
    nobody else come for it, the next step must get its groups all the same.
    """
    capacity, under_way = _capacity(at, spec=spec), taken + _count(connection, slots.c.state.in_(_UNDER_WAY))
    waiting = _count(connection, slots.c.state == SlotState.OPEN) - taken
    room = min(most, max(capacity - waiting, min(capacity, spec.batch.groups_per_step)) - under_way)
    last = connection.execute(select(func.max(slots.c.number)).where(slots.c.version == at.head)).scalar()
    first = 0 if last is None else last + 1
    opened = []
    for number in range(first, first + room):
        values = {"version": at.head, "number": number, "state": SlotState.OPEN, "opened_at": now}
        added = connection.execute(insert(slots).values(**values).returning(slots.c.id)).scalar_one()
        opened.append(_SlotRow(id=added, version=at.head, number=number))
    return opened


def _grant(connection: Connection, row: _SlotRow, *, node: str, spec: RunSpec, now: float) -> Lease:
    name = secrets.token_hex(32)
    expires_at = now + spec.batch.lease_seconds
    connection.execute(update(slots).where(slots.c.id == row.id).values(state=SlotState.LEASED))
    connection.execute(
        insert(leases).values(
            lease=name, slot_id=row.id, node=node, state=LeaseState.ACTIVE, issued_at=now, expires_at=expires_at
        )
    )
    digest = connection.execute(select(policies.c.manifest_digest).where(policies.c.version == row.version))
    return Lease(
        lease_id=name,
        version=row.version,
        manifest_digest=digest.scalar_one(),
        slot=row.number,
        expires_at=int(expires_at),
    )
