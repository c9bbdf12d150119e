"""Training steps and policies as dashboards and metrics read them; the trainer uses `storage.training`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from coordinator.storage.progress import progress
from coordinator.storage.schema import groups, policies, steps

_STEPS_UNDER_WAY = 16
"""Upper bound of unfinished steps."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A training step; `stats` is JSON, None before it is finished."""

    step: int
    reward_mean: float
    staleness_mean: float
    assigned_at: float
    finished_at: float | None
    stats: str | None


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The mean rewards of a step's groups: their mean, the mean of their squares, lowest and highest."""

    mean: float
    mean_square: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """A policy and its time of publication in Unix seconds."""

    version: int
    published_at: float


_COLUMNS = tuple(steps.c[name] for name in StepRow.__dataclass_fields__)


def finished_steps(connection: Connection) -> int:
    """Return how many steps have published their policy; steps finish in order."""
    newest = select(steps.c.finished_at).order_by(steps.c.step.desc()).limit(_STEPS_UNDER_WAY)
    unfinished = sum(finished_at is None for finished_at in connection.execute(newest).scalars())
    return progress(connection).next_step - unfinished


def newest_steps(connection: Connection, *, most: int) -> list[StepRow]:
    """Return the newest `most` steps, oldest first."""
    rows = connection.execute(select(*_COLUMNS).order_by(steps.c.step.desc()).limit(most)).all()
    return [StepRow(*row) for row in reversed(rows)]


def newest_finished_step(connection: Connection) -> StepRow | None:
    """Return the newest step whose policy is published, None before the first."""
    query = select(*_COLUMNS).where(steps.c.finished_at.is_not(None)).order_by(steps.c.step.desc()).limit(1)
    row = connection.execute(query).first()
    return None if row is None else StepRow(*row)


def steps_with_rewards(
    connection: Connection, first: int, *, most: int
) -> Sequence[tuple[StepRow, GroupRewards | None]]:
    """Return the existing steps of `first` .. `first` + `most` - 1, with None if their groups are unknown."""
    value = groups.c.reward_mean
    rewards = (
        select(
            groups.c.step,
            func.avg(value).label("mean"),
            func.avg(value * value).label("mean_square"),
            func.min(value).label("low"),
            func.max(value).label("high"),
        )
        .where(groups.c.step >= first, groups.c.step < first + most)
        .group_by(groups.c.step)
        .subquery()
    )
    query = (
        select(*_COLUMNS, rewards.c.mean, rewards.c.mean_square, rewards.c.low, rewards.c.high)
        .outerjoin(rewards, rewards.c.step == steps.c.step)
        .where(steps.c.step >= first, steps.c.step < first + most)
        .order_by(steps.c.step)
    )
    width = len(_COLUMNS)
    return [
        (StepRow(*row[:width]), None if row.mean is None else GroupRewards(*row[width:]))
        for row in connection.execute(query)
    ]


def newest_policies(connection: Connection, *, most: int) -> list[PublishedPolicy]:
    """Return the newest `most` policies, oldest first."""
    newest = select(policies.c.version, policies.c.published_at).order_by(policies.c.version.desc()).limit(most)
    return [PublishedPolicy(*row) for row in reversed(connection.execute(newest).all())]


def policies_after(connection: Connection, version: int) -> list[PublishedPolicy]:
    """Return all policies newer than `version`, oldest first."""
    query = select(policies.c.version, policies.c.published_at).where(policies.c.version > version)
    return [PublishedPolicy(*row) for row in connection.execute(query.order_by(policies.c.version))]


def manifest_of(connection: Connection, version: int | None = None) -> bytes | None:
    """Return the signed manifest of a policy, by default the newest; None if there is none."""
    query = select(policies.c.manifest).order_by(policies.c.version.desc()).limit(1)
    found = connection.execute(query if version is None else query.where(policies.c.version == version)).scalar()
    return None if found is None else bytes(found)


def newest_head(connection: Connection) -> tuple[int, str] | None:
    """Return version and manifest digest of the newest policy, None before the first."""
    newest = select(policies.c.version, policies.c.manifest_digest).order_by(policies.c.version.desc()).limit(1)
    row = connection.execute(newest).first()
    return None if row is None else (row.version, row.manifest_digest)


def manifest_digests(connection: Connection, versions: Iterable[int]) -> dict[int, str]:
    """Return the manifest digest of each of these policies, by version."""
    query = select(policies.c.version, policies.c.manifest_digest).where(policies.c.version.in_(list(versions)))
    return {row.version: row.manifest_digest for row in connection.execute(query)}
