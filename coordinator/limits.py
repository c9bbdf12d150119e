"""Bounds on what one network address may ask for."""

from __future__ import annotations

from collections import OrderedDict

from node.protocol.reasons import Reason, Refusal

MAX_ADDRESSES = 10_000


class AddressLimiter:
    """A token bucket for each address; the least recently seen address is forgotten first."""

    def __init__(self, *, per_minute: int) -> None:
        self._capacity = float(per_minute)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def check(self, address: str, *, now: float) -> None:
        """Take one token; raises Refusal when there is none. `now` is a monotonic time in seconds."""
        tokens, seen = self._buckets.pop(address, (self._capacity, now))
        tokens = min(self._capacity, tokens + (now - seen) * self._capacity / 60)
        allowed = tokens >= 1
        self._buckets[address] = (tokens - 1 if allowed else tokens, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        if not allowed:
            raise Refusal(Reason.TOO_MANY_REQUESTS, f"More than {self._capacity:.0f} a minute from one address.")
