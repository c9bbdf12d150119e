"""Which source to ask next: measured success and bandwidth, healing, and quarantine for liars.

After SHARDCAST (arXiv 2505.07291): sources are drawn with probability proportional to the exponential
moving averages of success times bandwidth. Unlike shardcast 0.3.2, a failure never raises the bandwidth. Failures
are forgotten with time, and no usable source falls below a small share of the draws, so a relay that
recovers is noticed. Where the trees of `shardcast.tree` say whom to ask, chunk i is asked of the candidates of
stripe i mod k in their order, and of anybody else only where they fail or lag. No IO: the clock and the random
numbers are passed in.
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
    """How sources are judged. `smoothing` is the weight of the newest sample.

    The chunks of a source share its link, so that a hop takes as long as `per_source` of them: with 3 it costs a fifth
    less than with 4. But a link whose round trip is 2.4 times a chunk's time is filled to 95 % by 4, 86 % by 3 and
    60 % by 2, and with 3 the origin of striped trees sends 1.24 versions in place of 1.15.
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
    """One URL and what was measured of it. Times are monotonic seconds."""

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
        """Moving average of success in 0..1, drifting back to 1 with the half-life."""
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
        """Replace the set: `urls`, and for each stripe the candidates for its chunks, the first one first.

        Without stripes every source may be asked for every chunk. Raises LocalFault "bad_url" and then changes nothing.
        """
        candidates = tuple(tuple(normalise_url(url) for url in each) for each in stripes)
        wanted = [*(url for each in candidates for url in each), *(normalise_url(url) for url in urls)]
        self._sources = {url: self._sources.get(url) or Source(url) for url in wanted}
        self._stripes = candidates if all(candidates) else ()

    @property
    def stripes(self) -> int:
        """Into how many the chunks are divided by their index; at least 1."""
        return max(1, len(self._stripes))

    @property
    def urls(self) -> list[str]:
        return list(self._sources)

    def usable(self, now: float) -> list[str]:
        """URLs neither quarantined nor backing off, the most promising first."""
        ready = [source for source in self._sources.values() if self._is_ready(source, now)]
        return [source.url for source in sorted(ready, key=lambda source: -self._weight(source, now))]

    def parent(self, stripe: int, now: float) -> str | None:
        """Whom to ask for a chunk of a stripe: its first usable candidate, or None while that one is busy.

        Where there are no stripes, or none of the candidates is usable, whoever is drawn.
        """
        for url in self._stripes[stripe % len(self._stripes)] if self._stripes else ():
            source = self._sources[url]
            if self._is_ready(source, now):
                return url if source.in_flight < self.limits.per_source else None
        return self.draw(now)

    def helper(self, stripe: int, now: float, *, exclude: Collection[str] = ()) -> str | None:
        """Whom to ask when the parent lags: another candidate of the stripe with a free slot, or whoever is drawn."""
        for url in self._stripes[stripe % len(self._stripes)] if self._stripes else ():
            source = self._sources[url]
            if url not in exclude and source.in_flight < self.limits.per_source and self._is_ready(source, now):
                return url
        return self.draw(now, exclude=exclude)

    def draw(self, now: float, *, exclude: Collection[str] = ()) -> str | None:
        """A usable source with a free slot, drawn by weight; None if there is none."""
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
        """How many sources are being fetched from at this moment."""
        return sum(source.in_flight > 0 for source in self._sources.values())

    def next_usable_at(self) -> float | None:
        """When the first source that backs off or is quarantined may be asked again; None without sources."""
        times = [max(source.usable_at, source.quarantined_until) for source in self._sources.values()]
        return min(times, default=None)

    def last_error(self) -> ShardcastError | None:
        """The most telling recent error: a lie before a failure."""
        errors = [source.last_error for source in self._sources.values() if source.last_error is not None]
        return next((error for error in errors if isinstance(error, PeerFault)), errors[0] if errors else None)

    # -- what happened

    def started(self, url: str) -> None:
        if (source := self._sources.get(url)) is not None:
            source.in_flight += 1

    def answered(self, url: str) -> None:
        """It is there again: whoever backed off from a source that was away may ask it at once."""
        if (source := self._sources.get(url)) is not None:
            source.usable_at = 0.0
            source.served()

    def ended(self, url: str) -> None:
        if (source := self._sources.get(url)) is not None:
            source.in_flight = max(0, source.in_flight - 1)

    def succeeded(self, url: str, *, received_bytes: int, seconds: float, now: float) -> None:
        """A verified transfer; `seconds` counts from the request, waiting included."""
        if (source := self._sources.get(url)) is None:
            return
        source.bytes_received += received_bytes
        source.sample_bandwidth(received_bytes / max(seconds, 1e-6), self.limits)
        source.sample_success(1.0, now, self.limits)
        source.served()

    def lost_race(self, url: str, now: float) -> None:
        """Another source delivered first although it was asked later."""
        if (source := self._sources.get(url)) is not None:
            source.sample_success(0.0, now, self.limits)

    def failed(self, url: str, error: ShardcastError, now: float) -> None:
        """A failed request: lies lead to quarantine, everything else to backing off."""
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
        """One JSON-ready row per source, for people and metrics."""
        return [self._describe(source, now) for source in self._sources.values()]

    def _quarantine(self, source: Source, error: ShardcastError, now: float) -> None:
        if now < source.quarantined_until:
            return  # several requests were in flight; one lie is one offence
        seconds = min(self.limits.max_quarantine_s, self.limits.first_quarantine_s * 2.0**source.offences)
        source.offences = min(source.offences + 1, 32)
        source.quarantined_until = now + seconds
        source.quarantine_reason = error

    def _is_ready(self, source: Source, now: float) -> bool:
        return now >= source.usable_at and now >= source.quarantined_until

    def _weight(self, source: Source, now: float) -> float:
        known = [other.bytes_per_s for other in self._sources.values() if other.bytes_per_s is not None]
        # An unknown source is taken to be as good as the best: the only way to learn is to try.
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
    """`url` without a trailing slash; raises LocalFault "bad_url" for anything but http(s)://host[:port][/path]."""
    try:
        parts = urlsplit(url.strip())
        valid = parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise LocalFault(f"{url!r} is not a source: give http://host:port", code="bad_url")
    return url.strip().rstrip("/")
