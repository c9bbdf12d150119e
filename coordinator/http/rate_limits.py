"""How often one network and one identity may ask: token buckets in tables of bounded size."""

from __future__ import annotations

import ipaddress
import math
import threading
from collections import OrderedDict

from node.protocol.reasons import Reason, Refusal
from shardcast.rate_limit import TokenBucket

MAX_BUCKETS = 50_000
"""Some 15 MB. Whoever is forgotten starts anew, which takes so many others within the minute that refills a bucket."""

_IPV6_PREFIX = 64


class TooManyRequests(Refusal):
    """Refused for now; the same request is welcome after `retry_after_seconds`."""

    def __init__(self, detail: str, *, retry_after_seconds: int) -> None:
        super().__init__(Reason.TOO_MANY_REQUESTS, detail)
        self.retry_after_seconds = retry_after_seconds


class RateLimiter:
    """A token bucket for each key, which holds a minute's worth; the least recently seen key is forgotten first."""

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
    """By network address; of IPv6 by /64, since whoever has one address has all of those."""

    def __init__(self, *, per_minute: int) -> None:
        super().__init__(per_minute=per_minute, who="address")

    def peek(self, key: str, *, now: float) -> None:
        super().peek(network_of(key), now=now)

    def check(self, key: str, *, now: float) -> None:
        super().check(network_of(key), now=now)


def address_in(text: str) -> str:
    """An address in its usual form, of IPv4 also where it was mapped into IPv6; "" for what is none."""
    try:
        parsed = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def network_of(address: str) -> str:
    """What counts as one address: an IPv4 address, an IPv6 /64; all that is no address, such as "", counts as one."""
    alone = address_in(address)
    return str(ipaddress.IPv6Network((alone, _IPV6_PREFIX), strict=False)) if ":" in alone else alone
