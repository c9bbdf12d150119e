"""Source selection: measured success and bandwidth, recovery over time, and quarantine for liars.

After SHARDCAST (arXiv 2505.07291): sources are drawn with probability proportional to the exponential moving averages
of success times bandwidth. Unlike shardcast 0.3.2, a failure never raises the bandwidth. Failures decay with time, and
no usable source falls below a small share of the draws, so a recovered relay is noticed. With the trees of
`shardcast.tree`, chunk i is requested from the candidates of stripe i mod k in their order, and from others only when
those fail or lag. No IO: the clock and the random numbers are passed in.

A source is proven while it delivers: from a verified chunk until a request of its own comes to nothing. Addresses are
free, so that any number of others may hang, trickle or lie: an unproven source has one request in flight, all of them
together `unproven_in_flight` while a proven one is there, and none is preferred to a proven candidate.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from shardcast.errors import NetworkFault, NotServed, PeerFault, ShardcastError, Unreachable
from shardcast.urls import normalise_url


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
MAX_REMEMBERED = 1024
"""Dropped sources whose quarantine is remembered; each has cost somebody an address and a lie."""


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


class Sources:
    """A mutable set of sources; a URL keeps its measurements while it stays in the set, and its quarantine longer:
    whoever names the sources must not end one by leaving it out once.
    """

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
        self._offenders: dict[str, Source] = {}
        self._stripes: tuple[tuple[str, ...], ...] = ()
        self._last_resort: tuple[str, ...] = ()
        self.set_urls(urls)

    def set_urls(
        self, urls: Iterable[str], *, stripes: Iterable[Iterable[str]] = (), last_resort: Iterable[str] = ()
    ) -> None:
        """Replace the set: `urls`, and per stripe the candidates for its chunks in order of preference.

        Without stripes every source may serve every chunk. `last_resort` are asked where those come to nothing, one
        chunk at a time; what is in the set besides is no last resort. Raises LocalFault "bad_url" and then changes
        nothing.
        """
        candidates = tuple(tuple(normalise_url(url) for url in urls_of_stripe) for urls_of_stripe in stripes)
        wanted = [
            *(url for urls_of_stripe in candidates for url in urls_of_stripe),
            *(normalise_url(url) for url in urls),
        ]
        reserve = tuple(dict.fromkeys(url for each in last_resort if (url := normalise_url(each)) not in wanted))
        before = self._sources
        self._sources = {url: before.get(url) or self._remembered(url) for url in (*wanted, *reserve)}
        self._remember(source for url, source in before.items() if url not in self._sources)
        self._stripes = candidates if all(candidates) else ()
        self._last_resort = reserve if wanted else ()

    @property
    def stripes(self) -> int:
        """Number of stripes that chunk indices are divided into; at least 1."""
        return max(1, len(self._stripes))

    @property
    def urls(self) -> list[str]:
        return list(self._sources)

    @property
    def last_resort(self) -> tuple[str, ...]:
        """The sources that are asked where the others come to nothing."""
        return self._last_resort

    def is_proven(self, url: str) -> bool:
        """Return whether this source delivers."""
        return (source := self._sources.get(url)) is not None and source.is_proven

    def usable(self, now: float) -> list[str]:
        """List URLs neither quarantined nor backing off, most promising first: the proven, then those that answered,
        and those of last resort at the end.
        """
        ready = [source for source in self._sources.values() if self._is_ready(source, now)]

        def rank(source: Source) -> tuple[bool, bool, bool, float]:
            reserve = source.url in self._last_resort
            return reserve, not source.is_proven, not source.has_answered, -self._weight(source, now)

        return [source.url for source in sorted(ready, key=rank)]

    def not_quarantined(self, now: float) -> list[str]:
        """List the URLs that have not lied lately."""
        return [source.url for source in self._sources.values() if now >= source.quarantined_until]

    def by_promise(self, now: float) -> list[str]:
        """List every URL, the usable ones first (`usable`), then those that are usable soonest."""
        first = self.usable(now)
        others = [source for source in self._sources.values() if source.url not in first]
        return first + [source.url for source in sorted(others, key=lambda source: source.ready_at)]

    def parent(self, stripe: int, now: float) -> str | None:
        """Choose the source for a chunk of a stripe: its first candidate that is usable and does not lag, or None while
        that is busy; a proven candidate goes before an unproven one that is busy.

        Without stripes or such candidates, draws any usable source.
        """
        usable = [source for source in self._candidates(stripe) if self._is_ready(source, now)]
        prompt = [source for source in usable if not self._lags(source, now)]
        for source in prompt:
            if source.is_proven or not any(other.is_proven for other in prompt):
                if self._has_room(source):
                    return source.url
                if not source.is_late:
                    return None
            if self._may_probe(source):
                return source.url
        return self.draw(now) or next((source.url for source in usable if self._has_room(source)), None)

    def helper(self, stripe: int, now: float, *, exclude: Collection[str] = ()) -> str | None:
        """Choose a source to help a lagging one: a free candidate of the stripe, else any drawn one; the proven first.

        Any number of unproven ones may help where no proven one can: this is how each gets its turn.
        """
        free = [
            source
            for source in self._candidates(stripe)
            if source.url not in exclude and self._has_room(source) and self._is_ready(source, now)
        ]
        proven = next((source.url for source in free if source.is_proven), None)
        return proven or self.draw(now, exclude=exclude, among="proven") or self._any_helper(free, now, exclude)

    def _any_helper(self, free: list[Source], now: float, exclude: Collection[str]) -> str | None:
        return free[0].url if free else self.draw(now, exclude=exclude, among="all")

    def draw(
        self, now: float, *, exclude: Collection[str] = (), among: Literal["proven", "probed", "all"] = "probed"
    ) -> str | None:
        """Draw a usable source with a free slot by weight; None if there is none.

        Of unproven ones no more than may be probed ("probed"), none ("proven"), or any ("all").
        """
        ready = [
            source
            for source in self._sources.values()
            if source.url not in exclude
            and source.url not in self._last_resort
            and self._has_room(source)
            and self._is_ready(source, now)
            and (source.is_proven or among == "all" or (among == "probed" and self._may_probe(source)))
        ]
        if not ready:
            return None
        ready = [source for source in ready if not self._lags(source, now)] or ready
        if not any(source.is_proven for source in ready):  # each gets its turn
            fewest = min(source.failed_chunks for source in ready)
            ready = [source for source in ready if source.failed_chunks == fewest]
        weights = [self._weight(source, now) for source in ready]
        floor = self.limits.min_share * max(weights)
        return self._rng.choices(ready, [max(weight, floor) for weight in weights])[0].url

    def resort(self, now: float, *, exclude: Collection[str] = ()) -> str | None:
        """Choose a free source of last resort; None if there is none."""
        for url in self._last_resort:
            source = self._sources[url]
            if url not in exclude and not source.in_flight and self._is_ready(source, now):
                return url
        return None

    def in_use(self) -> int:
        """Count the sources with requests in flight."""
        return sum(source.in_flight > 0 for source in self._sources.values())

    def next_usable_at(self) -> float | None:
        """Return when the first source leaves backoff or quarantine (monotonic seconds); None without sources.

        Those of last resort do not count.
        """
        others = (source for source in self._sources.values() if source.url not in self._last_resort)
        return min((source.ready_at for source in others), default=None)

    def last_error(self) -> ShardcastError | None:
        """Return the most telling recent error: a lie before a failure."""
        errors = [source.last_error for source in self._sources.values() if source.last_error is not None]
        return next((error for error in errors if isinstance(error, PeerFault)), errors[0] if errors else None)

    # -- outcomes

    def started(self, url: str) -> None:
        if (source := self._sources.get(url)) is not None:
            source.in_flight += 1

    def answered(self, url: str) -> None:
        """Record a response to a small request: a source that is reachable again may be polled at once."""
        if (source := self._sources.get(url)) is not None:
            source.has_answered = True
            if source.is_proven or not source.failed_chunks:
                source.usable_at = 0.0
                source.served()

    def finished(self, url: str) -> None:
        if (source := self._sources.get(url)) is not None:
            source.in_flight = max(0, source.in_flight - 1)
            source.is_late = False

    def succeeded(self, url: str, *, received_bytes: int, seconds: float, now: float) -> None:
        """Record a verified transfer; `seconds` counts from the request, waiting included."""
        if (source := self._sources.get(url)) is None:
            return
        source.bytes_received += received_bytes
        source.is_proven, source.failed_chunks, source.lags_since = True, 0, None
        source.sample_bandwidth(received_bytes / max(seconds, 1e-6), self.limits)
        source.sample_success(1.0, now, self.limits)
        source.served()

    def lost_race(self, url: str, now: float, *, hopelessly: bool = False) -> None:
        """Record that another source, requested later, delivered first.

        `hopelessly`: this one was as good as hanging; it has to prove itself anew.
        """
        if (source := self._sources.get(url)) is not None:
            source.sample_success(0.0, now, self.limits)
            if hopelessly:
                source.is_proven = False
                source.failed_chunks += 1
                source.back_off(now, self.limits, self._rng)

    def set_late(self, url: str, *, late: bool) -> None:
        """Note whether a request in flight is as good as lost: nobody waits for this source meanwhile."""
        if (source := self._sources.get(url)) is not None:
            source.is_late = late

    def lagged(self, url: str, now: float) -> None:
        """Record that a source waited for a chunk in vain, as an honest relay does whose own upstream lags."""
        if (source := self._sources.get(url)) is not None:
            source.has_answered = True
            source.sample_success(0.0, now, self.limits)
            source.lags_since = now if source.lags_since is None else source.lags_since

    def failed(
        self, url: str, error: ShardcastError, now: float, *, of_chunk: bool = False, refusals: int | None = None
    ) -> None:
        """Record a failed request: a lie leads to quarantine, anything else to backoff.

        A source whose chunk did not come has to prove itself anew. `refusals`: how often it has already said that it
        does not have this payload, which says nothing of others: the pause then grows with that alone.
        """
        if (source := self._sources.get(url)) is None:
            return
        source.failures += 1
        source.last_error = error
        if of_chunk and not isinstance(error, NotServed):
            source.is_proven = False
            # Who refuses connections may be asked again once it answers; who hangs would answer all but chunks.
            source.failed_chunks += not isinstance(error, Unreachable)
        source.sample_success(0.0, now, self.limits)
        if isinstance(error, NetworkFault):
            source.back_off(now, self.limits, self._rng, refusals=refusals)
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

    def _remember(self, dropped: Iterable[Source]) -> None:
        """Keep the offences of dropped sources, of at most MAX_REMEMBERED: the latest to be quarantined."""
        self._offenders |= {source.url: source for source in dropped if source.offences}
        if len(self._offenders) > MAX_REMEMBERED:
            latest = sorted(self._offenders.values(), key=lambda source: -source.quarantined_until)
            self._offenders = {source.url: source for source in latest[:MAX_REMEMBERED]}

    def _remembered(self, url: str) -> Source:
        """Return a new source, in quarantine where an earlier one with its URL is."""
        source = Source(url)
        if (before := self._offenders.pop(url, None)) is not None:
            source.offences, source.quarantined_until = before.offences, before.quarantined_until
            source.quarantine_reason = before.quarantine_reason
        return source

    def _candidates(self, stripe: int) -> list[Source]:
        return [self._sources[url] for url in self._stripes[stripe % len(self._stripes)]] if self._stripes else []

    def _is_ready(self, source: Source, now: float) -> bool:
        return now >= source.ready_at

    def _lags(self, source: Source, now: float) -> bool:
        return source.lags_since is not None and now - source.lags_since > self.limits.lag_s

    def _has_room(self, source: Source) -> bool:
        if source.url in self._last_resort or not source.is_proven:
            return source.in_flight == 0
        return source.in_flight < self.limits.per_source

    def _may_probe(self, source: Source) -> bool:
        """Whether an unproven source may be given a chunk now: as many as there are while none is proven."""
        known = self._sources.values()
        if source.in_flight or not any(other.is_proven for other in known):
            return source.in_flight == 0
        return sum(other.in_flight for other in known if not other.is_proven) < self.limits.unproven_in_flight

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
