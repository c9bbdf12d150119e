"""The trainer's state: batches, steps and policies (docs/protocol.md, section 8)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, func, insert, select, update

from coordinator.storage import deliveries, gaps, locks, log, work
from coordinator.storage.counters import count_final
from coordinator.storage.progress import Progress, progress
from coordinator.storage.schema import SlotState, groups, policies, slots, steps
from coordinator.storage.standing import rechecks_due, settle
from node.protocol.messages import BatchEntry, PolicyEntry
from node.protocol.run import RunSpec


@dataclass(frozen=True, slots=True)
class BatchRow:
    """An admitted group that a step trains on, and the slot of which policy it is."""

    submission: str
    blob: str
    manifest_digest: str
    slot: int


@dataclass(frozen=True, slots=True)
class _Ready:
    slot_id: int
    submission: str
    reward_mean: float
    version: int


def may_assign(connection: Connection, *, spec: RunSpec, now: float, trained: int = -1) -> bool:
    """Return whether `assign_batch` would find a batch; takes no lock, so the result may be stale."""
    return _choose(connection, progress(connection), spec=spec, now=now, trained=trained) is not None


def missing_for_next_step(connection: Connection, *, spec: RunSpec, now: float) -> tuple[int, float]:
    """Return how many slots a step that has its groups waits for, and for how many seconds at most; (0, 0) for none."""
    at = progress(connection)
    awaited = gaps.awaited_slots(connection, at, spec=spec, now=now)
    seconds = gaps.seconds_to_wait(connection, at, missing=awaited, spec=spec, now=now)
    return (awaited, seconds) if seconds > 0 else (0, 0.0)


def assign_batch(connection: Connection, *, spec: RunSpec, now: float, trained: int = -1) -> int | None:
    """Assign groups to the next step and return its number, or None while there are too few.

    A step needs its policy in the log, or, if no slot whose last chance it is lacks a submission, `trained`: the newest
    policy that the trainer has, and is about to publish.
    Logs as gaps the missing slots that no later step may use, and marks them stale. The last step's batch also queues
    all unvested groups for a second verdict (`standing.settle`).
    """
    locks.exclusive(connection)
    at = progress(connection)
    chosen = _choose(connection, at, spec=spec, now=now, trained=trained)
    if chosen is None:
        return None
    missing = gaps.missing_slots(connection, at, spec=spec)
    step, ids = at.next_step, [row.slot_id for row in chosen]
    connection.execute(update(groups).where(groups.c.slot_id.in_(ids)).values(step=step))
    _settle_slots(connection, ids, SlotState.USED)
    connection.execute(
        insert(steps).values(
            step=step,
            assigned_at=now,
            reward_mean=sum(row.reward_mean for row in chosen) / len(chosen),
            staleness_mean=sum(step - row.version for row in chosen) / len(chosen),
        )
    )
    lost = [slot.id for slot in missing]
    for lease, holder in work.active_leases(connection, lost):
        work.overtake(connection, lease, holder, spec=spec, now=now)
    _settle_slots(connection, lost, SlotState.STALE)
    entry = BatchEntry(
        step=step,
        submissions=tuple(row.submission for row in chosen),
        gaps=tuple(slot.gap for slot in missing),
        missed=gaps.missed_slots(connection, [*ids, *lost]),
    )
    log.append(connection, entry)
    deliveries.count_step(connection, step, entry.missed, spec=spec)
    if step + 1 == spec.training.steps:
        settle(connection, spec=spec, now=now)
    return step


def _settle_slots(connection: Connection, ids: Sequence[int], state: SlotState) -> None:
    settled = connection.execute(update(slots).where(slots.c.id.in_(ids)).values(state=state)).rowcount
    count_final(connection, state, settled)


def _choose(connection: Connection, at: Progress, *, spec: RunSpec, now: float, trained: int) -> list[_Ready] | None:
    """Return the next step's groups in the order of their slots, or None while it has to wait.

    Groups that no later step may use are added even beyond `groups_per_step`, and their pending verifications are
    waited for, so that no admitted group is lost; missing ones are waited for, too, but not for ever (`gaps`). Unused
    groups due for a second verdict block every step.
    """
    step = at.next_step
    if step >= spec.training.steps or at.head < 0 or step > max(at.head, trained):
        return None
    last_chance = at.last_chance(spec.batch)
    pending = select(func.count()).where(slots.c.state == SlotState.SUBMITTED, slots.c.version <= last_chance)
    if connection.execute(pending).scalar_one() or rechecks_due(connection):
        return None
    query = (
        select(groups.c.slot_id, groups.c.submission, groups.c.reward_mean, slots.c.version)
        .join(slots, slots.c.id == groups.c.slot_id)
        .where(groups.c.step.is_(None))
        .order_by(slots.c.version, slots.c.number)
    )
    ready = [_Ready(*row) for row in connection.execute(query)]
    if len(ready) < spec.batch.groups_per_step:
        return None
    if missing_for_next_step(connection, spec=spec, now=now)[0]:
        return None
    if step > at.head and gaps.missing_slots(connection, at, spec=spec):
        return None  # they are waited for from the moment when the policy is published
    return [row for rank, row in enumerate(ready) if rank < spec.batch.groups_per_step or row.version <= last_chance]


def batch(connection: Connection, step: int) -> list[BatchRow]:
    """Return the groups of `step` in training order."""
    query = (
        select(groups.c.submission, groups.c.blob, policies.c.manifest_digest, slots.c.number)
        .join(slots, slots.c.id == groups.c.slot_id)
        .join(policies, policies.c.version == slots.c.version)
        .where(groups.c.step == step)
        .order_by(slots.c.version, slots.c.number)
    )
    return [BatchRow(*row) for row in connection.execute(query)]


def has_batch(connection: Connection, step: int) -> bool:
    """Return whether `step` has a batch."""
    return connection.execute(select(steps.c.step).where(steps.c.step == step)).first() is not None


def finish_step(connection: Connection, step: int, *, stats: dict[str, float], now: float) -> None:
    """Record that the policy of `step` is trained and published."""
    row = update(steps).where(steps.c.step == step, steps.c.finished_at.is_(None))
    connection.execute(row.values(finished_at=now, stats=json.dumps(stats)))


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A policy as announced by the origin; `manifest` is the signed envelope."""

    version: int
    manifest_digest: str
    result_digest: str
    manifest: bytes


