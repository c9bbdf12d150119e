"""How a run's reward has changed: one definition for the pages, the terminal, the report and the benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

END_STEPS: Final = 5
"""How many steps at either end the reward is a mean over; half of those there are, while there are fewer than twice."""


@dataclass(frozen=True, slots=True)
class RewardFigure:
    """The mean reward of the first and of the last `steps` steps."""

    first: float
    last: float
    steps: int

    @property
    def change(self) -> float:
        return self.last - self.first

    @property
    def span(self) -> str:
        """Name the steps that it is of."""
        return "step" if self.steps == 1 else f"{self.steps} steps"


def reward_figure(rewards: Sequence[float]) -> RewardFigure | None:
    """Return the figure of the mean rewards of a run's steps, in order; None before the first."""
    if not rewards:
        return None
    steps = max(1, min(END_STEPS, len(rewards) // 2))
    return RewardFigure(statistics.fmean(rewards[:steps]), statistics.fmean(rewards[-steps:]), steps)
