"""One source of chunks: its measured success and bandwidth, its backoff after failures and quarantine after lies.

No IO: the clock and the random numbers are passed in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from shardcast.errors import ShardcastError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """Parameters of source selection. `smoothing` is the weight of the newest sample.

    The chunks in flight from a source share its link, so a hop takes as long as `per_source` of them: with 3 it costs a
    fifth less than with 4. But a link whose round trip is 2.4 times a chunk's time is filled to 95 % by 4, 86 % by 3
    and 60 % by 2, and with 3 the origin of striped trees sends 1.24 versions in place of 1.15.
    """

    per_source: int = 4
    unproven_in_flight: int = 2
    smoothing: float = 0.25
    healing_half_life_s: float = 30.0
    min_share: float = 0.02
    first_backoff_s: float = 0.1
    max_backoff_s: float = 10.0
    first_quarantine_s: float = 10.0
    max_quarantine_s: float = 3600.0
    lag_s: float = 4.0
    """How long a stripe's parent may answer that it has no chunk yet before the next candidate is asked."""


DEFAULT_SOURCE_LIMITS = SourceLimits()


@dataclass(slots=True)
class Source:
    """Measurements of one URL. Times are monotonic seconds."""

    url: str
    bytes_per_s: float | None = None
    in_flight: int = 0
    bytes_received: int = 0
    failures: int = 0
    offences: int = 0
    usable_at: float = 0.0
    quarantined_until: float = 0.0
    last_error: ShardcastError | None = None
    quarantine_reason: ShardcastError | None = None
    is_proven: bool = False
    has_answered: bool = False
    is_late: bool = False
    failed_chunks: int = 0
    lags_since: float | None = None
    _consecutive: int = 0
    _distrust: float = 0.0
    _distrust_at: float = field(default=0.0)

    def success(self, now: float, half_life_s: float) -> float:
        """Return the moving average of success in 0..1, recovering to 1 with the half-life."""
        healed: float = 0.5 ** ((now - self._distrust_at) / half_life_s)
        return 1.0 - self._distrust * healed

    def sample_success(self, outcome: float, now: float, limits: SourceLimits) -> None:
        current = self.success(now, limits.healing_half_life_s)
        self._distrust = 1.0 - (current + limits.smoothing * (outcome - current))
        self._distrust_at = now

    def sample_bandwidth(self, bytes_per_s: float, limits: SourceLimits) -> None:
        if self.bytes_per_s is None:
            self.bytes_per_s = bytes_per_s
        else:
            self.bytes_per_s += limits.smoothing * (bytes_per_s - self.bytes_per_s)

    def back_off(self, now: float, limits: SourceLimits, rng: random.Random, *, refusals: int | None = None) -> None:
        """Pause for twice as long as after the failure before, or as `refusals` before this one say."""
        failures = self._consecutive if refusals is None else refusals
        if refusals is None:
            self._consecutive = min(self._consecutive + 1, 32)
        delay_s = min(limits.max_backoff_s, limits.first_backoff_s * 2.0 ** min(failures, 32))
        self.usable_at = now + delay_s * rng.uniform(0.5, 1.5)

    def served(self) -> None:
        self._consecutive = 0

    @property
    def ready_at(self) -> float:
        """When backoff and quarantine are over."""
        return max(self.usable_at, self.quarantined_until)

    def quarantine(self, error: ShardcastError, now: float, limits: SourceLimits) -> None:
        """Exclude the source for a lie, for twice as long each time."""
        if now < self.quarantined_until:
            return  # requests in flight at the time count as one offence
        seconds = min(limits.max_quarantine_s, limits.first_quarantine_s * 2.0**self.offences)
        self.offences = min(self.offences + 1, 32)
        self.quarantined_until = now + seconds
        self.quarantine_reason = error

    def inherit_quarantine(self, before: Source) -> None:
        """Take over the offences of an earlier source with this URL."""
        self.offences, self.quarantined_until = before.offences, before.quarantined_until
        self.quarantine_reason = before.quarantine_reason

    def is_ready(self, now: float) -> bool:
        """Return whether backoff and quarantine are over."""
        return now >= self.ready_at

    def lags(self, now: float, limits: SourceLimits) -> bool:
        """Return whether it has answered for too long that it has no chunk yet."""
        return self.lags_since is not None and now - self.lags_since > limits.lag_s

    def describe(self, now: float, limits: SourceLimits) -> dict[str, Any]:
        """Return the measurements as a JSON-ready row."""
        quarantined = now < self.quarantined_until
        state = "quarantined" if quarantined else "ok" if now >= self.usable_at else "backing_off"
        error = self.quarantine_reason if quarantined else self.last_error
        return {
            "url": self.url,
            "state": state,
            "code": None if error is None else error.code,
            "reason": None if error is None else str(error),
            "success": round(self.success(now, limits.healing_half_life_s), 4),
            "bytes_per_s": None if self.bytes_per_s is None else round(self.bytes_per_s),
            "bytes_received": self.bytes_received,
            "failures": self.failures,
            "offences": self.offences,
            "in_flight": self.in_flight,
        }
