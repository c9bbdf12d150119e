"""Incremental in-memory cache of a run's steps and policies."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from coordinator.metrics.curves import curve_stats, is_idle
from coordinator.storage.database import Connection
from coordinator.storage.steps import PublishedPolicy, policies_after, steps_with_rewards

READ_AT_ONCE: Final = 500
REREAD: Final = 2
"""Newest steps to read again until they are finished: a step's row changes when its policy is published."""


@dataclass(frozen=True, slots=True)
class Step:
    """A training step: mean, standard deviation, minimum and maximum of its groups' mean rewards, and curve stats.

    One that `is_idle` trained nothing, since all groups were of one reward throughout.
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
    is_idle: bool


@dataclass(slots=True)
class History:
    """The steps and policies read so far; thread-safe."""

    _steps: dict[int, Step] = field(default_factory=dict)
    _policies: list[PublishedPolicy] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def steps(self, connection: Connection) -> list[Step]:
        """Return all steps in order, reading new ones."""
        with self._lock:
            first = max(0, len(self._steps) - REREAD)
            while first in self._steps and self._steps[first].finished_at is not None:
                first += 1  # its rewards are a read of each of its groups
            while self._read_steps(connection, first) == READ_AT_ONCE:
                first += READ_AT_ONCE
            return list(self._steps.values())

    def _read_steps(self, connection: Connection, first: int) -> int:
        rows = steps_with_rewards(connection, first, most=READ_AT_ONCE)
        for row, rewards in rows:
            self._steps[row.step] = Step(
                step=row.step,
                reward=row.reward_mean,
                spread=math.sqrt(max(0.0, rewards.mean_square - rewards.mean**2)) if rewards else 0.0,
                low=rewards.low if rewards else row.reward_mean,
                high=rewards.high if rewards else row.reward_mean,
                staleness=row.staleness_mean,
                assigned_at=row.assigned_at,
                finished_at=row.finished_at,
                stats={**curve_stats(row.stats), "staleness": row.staleness_mean},
                is_idle=is_idle(row.stats),
            )
        return len(rows)

    def policies(self, connection: Connection) -> list[PublishedPolicy]:
        """Return all policies in order, reading new ones."""
        with self._lock:
            last = self._policies[-1].version if self._policies else -1
            self._policies.extend(policies_after(connection, last))
            return list(self._policies)
