"""Chunk scheduler shared by relays and clients: downloads many chunks from many sources at once.

Chunks are requested in order, each from the parent of its stripe or from a source drawn by its measurements. A source
that has delivered its own stripe helps with the one that lags. Once every chunk is requested, unusually slow requests
are raced by a second source, so a hanging source costs no more than a slow chunk. A bad chunk costs exactly that chunk
again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from shardcast.errors import LocalFault, NotServed, ShardcastError, TooSlow, Unreachable
from shardcast.fetch.sources import Sources
from shardcast.fetch.transport import Transport
from shardcast.manifest import MIB
from shardcast.store.payload_file import PayloadFile

logger = logging.getLogger(__name__)

REFUSALS_BELIEVED = 3
"""Consecutive refusals by every source that end a download; a single one may come from a lagging relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """Download concurrency and patience. Chunks in flight are held in memory: at most `window_bytes`, but at least two.

    After `stall_s` without a new chunk the download ends with the most telling error.
    """

    window_bytes: int = 64 * MIB
    max_in_flight: int = 16
    chunk_wait_s: float = 20.0
    race_after_s: float = 0.5
    stall_s: float = 60.0


DEFAULT_DOWNLOAD_LIMITS = DownloadLimits()


@dataclass(frozen=True, slots=True)
class _Attempt:
    index: int
    url: str
    started: float


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
        fitting = limits.window_bytes // max(1, file.payload.chunk_bytes)
        self._max_in_flight = max(2, min(limits.max_in_flight, fitting))
        self._last_progress = time.monotonic()
        self._refusals = Counter[str]()

    async def run(self) -> None:
        """Fetch everything missing. On a stall raises TooSlow, Unreachable or the sources' last error; raises a disk's
        LocalFault at once.
        """
        self._last_progress = time.monotonic()
        try:
            while self._missing:
                self._start_requests()
                await self._next_event()
                self._raise_if_stalled()
        finally:
            await self._cancel(list(self._running))

    def _start_requests(self) -> None:
        while len(self._running) < self._max_in_flight and (self._start_next() or self._help_lagging_stripe()):
            pass
        if not any(self._waiting):
            self._race_slow_chunks()

    def _start_next(self) -> bool:
        """Request the next chunk of the longest stripe whose parent is free; return whether one was."""
        now = time.monotonic()
        for waiting in sorted(self._waiting, key=len, reverse=True):
            if waiting and (url := self._sources.parent(waiting[0], now)) is not None:
                self._start(waiting.popleft(), url, now)
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

    def _race_slow_chunks(self) -> None:
        """Request from a second source every chunk that takes a multiple of the usual time."""
        patience_s = max(self._limits.race_after_s, 2 * median(self._recent_durations_s or [0.0]))
        now = time.monotonic()
        racing: dict[int, set[str]] = {}
        for attempt in self._running.values():
            racing.setdefault(attempt.index, set()).add(attempt.url)
        for attempt in sorted(self._running.values(), key=lambda attempt: attempt.started):
            if now - attempt.started < patience_s or len(self._running) >= self._max_in_flight:
                return
            if len(racing[attempt.index]) == 1:
                url = self._sources.helper(attempt.index, now, exclude=racing[attempt.index])
                if url is not None:
                    self._start(attempt.index, url, now)

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
                attempt.url, self._name, attempt.index, into=chunk, wait_s=self._limits.chunk_wait_s
            )
            duration_s = time.monotonic() - attempt.started
            await asyncio.to_thread(self._file.write, attempt.index, chunk)
        finally:
            self._sources.finished(attempt.url)
        # Not reused after a cancellation: the thread may still be writing from it.
        self._buffers.append(buffer)
        self._sources.succeeded(attempt.url, received_bytes=length, seconds=duration_s, now=time.monotonic())
        self._recent_durations_s.append(duration_s)

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
            logger.warning(
                "chunk %d from %s failed: %s (%s); retrying elsewhere", attempt.index, attempt.url, error, error.code
            )
            self._sources.failed(attempt.url, error, time.monotonic())
            self._refusals[attempt.url] += error.code == "not_served"
            if attempt.index in self._missing and not self._is_running(attempt.index):
                self._waiting[attempt.index % self._stripes].appendleft(attempt.index)
        else:
            raise error

    async def _record_chunk(self, attempt: _Attempt) -> None:
        if attempt.index not in self._missing:
            return
        self._missing.discard(attempt.index)
        self._refusals.clear()
        self._last_progress = time.monotonic()
        self._arrived(self._payload.chunk_length(attempt.index))
        losers = [task for task, other in self._running.items() if other.index == attempt.index]
        for task in losers:
            if self._running[task].started < attempt.started:
                self._sources.lost_race(self._running[task].url, time.monotonic())
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
        if self._sources.urls and all(self._refusals[url] >= REFUSALS_BELIEVED for url in self._sources.urls):
            raise NotServed("no source has this payload", code="not_served")
        if time.monotonic() - self._last_progress < self._limits.stall_s:
            return
        error = self._sources.last_error()
        if error is not None:
            raise error
        if not self._sources.urls:
            raise Unreachable("no source to download from: configure at least one", code="no_sources")
        raise TooSlow(f"no chunk arrived in {self._limits.stall_s:.0f} s")
