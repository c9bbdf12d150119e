"""The token bucket behind every rate limit on peers; the clock is passed in.

`shardcast.serve.pacing` is no bucket: it orders bytes of uploads, and lets nobody burst.
"""

from __future__ import annotations


class TokenBucket:
    """Token bucket: `rate` tokens a second, up to `burst`, full at first. `now` is any monotonic clock in seconds."""

    __slots__ = ("_burst", "_rate", "_refilled_at", "_tokens")

    def __init__(self, *, rate: float, burst: float, now: float = 0.0) -> None:
        self._rate, self._burst, self._tokens, self._refilled_at = rate, burst, float(burst), now

    def available(self, now: float) -> float:
        """Return how many tokens there are, less than 0 after `take_or_owe`."""
        return min(self._burst, self._tokens + max(0.0, now - self._refilled_at) * self._rate)

    def try_take(self, now: float) -> bool:
        """Take a token if there is one; return whether there was. A refusal costs nothing."""
        tokens = self.available(now)
        taken = tokens >= 1
        self._tokens, self._refilled_at = tokens - taken, now
        return taken

    def take_or_owe(self, now: float) -> float:
        """Take a token in any case; return after how many seconds it would have been there."""
        self._tokens, self._refilled_at = self.available(now) - 1, now
        return max(0.0, -self._tokens / self._rate)
