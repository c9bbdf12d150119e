"""Rate limits per network and per node: token buckets in tables of bounded size."""

from __future__ import annotations

from node.protocol.reasons import Reason, Refusal
from shardcast.rate_limit import TokenBuckets, network_of


class TooManyRequests(Refusal):
    """Rate limit exceeded; retry the same request after `retry_after_seconds`."""

    def __init__(self, detail: str, *, retry_after_seconds: int) -> None:
        super().__init__(Reason.TOO_MANY_REQUESTS, detail)
        self.retry_after_seconds = retry_after_seconds


class OverloadRefusal(TooManyRequests):
    """Refused for what others ask for, not for what the client did: it may keep its connection for the retry."""


class RateLimiter:
    """Rate limiter by key (`TokenBuckets`); `who` names a key in refusals."""

    def __init__(self, *, per_minute: int, who: str) -> None:
        self._buckets = TokenBuckets(per_minute=per_minute)
        self._per_minute, self._who = per_minute, who

    def __len__(self) -> int:
        return len(self._buckets)

    def peek(self, key: str, *, now: float) -> None:
        """Raise TooManyRequests if there is no token. `now` is a monotonic time in seconds."""
        self._check(self._buckets.wait(key, now=now))

    def check(self, key: str, *, now: float) -> None:
        """Take a token; raises TooManyRequests if there is none. `now` is a monotonic time in seconds."""
        self._check(self._buckets.take(key, now=now))

    def _check(self, wait_s: int) -> None:
        if wait_s:
            detail = f"More than {self._per_minute} requests a minute from one {self._who}."
            raise TooManyRequests(detail, retry_after_seconds=wait_s)


class AddressLimiter(RateLimiter):
    """Rate limiter by network (`network_of`)."""

    def __init__(self, *, per_minute: int) -> None:
        super().__init__(per_minute=per_minute, who="address")

    def peek(self, key: str, *, now: float) -> None:
        super().peek(network_of(key), now=now)

    def check(self, key: str, *, now: float) -> None:
        super().check(network_of(key), now=now)