def result_digests(connection: Connection) -> dict[int, str]:
    """Return the result digests of all recorded policies, by version."""
    rows = connection.execute(select(policies.c.version, policies.c.result_digest))
    return {row.version: row.result_digest for row in rows}


def published_since(connection: Connection, version: int) -> dict[int, str]:
    """Return the manifest digests, by version, of all recorded policies from the one before `version` on."""
    before = select(func.max(policies.c.version)).where(policies.c.version < version).scalar_subquery()
    first = func.coalesce(before, version)
    rows = connection.execute(select(policies.c.version, policies.c.manifest_digest).where(policies.c.version >= first))
    return {row.version: row.manifest_digest for row in rows}


def newest_version(connection: Connection) -> int | None:
    """Return the newest recorded policy version, None before the first."""
    found: int | None = connection.execute(select(func.max(policies.c.version))).scalar()
    return found


def record_policy(connection: Connection, policy: PolicyRecord, *, now: float) -> None:
    """Record and log `policy` as the newest; idempotent."""
    locks.deciding(connection)
    known = connection.execute(select(policies.c.version).where(policies.c.version == policy.version)).first()
    if known is not None:
        return
    connection.execute(insert(policies).values(asdict(policy) | {"published_at": now}))
    entry = PolicyEntry(
        version=policy.version, manifest_digest=policy.manifest_digest, result_digest=policy.result_digest
    )
    log.append(connection, entry)
