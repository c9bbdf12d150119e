"""Slots, leases and submissions (docs/protocol.md, sections 5 and 6).

Every function takes a write transaction, the time and the run's spec, and keeps these invariants:

- A slot is leased to one node at a time, and never again to a node whose submission for it was rejected. One that a
  step is about to need goes from a node that is late to a proven one.
- A new node gets one slot at a time, and one more with each fully measured and admitted group, until one is rejected;
  unproven nodes together, and those of one place, hold what `newcomers` leaves them, and nodes of one address a fixed
  number of leases. With work under way a node counts as where it began that.
- What a node returns or lets lapse goes to nodes of other places first; who returns more than its budget waits.
- A banned node gets no lease.
- At most (max_async + 1) training steps' worth of slots is in flight, so that no admitted group grows stale
  before a step can use it; and as many more as are open, where the next step would otherwise lack groups.
- Once the last step has its groups, nothing is leased.
- A slot whose version no later step may train on is stale; it is neither leased nor accepted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET, UnsetType
from sqlalchemy import Connection

from coordinator.storage import gaps, locks, newcomers
from coordinator.storage import work_statements as statements
from coordinator.storage.counters import count_final
from coordinator.storage.places import place_of
from coordinator.storage.prepared import Prepared, Rows
from coordinator.storage.progress import Progress
from coordinator.storage.schema import LeaseState, SlotState, SubmissionState
from coordinator.storage.slot_supply import Demand, TakenSlot, lacked_environments, take
from coordinator.storage.standing import backoff_seconds, most_slots, note_return, start_backoff
from node.protocol.messages import Lease, LeaseReply, LeaseRequest, SlotName
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from node.protocol.standing import Standing
from shardcast.wire import digest, is_digest

IDLE_RETRY_SECONDS = 0.25
OTHERS_FIRST_SECONDS = 5.0
"""For how long a slot that was given up is not leased to the same place again."""
OF_LATE_SECONDS = 60.0
"""Nodes that asked for work within it count as there."""


@dataclass(frozen=True, slots=True)
class AddressQuota:
    """A requester's network address, and how many leases all its nodes together may hold (0: unlimited)."""

    address: str = ""
    most_leases: int = 0


def lease(
    connection: Connection,
    *,
    node: str,
    request: LeaseRequest,
    spec: RunSpec,
    now: float,
    quota: AddressQuota = AddressQuota(),
    check: Callable[[], None] = lambda: None,
) -> LeaseReply:
    """Lease up to `request.slots` slots of one policy version that the node holds, within the limits.

    Raises Refusal for an unknown or banned node, and what `check` raises once the node's row is locked. An empty reply
    says when to retry.
    """
    locks.leasing(connection)
    place = place_of(quota.address)
    kept = newcomers.ask_for_kept(connection, place)
    found, (head, last_step, manifest, unfinished, has_overdue) = _look(connection, node, check, spec=spec, now=now)
    if has_overdue:
        expire_leases(connection, spec=spec, now=now)
        found, (head, last_step, manifest, unfinished, _) = _look(connection, node, check, spec=spec, now=now)
    at = Progress.of(head, last_step)
    there = {"of_node": node, "now": now, "from_address": quota.address, "from_place": place}
    oldest_held = min((held for held in request.held_versions if held <= at.head), default=None)
    seen = statements.NODE_SEEN.send(connection, {**there, "oldest_held": oldest_held, "is_busy": unfinished > 0})
    standing = _standing(node, (found or seen)())
    if unfinished > 0 and standing.address:
        if standing.place != place:
            kept = newcomers.ask_for_kept(connection, standing.place)
        quota, place = replace(quota, address=standing.address), standing.place
    if standing.of_slots.is_banned(spec.standing):
        raise Refusal(Reason.BANNED, f"{standing.of_slots.strikes} slots of node {node[:16]}… were rejected.")
    wait = backoff_seconds(standing.not_before, batch=spec.batch, now=now)
    most = most_slots(standing.of_slots, batch=spec.batch) - unfinished
    if quota.most_leases:
        most = min(most, quota.most_leases - _count(connection, statements.HELD_AT, address=quota.address))
    if not standing.proven and most > 0 and wait <= 0:
        most = min(most, newcomers.free_slots(connection, at, kept, spec=spec, place=place, now=now))
    wanted = min(request.slots, most)
    if wait > 0 or wanted <= 0 or at.head < 0 or at.is_over(spec):
        return LeaseReply(leases=(), head_version=at.head, retry_after_seconds=max(wait, IDLE_RETRY_SECONDS))
    usable = _usable_versions(connection, request.held_versions, at, spec=spec, now=now)
    what = Demand(versions=usable, most=wanted, lacks=lacked_environments(request, spec))
    chosen = _take(connection, what, at, manifest, node=node, place=place, proven=standing.proven, spec=spec, now=now)
    granted = tuple(_issue_lease(connection, row, node=node, spec=spec, now=now) for row in chosen)
    if granted and not standing.proven:
        newcomers.note_leased(connection, place, len(granted), now=now)
    return LeaseReply(leases=granted, head_version=at.head, retry_after_seconds=0.0 if granted else IDLE_RETRY_SECONDS)


