"""Source selection: measured success and bandwidth, recovery over time, and quarantine for liars.

After SHARDCAST (arXiv 2505.07291): sources are drawn with probability proportional to the exponential moving averages
of success times bandwidth. Unlike shardcast 0.3.2, a failure never raises the bandwidth. Failures decay with time, and
no usable source falls below a small share of the draws, so a recovered relay is noticed. With the trees of
`shardcast.tree`, chunk i is requested from the candidates of stripe i mod k in their order, and from others only when
those fail or lag. No IO: the clock and the random numbers are passed in.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from shardcast.errors import LocalFault, NetworkFault, PeerFault, ShardcastError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """Parameters of source selection. `smoothing` is the weight of the newest sample.

    The chunks in flight from a source share its link, so a hop takes as long as `per_source` of them: with 3 it costs a
    fifth less than with 4. But a link whose round trip is 2.4 times a chunk's time is filled to 95 % by 4, 86 % by 3
    and 60 % by 2, and with 3 the origin of striped trees sends 1.24 versions in place of 1.15.
    """

    per_source: int = 4
    smoothing: float = 0.25
    healing_half_life_s: float = 30.0
    min_share: float = 0.02
    first_backoff_s: float = 0.1
    max_backoff_s: float = 10.0
    first_quarantine_s: float = 10.0
    max_quarantine_s: float = 3600.0


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

    def back_off(self, now: float, limits: SourceLimits, rng: random.Random) -> None:
        delay_s = min(limits.max_backoff_s, limits.first_backoff_s * 2.0**self._consecutive)
        self._consecutive = min(self._consecutive + 1, 32)
        self.usable_at = now + delay_s * rng.uniform(0.5, 1.5)

    def served(self) -> None:
        self._consecutive = 0


class Sources:
    """A mutable set of sources; a URL keeps its measurements while it stays in the set."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        limits: SourceLimits = DEFAULT_SOURCE_LIMITS,
        rng: random.Random | None = None,
    ) -> None:
        self.limits = limits
        self._rng = rng or random.Random()
        self._sources: dict[str, Source] = {}
        self._stripes: tuple[tuple[str, ...], ...] = ()
        self.set_urls(urls)

    def set_urls(self, urls: Iterable[str], *, stripes: Iterable[Iterable[str]] = ()) -> None:
        """Replace the set: `urls`, and per stripe the candidates for its chunks in order of preference.

        Without stripes every source may serve every chunk. Raises LocalFault "bad_url" and then changes nothing.
        """
        candidates = tuple(tuple(normalise_url(url) for url in urls_of_stripe) for urls_of_stripe in stripes)
        wanted = [
            *(url for urls_of_stripe in candidates for url in urls_of_stripe),
            *(normalise_url(url) for url in urls),
        ]
        self._sources = {url: self._sources.get(url) or Source(url) for url in wanted}
        self._stripes = candidates if all(candidates) else ()

    @property
    def stripes(self) -> int:
        """Number of stripes that chunk indices are divided into; at least 1."""
        return max(1, len(self._stripes))

    @property
    def urls(self) -> list[str]:
        return list(self._sources)

    def usable(self, now: float) -> list[str]:
        """List URLs neither quarantined nor backing off, most promising first."""
        ready = [source for source in self._sources.values() if self._is_ready(source, now)]
        return [source.url for source in sorted(ready, key=lambda source: -self._weight(source, now))]

    def parent(self, stripe: int, now: float) -> str | None:
        """Choose the source for a chunk of a stripe: its first usable candidate, or None while that is busy.

        Without stripes or usable candidates, draws any usable source.
        """
        for url in self._stripes[stripe % len(self._stripes)] if self._stripes else ():
            source = self._sources[url]
            if self._is_ready(source, now):
                return url if source.in_flight < self.limits.per_source else None
        return self.draw(now)

    def helper(self, stripe: int, now: float, *, exclude: Collection[str] = ()) -> str | None:
        """Choose a source to help a lagging parent: another free candidate of the stripe, else any drawn one."""
        for url in self._stripes[stripe % len(self._stripes)] if self._stripes else ():
            source = self._sources[url]
            if url not in exclude and source.in_flight < self.limits.per_source and self._is_ready(source, now):
                return url
        return self.draw(now, exclude=exclude)

    def draw(self, now: float, *, exclude: Collection[str] = ()) -> str | None:
        """Draw a usable source with a free slot by weight; None if there is none."""
        ready = [
            source
            for source in self._sources.values()
            if source.url not in exclude and source.in_flight < self.limits.per_source and self._is_ready(source, now)
        ]
        if not ready:
            return None
        weights = [self._weight(source, now) for source in ready]
        floor = self.limits.min_share * max(weights)
        return self._rng.choices(ready, [max(weight, floor) for weight in weights])[0].url

    def in_use(self) -> int:
        """Count the sources with requests in flight."""
        return sum(source.in_flight > 0 for source in self._sources.values())

    def next_usable_at(self) -> float | None:
        """Return when the first source leaves backoff or quarantine (monotonic seconds); None without sources."""
        times = [max(source.usable_at, source.quarantined_until) for source in self._sources.values()]
        return min(times, default=None)

    def last_error(self) -> ShardcastError | None:
        """Return the most telling recent error: a lie before a failure."""
        errors = [source.last_error for source in self._sources.values() if source.last_error is not None]
        return next((error for error in errors if isinstance(error, PeerFault)), errors[0] if errors else None)

    # -- outcomes

    def started(self, url: str) -> None:
        if (source := self._sources.get(url)) is not None:
            source.in_flight += 1

    def answered(self, url: str) -> None:
        """Record a response: a source that is reachable again may be polled at once."""
        if (source := self._sources.get(url)) is not None:
            source.usable_at = 0.0
            source.served()

    def finished(self, url: str) -> None:
        if (source := self._sources.get(url)) is not None:
            source.in_flight = max(0, source.in_flight - 1)

    def succeeded(self, url: str, *, received_bytes: int, seconds: float, now: float) -> None:
        """Record a verified transfer; `seconds` counts from the request, waiting included."""
        if (source := self._sources.get(url)) is None:
            return
        source.bytes_received += received_bytes
        source.sample_bandwidth(received_bytes / max(seconds, 1e-6), self.limits)
        source.sample_success(1.0, now, self.limits)
        source.served()

    def lost_race(self, url: str, now: float) -> None:
        """Record that another source, requested later, delivered first."""
        if (source := self._sources.get(url)) is not None:
            source.sample_success(0.0, now, self.limits)

    def failed(self, url: str, error: ShardcastError, now: float) -> None:
        """Record a failed request: a lie leads to quarantine, anything else to backoff."""
        if (source := self._sources.get(url)) is None:
            return
        source.failures += 1
        source.last_error = error
        source.sample_success(0.0, now, self.limits)
        if isinstance(error, NetworkFault):
            source.back_off(now, self.limits, self._rng)
        else:
            self._quarantine(source, error, now)

    def status(self, now: float) -> list[dict[str, Any]]:
        """Describe each source as a JSON-ready row."""
        return [self._describe(source, now) for source in self._sources.values()]

    def _quarantine(self, source: Source, error: ShardcastError, now: float) -> None:
        if now < source.quarantined_until:
            return  # requests in flight at the time count as one offence
        seconds = min(self.limits.max_quarantine_s, self.limits.first_quarantine_s * 2.0**source.offences)
        source.offences = min(source.offences + 1, 32)
        source.quarantined_until = now + seconds
        source.quarantine_reason = error

    def _is_ready(self, source: Source, now: float) -> bool:
        return now >= source.usable_at and now >= source.quarantined_until

    def _weight(self, source: Source, now: float) -> float:
        known = [other.bytes_per_s for other in self._sources.values() if other.bytes_per_s is not None]
        # Optimistic start: an unknown source is weighted like the best, or it would never be measured.
        bandwidth = source.bytes_per_s if source.bytes_per_s is not None else max(known, default=1.0)
        return bandwidth * max(source.success(now, self.limits.healing_half_life_s), 1e-3)

    def _describe(self, source: Source, now: float) -> dict[str, Any]:
        quarantined = now < source.quarantined_until
        state = "quarantined" if quarantined else "ok" if now >= source.usable_at else "backing_off"
        error = source.quarantine_reason if quarantined else source.last_error
        return {
            "url": source.url,
            "state": state,
            "code": None if error is None else error.code,
            "reason": None if error is None else str(error),
            "success": round(source.success(now, self.limits.healing_half_life_s), 4),
            "bytes_per_s": None if source.bytes_per_s is None else round(source.bytes_per_s),
            "bytes_received": source.bytes_received,
            "failures": source.failures,
            "offences": source.offences,
            "in_flight": source.in_flight,
        }


def normalise_url(url: str) -> str:
    """Strip a trailing slash from `url`; raises LocalFault "bad_url" for anything but http(s)://host[:port][/path]."""
    try:
        parts = urlsplit(url.strip())
        valid = parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise LocalFault(f"{url!r} is not a valid source URL: use http://host:port", code="bad_url")
    return url.strip().rstrip("/")
