"""Chunk scheduler shared by relays and clients: downloads many chunks from many sources at once.

Chunks are requested in order, each from the parent of its stripe or from a source drawn by its measurements. A source
that has delivered its own stripe helps with the one that lags. A request that is late at an unproven source, or that
hardly moves, is hedged: the chunk is asked elsewhere as well, and the first to deliver wins. Once every chunk is
requested, all late requests are. Where every slot is taken, the hopeless request gives way, so that any number of
hanging sources costs a fraction of a second each, many at a time. A bad chunk costs exactly that chunk again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from shardcast.errors import LocalFault, NotServed, ShardcastError, TooSlow, Unreachable
from shardcast.fetch.sources import Sources
from shardcast.fetch.transport import Transport
from shardcast.manifest import KIB, MIB
from shardcast.store.payload_file import PayloadFile

logger = logging.getLogger(__name__)

REFUSALS_BELIEVED = 3
"""Consecutive refusals by every source that is there; a single one may come from a lagging relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """Download concurrency and patience. Chunks in flight are held in memory: at most `window_bytes`, but at least two.

    A source that has no chunk yet is asked to wait `chunk_wait_s` for it, and must answer then: one that only lags
    differs so from one that hangs. A request is late after twice the usual time, at least `race_after_s`. Without a
    chunk for `last_resort_s` the sources of last resort are asked; after `stall_s` the download ends with the most
    telling error.
    """

    window_bytes: int = 64 * MIB
    max_in_flight: int = 16
    chunk_wait_s: float = 2.0
    race_after_s: float = 0.5
    last_resort_s: float = 10.0
    stall_s: float = 60.0


DEFAULT_DOWNLOAD_LIMITS = DownloadLimits()


_HOPELESS_SHARE = 1 / 8
"""Of the usual rate: a request below it is as good as hanging."""
_USEFUL_BYTES_PER_S = 512 * KIB
"""What a source is measured against where none has delivered for long."""
_OVERDUE_S = 0.5
"""After the wait that a source was asked for, until its silence counts."""
_SHORTEST_TRANSFER_S = 0.25
"""Progress is looked at that often: a chunk that came sooner says no more of the rate."""


@dataclass(slots=True, eq=False)
class _Attempt:
    index: int
    url: str
    started: float
    received: int = 0
    began: float | None = None
    is_hopeless: bool = False

    def rate(self, now: float) -> float:
        """Return the bytes per second since the first one."""
        return 0.0 if self.began is None else self.received / max(now - self.began, _SHORTEST_TRANSFER_S)

    def progressed(self, received: int) -> None:
        self.received = received
        if self.began is None and received:
            self.began = time.monotonic()


