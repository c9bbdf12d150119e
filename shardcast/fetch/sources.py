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
from typing import Any, Literal

from shardcast.errors import NetworkFault, NotServed, PeerFault, ShardcastError, Unreachable
from shardcast.fetch.source import DEFAULT_SOURCE_LIMITS, Source, SourceLimits
from shardcast.urls import normalise_url

MAX_REMEMBERED = 1024
"""Dropped sources whose quarantine is remembered; each has cost somebody an address and a lie."""


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
        ready = [source for source in self._sources.values() if source.is_ready(now)]

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
        usable = [source for source in self._candidates(stripe) if source.is_ready(now)]
        prompt = [source for source in usable if not source.lags(now, self.limits)]
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
            if source.url not in exclude and self._has_room(source) and source.is_ready(now)
        ]
        proven = next((source.url for source in free if source.is_proven), None)
        drawn = proven or self.draw(now, exclude=exclude, among="proven")
        return drawn or (free[0].url if free else self.draw(now, exclude=exclude, among="all"))

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
            and source.is_ready(now)
            and (source.is_proven or among == "all" or (among == "probed" and self._may_probe(source)))
        ]
        if not ready:
            return None
        ready = [source for source in ready if not source.lags(now, self.limits)] or ready
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
            if url not in exclude and not source.in_flight and source.is_ready(now):
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
            source.quarantine(error, now, self.limits)

    def status(self, now: float) -> list[dict[str, Any]]:
        """Describe each source as a JSON-ready row."""
        return [source.describe(now, self.limits) for source in self._sources.values()]

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
            source.inherit_quarantine(before)
        return source

    def _candidates(self, stripe: int) -> list[Source]:
        return [self._sources[url] for url in self._stripes[stripe % len(self._stripes)]] if self._stripes else []

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