def _take(
    connection: Connection,
    what: Demand,
    at: Progress,
    manifest: str,
    *,
    node: str,
    place: str,
    proven: bool,
    spec: RunSpec,
    now: float,
) -> list[TakenSlot]:
    """Take slots for a node; late ones of others are reopened for one that is proven."""
    who: dict[str, str | float] = {
        "node": node,
        "place": place,
        "lately": now - OTHERS_FIRST_SECONDS,
        "ahead": now + gaps.CLOCK_STEP_SECONDS,
    }
    if proven:
        who["seen_since"] = now - OF_LATE_SECONDS
        _reopen_late(connection, at, what, node=node, place=place, spec=spec, now=now)
    return take(connection, who, what, proven=proven, at=at, manifest=manifest, spec=spec, now=now)


def _usable_versions(
    connection: Connection, held: Sequence[int], at: Progress, *, spec: RunSpec, now: float
) -> list[int]:
    """Return the held versions whose slots may be leased: such as a step that has its groups still waits for.

    Otherwise junk for the oldest slots, submitted again and again, would keep it waiting for verdicts.
    """
    usable = [version for version in held if at.floor(spec.batch) <= version <= at.head]
    last_chance = at.last_chance(spec.batch)
    if not any(version <= last_chance for version in usable):
        return usable
    if _count(connection, statements.GROUPS_WAITING) < spec.batch.groups_per_step:
        return usable
    awaited = gaps.awaited_slots(connection, at, spec=spec, now=now)
    if gaps.seconds_to_wait(connection, at, missing=awaited, spec=spec, now=now) > 0:
        return usable
    return [version for version in usable if version > last_chance]


def _reopen_late(
    connection: Connection, at: Progress, what: Demand, *, node: str, place: str, spec: RunSpec, now: float
) -> None:
    """End late leases of slots that a step is about to need, so that this proven node can take them."""
    late = gaps.late_leases(connection, at, node=node, place=place, versions=what.versions, spec=spec, now=now)
    for name, holder in late[: what.most]:
        overtake(connection, name, holder, spec=spec, now=now)


def overtake(connection: Connection, lease_id: str, holder: str, *, spec: RunSpec, now: float) -> None:
    """End another node's late lease and reopen its slot, which counts as a return, unless it is being used.

    Nor does it wait for its node's row, which verdicts may have locked and then want the row that this request has.
    """
    if statements.FREE.first(connection, {"lease": lease_id}) is None:
        return
    if _end_lease(connection, lease_id, LeaseState.OVERTAKEN, now=now):
        note_return(connection, holder, batch=spec.batch, now=now)


def expire_leases(connection: Connection, *, spec: RunSpec, now: float) -> None:
    """Expire overdue leases, some at a time: reopen their slots, and start a backoff of their nodes as for a rejection.

    Leases issued while this machine's clock was ahead expire, too, for which no node has to wait.
    """
    for name, node, expires_at in statements.OVERDUE.rows(connection, _overdue_at(spec, now)):
        if statements.FREE.first(connection, {"lease": name}) is None:  # as in `overtake`; the next request ends it
            continue
        _end_lease(connection, name, LeaseState.EXPIRED, now=now)
        if expires_at <= now:
            start_backoff(connection, node, batch=spec.batch, now=now)


def _overdue_at(spec: RunSpec, now: float) -> dict[str, float]:
    # All leases have one length, so that the indexed end tells when a lease was issued.
    return {"now": now, "too_late": now + gaps.CLOCK_STEP_SECONDS + spec.batch.lease_seconds}


