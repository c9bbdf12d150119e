"""Steps and policies as they are added, remembered by each process: nothing of the past is read twice."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, func, select

from coordinator.curves import kept_stats
from coordinator.storage.schema import groups, policies, steps

READ_AT_ONCE: Final = 500
REREAD: Final = 2
"""A step's own row changes once more after it was begun, when its policy is published."""


@dataclass(frozen=True, slots=True)
class Step:
    """A training step: the mean over its groups' mean rewards, and their standard deviation, lowest and highest.

    `stats` are those of which there are curves.
    """

    step: int
    reward: float
    spread: float
    low: float
    high: float
    staleness: float
    assigned_at: float
    finished_at: float | None
    stats: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    version: int
    published_at: float


@dataclass(slots=True)
class History:
    """What is known of a run's steps and policies; safe to use from several threads."""

    _steps: dict[int, Step] = field(default_factory=dict)
    _policies: list[PublishedPolicy] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def steps(self, connection: Connection) -> list[Step]:
        """All of them, in their order."""
        with self._lock:
            first = max(0, len(self._steps) - REREAD)
            while self._read_steps(connection, first) == READ_AT_ONCE:
                first += READ_AT_ONCE
            return list(self._steps.values())

    def _read_steps(self, connection: Connection, first: int) -> int:
        value = groups.c.reward_mean
        spread = (
            select(
                groups.c.step,
                func.avg(value).label("mean"),
                func.avg(value * value).label("square"),
                func.min(value).label("low"),
                func.max(value).label("high"),
            )
            .where(groups.c.step >= first, groups.c.step < first + READ_AT_ONCE)
            .group_by(groups.c.step)
            .subquery()
        )
        query = (
            select(steps, spread.c.mean, spread.c.square, spread.c.low, spread.c.high)
            .outerjoin(spread, spread.c.step == steps.c.step)
            .where(steps.c.step >= first, steps.c.step < first + READ_AT_ONCE)
            .order_by(steps.c.step)
        )
        rows = connection.execute(query).all()
        for row in rows:
            known = row.mean is not None
            self._steps[row.step] = Step(
                step=row.step,
                reward=row.reward_mean,
                spread=math.sqrt(max(0.0, row.square - row.mean**2)) if known else 0.0,
                low=row.low if known else row.reward_mean,
                high=row.high if known else row.reward_mean,
                staleness=row.staleness_mean,
                assigned_at=row.assigned_at,
                finished_at=row.finished_at,
                stats={**kept_stats(row.stats), "staleness": row.staleness_mean},
            )
        return len(rows)

    def policies(self, connection: Connection) -> list[PublishedPolicy]:
        """All of them, in their order."""
        with self._lock:
            last = self._policies[-1].version if self._policies else -1
            query = select(policies.c.version, policies.c.published_at).where(policies.c.version > last)
            for row in connection.execute(query.order_by(policies.c.version)):
                self._policies.append(PublishedPolicy(row.version, row.published_at))
            return list(self._policies)
