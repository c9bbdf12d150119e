"""What the trainer reads and writes: batches, steps and policies (docs/protocol.md, section 8)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select, update

from coordinator.storage import locks, log
from coordinator.storage.schema import SlotState, groups, policies, slots, steps
from coordinator.storage.standing import rechecks_due, settle
from coordinator.storage.work import Progress, progress
from node.protocol.messages import BatchEntry, PolicyEntry
from node.protocol.run import RunSpec


@dataclass(frozen=True, slots=True)
class BatchRow:
    """An admitted group that a step trains on."""

    submission: str
    blob: str
    version: int


@dataclass(frozen=True, slots=True)
class _Ready:
    slot_id: int
    submission: str
    reward_mean: float
    version: int


def may_assign(connection: Connection, *, spec: RunSpec) -> bool:
    """Whether `assign_batch` would find a batch; takes no lock, so the answer may be out of date."""
    return _choose(connection, progress(connection), spec=spec) is not None


def assign_batch(connection: Connection, *, spec: RunSpec, now: float) -> int | None:
    """Give the next step its groups and return its number, or None while there are too few.

    From here on, what is older than the step after may take is stale. With the last step's, everything that was
    measured in part is queued for a second verdict: what is left of the nodes' credit is settled.
    """
    locks.alone(connection)
    at = progress(connection)
    chosen = _choose(connection, at, spec=spec)
    if chosen is None:
        return None
    step, ids = at.next_step, [row.slot_id for row in chosen]
    connection.execute(update(groups).where(groups.c.slot_id.in_(ids)).values(step=step))
    connection.execute(update(slots).where(slots.c.id.in_(ids)).values(state=SlotState.USED))
    connection.execute(
        insert(steps).values(
            step=step,
            assigned_at=now,
            reward_mean=sum(row.reward_mean for row in chosen) / len(chosen),
            staleness_mean=sum(step - row.version for row in chosen) / len(chosen),
        )
    )
    floor = progress(connection).floor(spec.batch)
    abandoned = update(slots).where(slots.c.state.in_((SlotState.OPEN, SlotState.LEASED)), slots.c.version < floor)
    connection.execute(abandoned.values(state=SlotState.STALE))
    log.append(connection, BatchEntry(step=step, submissions=tuple(row.submission for row in chosen)))
    if step + 1 == spec.training.steps:
        settle(connection, spec=spec, now=now)
    return step


def _choose(connection: Connection, at: Progress, *, spec: RunSpec) -> list[_Ready] | None:
    """The next step's groups, the oldest first, or None while it has to wait.

    Groups that no later step could take join this one even beyond `groups_per_step`, and a verification of
    such a group that is under way is waited for, so that nothing admitted is ever thrown away. Nothing is trained on
    while such work of a node that was caught as no step has used waits for its second verdict.
    """
    step = at.next_step
    if step >= spec.training.steps or step > at.head:
        return None
    last_chance = step - spec.batch.max_async
    pending = select(func.count()).where(slots.c.state == SlotState.SUBMITTED, slots.c.version <= last_chance)
    if connection.execute(pending).scalar_one() or rechecks_due(connection):
        return None
    query = (
        select(groups.c.slot_id, groups.c.submission, groups.c.reward_mean, slots.c.version)
        .join(slots, slots.c.id == groups.c.slot_id)
        .where(groups.c.step.is_(None))
        .order_by(slots.c.version, slots.c.id)
    )
    ready = [_Ready(*row) for row in connection.execute(query)]
    if len(ready) < spec.batch.groups_per_step:
        return None
    return [row for rank, row in enumerate(ready) if rank < spec.batch.groups_per_step or row.version <= last_chance]


def batch(connection: Connection, step: int) -> list[BatchRow]:
    """The groups of `step`, in the order in which they are trained on."""
    query = (
        select(groups.c.submission, groups.c.blob, slots.c.version)
        .join(slots, slots.c.id == groups.c.slot_id)
        .where(groups.c.step == step)
        .order_by(slots.c.version, slots.c.id)
    )
    return [BatchRow(*row) for row in connection.execute(query)]


def has_batch(connection: Connection, step: int) -> bool:
    """Whether `step` was given its groups."""
    return connection.execute(select(steps.c.step).where(steps.c.step == step)).first() is not None


def unfinished_step(connection: Connection) -> int | None:
    """The step that has its batch but no result yet, if any."""
    return connection.execute(select(func.min(steps.c.step)).where(steps.c.finished_at.is_(None))).scalar()


def finish_step(connection: Connection, step: int, *, stats: dict[str, float], now: float) -> None:
    """Note that the policy after `step` is trained and published."""
    row = update(steps).where(steps.c.step == step, steps.c.finished_at.is_(None))
    connection.execute(row.values(finished_at=now, stats=json.dumps(stats)))


@dataclass(frozen=True, slots=True)
class Published:
    """A policy as the origin announced it; `manifest` is the signed envelope."""

    version: int
    manifest_digest: str
    result_digest: str
    manifest: bytes


def recorded(connection: Connection) -> dict[int, str]:
    """The result digest of every recorded policy, by version."""
    rows = connection.execute(select(policies.c.version, policies.c.result_digest))
    return {row.version: row.result_digest for row in rows}


def published_since(connection: Connection, version: int) -> dict[int, str]:
    """The manifest digest of the recorded policy before `version`, and of every one from it on, by version."""
    before = select(func.max(policies.c.version)).where(policies.c.version < version).scalar_subquery()
    first = func.coalesce(before, version)
    rows = connection.execute(select(policies.c.version, policies.c.manifest_digest).where(policies.c.version >= first))
    return {row.version: row.manifest_digest for row in rows}


def newest(connection: Connection) -> int | None:
    """The version of the newest recorded policy, None before the first."""
    found: int | None = connection.execute(select(func.max(policies.c.version))).scalar()
    return found


def record_policy(connection: Connection, policy: Published, *, now: float) -> None:
    """Make `policy` the run's newest; does nothing if it was recorded before."""
    locks.deciding(connection)
    known = connection.execute(select(policies.c.version).where(policies.c.version == policy.version)).first()
    if known is not None:
        return
    connection.execute(
        insert(policies).values(
            version=policy.version,
            manifest_digest=policy.manifest_digest,
            result_digest=policy.result_digest,
            manifest=policy.manifest,
            published_at=now,
        )
    )
    entry = PolicyEntry(
        version=policy.version, manifest_digest=policy.manifest_digest, result_digest=policy.result_digest
    )
    log.append(connection, entry)
