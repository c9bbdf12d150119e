"""Generation speed, and the number of slots that fits into a lease.

Slots share one batch, so a slot's duration depends on how many run beside it. A slot's share (its seconds divided by
the average number of slots active meanwhile) is what one more slot adds at worst, on a saturated machine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low
from typing import Final

LEASE_SHARE: Final = 0.5
"""Share of a lease's time that generation may take; the upload needs some, too."""

RATE_SECONDS: Final = 30.0
REMEMBERED_SLOTS: Final = 5
"""Slots whose median counts, so that one outlier (compilation, a hiccup) does not."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A slot's start: the clock, and the slot-seconds spent by all slots until then."""

    at: float
    spent: float


class Speed:
    """Speed of one engine; `tokens` counts since the start of the process."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = 0
        self._clock = clock
        self._began = clock()
        self._under_way = 0
        self._spent = 0.0
        self._counted_at = self._began
        self._shares: deque[float] = deque(maxlen=REMEMBERED_SLOTS)
        self._recent: deque[tuple[float, int]] = deque()

    def begin(self) -> Mark:
        """Start timing a slot and return its mark."""
        if not self._spent and not self._under_way:
            self._began = self._counted_at = self._clock()
        self._count(+1)
        return Mark(at=self._clock(), spent=self._spent)

    def give_up(self) -> None:
        """Forget a slot that ended without a result."""
        self._count(-1)

    def finish(self, mark: Mark, *, tokens: int) -> float:
        """Record a finished slot and return the seconds that it took."""
        self._count(-1)
        now = self._clock()
        seconds = max(now - mark.at, 1e-6)
        beside = max(1.0, (self._spent - mark.spent) / seconds)
        self._shares.append(seconds / beside)
        self.tokens += tokens
        self._recent.append((now, tokens))
        return seconds

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second of the slots that ended in the last RATE_SECONDS."""
        now = self._clock()
        while self._recent and now - self._recent[0][0] > RATE_SECONDS:
            self._recent.popleft()
        span = min(RATE_SECONDS, max(now - self._began, 1.0))
        return sum(tokens for _, tokens in self._recent) / span

    def slots_in_time(self, most: int, *, lease_seconds: float) -> int:
        """Return how many slots may be in progress together, at most `most`; one until the speed is known."""
        if not self._shares:
            return 1
        return int(max(1, min(most, lease_seconds * LEASE_SHARE / median_low(self._shares))))

    def seconds_left(self, mark: Mark) -> float | None:
        """Estimate the seconds until the slot of `mark` finishes, from recent slots; None where that is unknown."""
        if not self._shares:
            return None
        return median_low(self._shares) * self._under_way - (self._clock() - mark.at)

    def _count(self, change: int) -> None:
        now = self._clock()
        self._spent += self._under_way * (now - self._counted_at)
        self._counted_at = now
        self._under_way += change
