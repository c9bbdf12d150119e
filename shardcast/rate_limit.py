"""Token buckets behind every rate limit on peers, one or many by key; the clock is passed in.

`shardcast.serve.pacing` is no bucket: it orders bytes of uploads, and lets nobody burst.
"""

from __future__ import annotations

import ipaddress
import math
import threading
from collections import OrderedDict
from functools import lru_cache

MAX_BUCKETS = 50_000
"""About 15 MB. Evicting a client's bucket takes as many others within the minute in which it refills anyway."""

LONGEST_ADDRESS = 64
"""Characters; nothing longer is an address, and none is kept."""

_IPV6_PREFIX = 64


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


class TokenBuckets:
    """One bucket per key, of one minute's requests; the least recently used is evicted first. Thread-safe."""

    def __init__(self, *, per_minute: int) -> None:
        self._capacity = float(per_minute)
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait(self, key: str, *, now: float) -> int:
        """Return the seconds until there is a token, 0 if there is one."""
        bucket = self._buckets.get(key)
        return 0 if bucket is None else self._wait(bucket.available(now))

    def take(self, key: str, *, now: float) -> int:
        """Take a token and return 0; without one, return the seconds until there is one."""
        with self._lock:
            bucket = self._buckets.get(key)
            if bucket is None:
                bucket = self._buckets[key] = TokenBucket(rate=self._capacity / 60, burst=self._capacity, now=now)
            self._buckets.move_to_end(key)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
            return 0 if bucket.try_take(now) else self._wait(bucket.available(now))

    def _wait(self, tokens: float) -> int:
        return 0 if tokens >= 1 else math.ceil((1 - tokens) * 60 / self._capacity)


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