def return_lease(connection: Connection, *, node: str, lease_id: str, spec: RunSpec, now: float) -> None:
    """End a lease on its holder's request and reopen the slot; raises Refusal."""
    locks.submitting(connection)
    found = _ask_for_lease(connection, statements.LOCKED_LEASE, lease_id)
    _active_lease(connection, found, node=node, lease_id=lease_id, now=now)
    _end_lease(connection, lease_id, LeaseState.RETURNED, now=now)
    note_return(connection, node, batch=spec.batch, now=now)


@dataclass(frozen=True, slots=True)
class StoredSubmission:
    """A submission by its signed request, whose file is stored as blob `body`."""

    envelope: bytes
    body: str
    body_bytes: int


def check_lease(
    connection: Connection,
    *,
    node: str,
    lease_id: str,
    claimed: SlotName | UnsetType = UNSET,
    spec: RunSpec,
    now: float,
) -> None:
    """Raise Refusal unless `node` may submit under `lease_id`, as work of the slot `claimed` if it names one."""
    found = _ask_for_lease(connection, statements.LEASE, lease_id)
    slot = _usable_lease(connection, found, node=node, lease_id=lease_id, spec=spec, now=now).slot
    if claimed not in (UNSET, slot):
        raise Refusal(Reason.WRONG_SLOT, f"Lease {lease_id[:16]}… is of slot {slot.slot}.")


def _ask_for_lease(connection: Connection, statement: Prepared, lease_id: str) -> Callable[[], Rows]:
    """Look for a lease by LEASE or LOCKED_LEASE; raises Refusal."""
    if not is_digest(lease_id):  # any text from a URL; PostgreSQL refuses NUL characters
        raise Refusal(Reason.UNKNOWN_LEASE, f"Lease {lease_id[:16]}….")
    return statement.send(connection, {"lease": lease_id})


def _usable_lease(
    connection: Connection, found: Callable[[], Rows], *, node: str, lease_id: str, spec: RunSpec, now: float
) -> _LeaseRow:
    """Return the lease under which `node` may submit, whose row is `found`; raises Refusal."""
    row = _active_lease(connection, found, node=node, lease_id=lease_id, now=now)
    floor = row.at.floor(spec.batch)
    if row.version < floor:
        raise Refusal(Reason.STALE_POLICY, f"The slot is of policy {row.version}, the oldest still taken is {floor}.")
    return row


def submit(
    connection: Connection, arrival: StoredSubmission, *, node: str, lease_id: str, spec: RunSpec, now: float
) -> str:
    """Queue a stored submission for verification; return its id. Raises Refusal."""
    locks.submitting(connection)
    found = _ask_for_lease(connection, statements.LOCKED_LEASE, lease_id)
    known = statements.KNOWN_BODY.ask(connection, {"body": arrival.body, "lease": lease_id})
    slot_id = _usable_lease(connection, found, node=node, lease_id=lease_id, spec=spec, now=now).slot_id
    if earlier := known():
        submission, author = earlier[0]
        own = submission if author == node else None
        raise Refusal(Reason.DUPLICATE_SUBMISSION, "This very file was submitted before.", submission=own)
    statements.LEASE_STATE.send(connection, {"of_lease": lease_id, "new_state": LeaseState.SUBMITTED})
    statements.SLOT_STATE.send(connection, {"slot": slot_id, "new_state": SlotState.SUBMITTED})
    name = digest(arrival.envelope)
    values = {
        "submission": name,
        "lease": lease_id,
        "slot_id": slot_id,
        "node": node,
        "request": name,
        "envelope": arrival.envelope,
        "body": arrival.body,
        "body_bytes": arrival.body_bytes,
        "received_at": now,
        "state": SubmissionState.QUEUED,
        "attempts": 0,
        # Drawn once: neither a verifier's crash nor a repeated request may draw again.
        "draw": secrets.SystemRandom().random(),
    }
    statements.NEW_SUBMISSION.run(connection, values)
    return name


