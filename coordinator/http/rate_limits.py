"""Rate limits per network and per node: token buckets in tables of bounded size."""

from __future__ import annotations

import ipaddress
import math
import threading
from collections import OrderedDict
from functools import lru_cache

from node.protocol.reasons import Reason, Refusal
from shardcast.rate_limit import TokenBucket

MAX_BUCKETS = 50_000
"""About 15 MB. Evicting a client's bucket takes as many others within the minute in which it refills anyway."""

LONGEST_ADDRESS = 64
"""Characters; nothing longer is an address, and none is kept."""

_IPV6_PREFIX = 64


class TooManyRequests(Refusal):
    """Rate limit exceeded; retry the same request after `retry_after_seconds`."""

    def __init__(self, detail: str, *, retry_after_seconds: int) -> None:
        super().__init__(Reason.TOO_MANY_REQUESTS, detail)
        self.retry_after_seconds = retry_after_seconds


class RateLimiter:
    """One token bucket per key, of one minute's requests; the least recently used is evicted first.

    `who` names a key in refusals.
    """

    def __init__(self, *, per_minute: int, who: str) -> None:
        self._capacity = float(per_minute)
        self._who = who
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._buckets)

    def peek(self, key: str, *, now: float) -> None:
        """Raise TooManyRequests if there is no token. `now` is a monotonic time in seconds."""
        bucket = self._buckets.get(key)
        tokens = self._capacity if bucket is None else bucket.available(now)
        if tokens < 1:
            raise self._refusal(tokens)

    def check(self, key: str, *, now: float) -> None:
        """Take a token; raises TooManyRequests if there is none. `now` is a monotonic time in seconds."""
        with self._lock:
            bucket = self._buckets.get(key)
            if bucket is None:
                bucket = self._buckets[key] = TokenBucket(rate=self._capacity / 60, burst=self._capacity, now=now)
            self._buckets.move_to_end(key)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
            taken = bucket.try_take(now)
        if not taken:
            raise self._refusal(bucket.available(now))

    def _refusal(self, tokens: float) -> TooManyRequests:
        wait = math.ceil((1 - tokens) * 60 / self._capacity)
        detail = f"More than {self._capacity:.0f} requests a minute from one {self._who}."
        return TooManyRequests(detail, retry_after_seconds=wait)


class AddressLimiter(RateLimiter):
    """Rate limiter by network (`network_of`)."""

    def __init__(self, *, per_minute: int) -> None:
        super().__init__(per_minute=per_minute, who="address")

    def peek(self, key: str, *, now: float) -> None:
        super().peek(network_of(key), now=now)

    def check(self, key: str, *, now: float) -> None:
        super().check(network_of(key), now=now)


def canonical_address(text: str) -> str:
    """Return an IP address in canonical form, IPv4-mapped ones as IPv4; "" if `text` is none."""
    try:
        parsed = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def network_of(address: str) -> str:
    """Return what limits count as one client: an IPv4 address, an IPv6 /64, or "" for anything invalid."""
    return _network_of(address) if len(address) <= LONGEST_ADDRESS else ""


@lru_cache(maxsize=8192)
def _network_of(address: str) -> str:
    """As `network_of`: it is asked for several times a request, and takes 13 µs."""
    canonical = canonical_address(address)
    return str(ipaddress.IPv6Network((canonical, _IPV6_PREFIX), strict=False)) if ":" in canonical else canonical