class Download:
    """One download of a payload's missing chunks; use each instance once.

    `arrived(length_bytes)` is called in the event loop after each stored chunk.
    """

    def __init__(
        self,
        file: PayloadFile,
        *,
        sources: Sources,
        transport: Transport,
        arrived: Callable[[int], None],
        limits: DownloadLimits = DEFAULT_DOWNLOAD_LIMITS,
    ) -> None:
        self._file, self._payload, self._name = file, file.payload, file.payload.digest
        self._sources = sources
        self._transport = transport
        self._arrived = arrived
        self._limits = limits
        missing = file.missing()
        self._stripes = sources.stripes
        self._waiting = [deque(i for i in missing if i % self._stripes == stripe) for stripe in range(self._stripes)]
        self._missing = set(missing)
        self._buffers = list[bytearray]()
        self._running: dict[asyncio.Task[None], _Attempt] = {}
        self._recent_durations_s: deque[float] = deque(maxlen=32)
        self._recent_rates: deque[float] = deque(maxlen=32)
        fitting = limits.window_bytes // max(1, file.payload.chunk_bytes)
        self._max_in_flight = max(2, min(limits.max_in_flight, fitting))
        self._last_progress = time.monotonic()
        self._resorts = False
        # Spread out: the workers of a slow tree must not all turn to the operator's sources in one second.
        self._last_resort_s = limits.last_resort_s * random.uniform(1.0, 2.0)
        self._refusals = Counter[str]()  # and sources that cannot be reached, which say nothing else
        self._not_served = Counter[str]()  # by source, whatever others deliver meanwhile
        self._is_refused = False

    async def run(self) -> None:
        """Fetch everything missing. On a stall raises TooSlow, Unreachable or the sources' last error; raises a disk's
        LocalFault at once.
        """
        self._last_progress = time.monotonic()
        try:
            while self._missing:
                await self._start_requests()
                await self._next_event()
                self._raise_if_stalled()
        finally:
            await self._cancel(list(self._running))

    async def _start_requests(self) -> None:
        await self._hedge_late_requests()
        while len(self._running) < self._max_in_flight and (self._start_next() or self._help_lagging_stripe()):
            pass

    def _start_next(self) -> bool:
        """Request the next chunk of the longest stripe whose parent is free; return whether one was."""
        now = time.monotonic()
        for waiting in sorted(self._waiting, key=len, reverse=True):
            if waiting and (url := self._sources.parent(waiting[0], now)) is not None:
                self._start(waiting.popleft(), url, now)
                return True
        longest = max(self._waiting, key=len)
        if longest and self._needs_last_resort(now) and (url := self._sources.resort(now)) is not None:
            self._start(longest.popleft(), url, now)
            return True
        return False

    def _help_lagging_stripe(self) -> bool:
        """Once some stripe is done, request the last chunk of the longest one from another source."""
        longest = max(self._waiting, key=len)
        if all(self._waiting) or not longest:
            return False
        now = time.monotonic()
        url = self._sources.helper(longest[-1], now)
        if url is not None:
            self._start(longest.pop(), url, now)
        return url is not None

    async def _hedge_late_requests(self) -> None:
        """Request elsewhere every chunk that is late where that is worth a second transfer."""
        now = time.monotonic()
        patience_s = max(self._limits.race_after_s, 2 * median(self._recent_durations_s or [0.0]))
        by_chunk: dict[int, list[tuple[asyncio.Task[None], _Attempt]]] = {}
        for task, attempt in self._running.items():
            by_chunk.setdefault(attempt.index, []).append((task, attempt))
        for index, attempts in by_chunk.items():
            for _, attempt in attempts:
                attempt.is_hopeless = self._is_hopeless(attempt, now, patience_s)
                self._sources.set_late(attempt.url, late=attempt.is_hopeless)
            hopeless = [task for task, attempt in attempts if attempt.is_hopeless and not task.done()]
            # Proven sources that are merely slow are not asked for the same chunk one after the other.
            wait_s = patience_s * 2.0 ** min(16, len(attempts) - len(hopeless) - 1)
            late = now - max(attempt.started for _, attempt in attempts) > wait_s
            if not late or not (len(hopeless) == len(attempts) or not any(self._waiting)):
                continue
            if len(self._running) >= self._max_in_flight and not hopeless:
                continue
            if (url := self._helper(index, now, exclude={attempt.url for _, attempt in attempts})) is None:
                continue
            if len(self._running) >= self._max_in_flight:
                self._sources.lost_race(self._running[hopeless[0]].url, now, hopelessly=True)
                await self._cancel(hopeless[:1])
            self._start(index, url, now)

    def _is_hopeless(self, attempt: _Attempt, now: float, patience_s: float) -> bool:
        """Whether a request is unlikely to end in useful time; a proven source may be waiting for its own upstream."""
        if attempt.began is None:
            wait_s = self._limits.chunk_wait_s + _OVERDUE_S if self._sources.is_proven(attempt.url) else 0.0
            return now - attempt.started > max(patience_s, wait_s)
        usual = max([median(self._recent_rates or [0.0]), *(other.rate(now) for other in self._running.values())])
        if self._needs_last_resort(now):  # all may be as slow
            usual = max(usual, _USEFUL_BYTES_PER_S)
        return now - attempt.began > patience_s and attempt.rate(now) < _HOPELESS_SHARE * usual

    def _helper(self, index: int, now: float, *, exclude: set[str]) -> str | None:
        url = self._sources.helper(index, now, exclude=exclude)
        if (url is None or not self._sources.is_proven(url)) and self._needs_last_resort(now):
            return self._sources.resort(now, exclude=exclude) or url
        return url

    def _needs_last_resort(self, now: float) -> bool:
        """Whether the other sources have come to nothing, and as long as none of them delivers."""
        return self._resorts or now - self._last_progress > self._last_resort_s

    def _start(self, index: int, url: str, now: float) -> None:
        self._sources.started(url)
        attempt = _Attempt(index, url, now)
        self._running[asyncio.create_task(self._fetch(attempt))] = attempt

    async def _fetch(self, attempt: _Attempt) -> None:
        length = self._payload.chunk_length(attempt.index)
        buffer = self._buffers.pop() if self._buffers else bytearray(self._payload.chunk_bytes)
        chunk = memoryview(buffer)[:length]
        try:
            await self._transport.chunk(
                attempt.url,
                self._name,
                attempt.index,
                into=chunk,
                wait_s=self._limits.chunk_wait_s,
                progress=attempt.progressed,
            )
            now = time.monotonic()
            duration_s, transfer_s = now - attempt.started, now - (attempt.began or attempt.started)
            await asyncio.to_thread(self._file.write, attempt.index, chunk)
        finally:
            self._sources.finished(attempt.url)
        # Not reused after a cancellation: the thread may still be writing from it.
        self._buffers.append(buffer)
        self._sources.succeeded(attempt.url, received_bytes=length, seconds=duration_s, now=time.monotonic())
        self._recent_durations_s.append(duration_s)
        self._recent_rates.append(length / max(transfer_s, _SHORTEST_TRANSFER_S))

    async def _next_event(self) -> None:
        """Sleep until a request ends, a source becomes usable, or it is time to race."""
        timeout_s = self._sleep_s()
        if not self._running:
            await asyncio.sleep(timeout_s)
            return
        done, _ = await asyncio.wait(self._running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task in self._running:
                await self._handle_finished(task, self._running.pop(task))

    def _sleep_s(self) -> float:
        ceiling = self._limits.race_after_s / 2
        at = self._sources.next_usable_at()
        if self._running or at is None:
            return ceiling
        return min(ceiling, max(0.01, at - time.monotonic()))

    async def _handle_finished(self, task: asyncio.Task[None], attempt: _Attempt) -> None:
        error = task.exception()
        if error is None:
            await self._record_chunk(attempt)
        elif isinstance(error, ShardcastError) and not isinstance(error, LocalFault):
            logger.log(
                logging.DEBUG if error.code == "not_yet" else logging.WARNING,
                "chunk %d from %s failed: %s (%s); retrying elsewhere",
                attempt.index,
                attempt.url,
                error,
                error.code,
            )
            now = time.monotonic()
            if error.code == "not_yet" and now - attempt.started > self._limits.chunk_wait_s / 2:
                self._sources.lagged(attempt.url, now)
            else:
                refusals = self._not_served[attempt.url] if error.code == "not_served" else None
                self._sources.failed(attempt.url, error, now, of_chunk=True, refusals=refusals)
            self._is_refused |= error.code == "not_served"
            self._not_served[attempt.url] += error.code == "not_served"
            self._refusals[attempt.url] += error.code == "not_served" or isinstance(error, Unreachable)
            if attempt.index in self._missing and not self._is_running(attempt.index):
                self._waiting[attempt.index % self._stripes].appendleft(attempt.index)
        else:
            raise error

    async def _record_chunk(self, attempt: _Attempt) -> None:
        if attempt.index not in self._missing:
            return
        self._missing.discard(attempt.index)
        self._refusals.clear()
        self._is_refused = False
        self._last_progress = time.monotonic()
        self._resorts = attempt.url in self._sources.last_resort
        self._arrived(self._payload.chunk_length(attempt.index))
        losers = [task for task, other in self._running.items() if other.index == attempt.index]
        for other in (self._running[task] for task in losers):
            if other.started < attempt.started:
                self._sources.lost_race(other.url, time.monotonic(), hopelessly=other.is_hopeless)
        await self._cancel(losers)

    def _is_running(self, index: int) -> bool:
        return any(attempt.index == index for attempt in self._running.values())

    async def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            self._running.pop(task, None)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _raise_if_stalled(self) -> None:
        if not self._missing:
            return
        believed = self._sources.not_quarantined(time.monotonic())
        if self._is_refused and believed and all(self._refusals[url] >= REFUSALS_BELIEVED for url in believed):
            raise NotServed("no source has this payload", code="not_served")
        if time.monotonic() - self._last_progress < self._limits.stall_s:
            return
        error = self._sources.last_error()
        if error is not None:
            raise error
        if not self._sources.urls:
            raise Unreachable("no source to download from: configure at least one", code="no_sources")
        raise TooSlow(f"no chunk arrived in {self._limits.stall_s:.0f} s")