def _active_lease(
    connection: Connection, found: Callable[[], Rows], *, node: str, lease_id: str, now: float
) -> _LeaseRow:
    if not (rows := found()):
        raise Refusal(Reason.UNKNOWN_LEASE, f"Lease {lease_id[:16]}….")
    ((holder, state, expires_at, slot_id, version, slot_state, head, last_step, manifest, number, candidate),) = rows
    if holder != node:
        raise Refusal(Reason.FOREIGN_LEASE, f"Lease {lease_id[:16]}….")
    if state == LeaseState.SUBMITTED:
        own = statements.SUBMISSION_OF.scalar(connection, {"lease": lease_id})
        raise Refusal(Reason.DUPLICATE_SUBMISSION, f"Lease {lease_id[:16]}… was used.", submission=own)
    if slot_state == SlotState.STALE:
        raise Refusal(Reason.STALE_POLICY, f"Policy {version} is too old now.")
    if state != LeaseState.ACTIVE or expires_at <= now:
        raise Refusal(Reason.EXPIRED_LEASE, f"Lease {lease_id[:16]}… ended.")
    slot = SlotName(manifest_digest=manifest, slot=number, candidate=UNSET if candidate is None else candidate)
    return _LeaseRow(slot_id=slot_id, version=version, slot=slot, at=Progress.of(head, last_step))


@dataclass(frozen=True, slots=True)
class _LeaseRow:
    slot_id: int
    version: int
    slot: SlotName
    at: Progress


def _end_lease(connection: Connection, name: str, state: LeaseState, *, now: float) -> bool:
    """End an active lease and reopen its slot; return False if it is not active any more."""
    ended = statements.END_LEASE.run(connection, {"of_lease": name, "new_state": state, "now": now}) > 0
    if ended:
        statements.REOPEN_SLOT.run(connection, {"of_lease": name})
        count_final(connection, state)
    return ended


@dataclass(frozen=True, slots=True)
class _Standing:
    """A node's record, and where it counts as being; it is proven while its last submission was admitted."""

    admitted: int
    rejected_streak: int
    not_before: float
    of_slots: Standing
    address: str
    place: str

    @property
    def proven(self) -> bool:
        return self.admitted > 0 and self.rejected_streak == 0


def _look(
    connection: Connection, node: str, check: Callable[[], None], *, spec: RunSpec, now: float
) -> tuple[Callable[[], Rows] | None, tuple[Any, ...]]:
    """Lock a node's row; return what has its standing, None on SQLite, where NODE_SEEN tells it without another
    statement, and the row of SITUATION. Raises what `check` does.
    """
    on_server = connection.dialect.name == "postgresql"
    found = statements.OWN_NODE.send(connection, {"node": node}) if on_server else None
    (situation,) = statements.SITUATION.rows(connection, {"node": node, **_overdue_at(spec, now)})
    check()
    return found, situation


def _standing(node: str, rows: Rows) -> _Standing:
    """Return the standing in what was read of a node's row; raises Refusal for an unknown node."""
    if not rows:
        raise Refusal(Reason.UNKNOWN_IDENTITY, f"Node {node[:16]}….")
    ((admitted, rejected_streak, not_before, verified, strikes, address, place),) = rows
    of_slots = Standing(verified=verified, strikes=strikes)
    return _Standing(admitted, rejected_streak, not_before, of_slots, address, place)


def _count(connection: Connection, statement: Prepared, **values: str) -> int:
    return int(statement.scalar(connection, values))


def active_leases(connection: Connection, slot_ids: Sequence[int]) -> list[tuple[str, str]]:
    """Return (lease, holder) of the active leases of some slots."""
    rows = connection.execute(statements.ACTIVE_OF, {"ids": list(slot_ids)})
    return [(row.lease, row.node) for row in rows]


def held_leases(connection: Connection, node: str) -> int:
    """Return the number of the node's active leases."""
    return _count(connection, statements.HELD, node=node)


def unjudged(connection: Connection, node: str) -> int:
    """Return the number of the node's submissions without a verdict."""
    return _count(connection, statements.UNJUDGED, node=node)


def _issue_lease(connection: Connection, row: TakenSlot, *, node: str, spec: RunSpec, now: float) -> Lease:
    """Lease a slot that `take` took."""
    # In the order of time, since a random key is a page of its own in each of its indexes: with a million submissions
    # before it a lease took three times as long. What follows is still random enough to be nobody else's.
    name = f"{int(now) & 0xFFFFFFFF:08x}{secrets.token_hex(28)}"
    expires_at = now + spec.batch.lease_seconds
    values = {
        "lease": name,
        "of_version": row.version,
        "of_number": row.number,
        "node": node,
        "state": LeaseState.ACTIVE,
        "issued_at": now,
        "expires_at": expires_at,
    }
    statements.NEW_LEASE.send(connection, values)
    return Lease(
        lease_id=name,
        version=row.version,
        manifest_digest=row.manifest_digest,
        slot=row.number,
        expires_at=int(expires_at),
        candidate=UNSET if row.candidate is None else row.candidate,
    )
