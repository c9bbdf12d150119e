"""Fetching many chunks from many sources at once: the one scheduler of relays and clients.

Chunks are asked for in order, each from the parent of its stripe, or from a source drawn by its measurements. Who has
delivered its own stripe helps with the one that lags. When none is left to ask for, attempts that take much longer
than the others did are raced by a second source, so one source that hangs costs no more than a slow chunk. A bad
chunk costs exactly that chunk again.
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
from shardcast.manifest import MIB
from shardcast.payload_file import PayloadFile
from shardcast.sources import Sources
from shardcast.transport import Transport

logger = logging.getLogger(__name__)

REFUSALS_BELIEVED = 3
"""Refusals in a row by every source end a download: nobody has it. One may be of a relay that only lags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """How hard to pull. Chunks in flight are held in memory: at most `window_bytes`, but at least two.

    `stall_s` without a single new chunk ends the download with the most telling error.
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
    """One run over the missing chunks of one payload; use each instance once.

    `arrived(length)` is called in the event loop after a chunk of so many bytes was kept.
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
        self._left = set(missing)
        self._buffers = list[bytearray]()
        self._running: dict[asyncio.Task[None], _Attempt] = {}
        self._seconds: deque[float] = deque(maxlen=32)
        fitting = limits.window_bytes // max(1, file.payload.chunk_bytes)
        self._max_in_flight = max(2, min(limits.max_in_flight, fitting))
        self._last_progress = time.monotonic()
        self._refusals = Counter[str]()

    async def run(self) -> None:
        """Fetch everything that is missing. Raises TooSlow, Unreachable or the sources' last error on a stall,
        and at once any LocalFault of the disk."""
        self._last_progress = time.monotonic()
        try:
            while self._left:
                self._fill()
                await self._next_event()
                self._refuse_stall()
        finally:
            await self._cancel(list(self._running))

    def _fill(self) -> None:
        while len(self._running) < self._max_in_flight and (self._start_next() or self._help()):
            pass
        if not any(self._waiting):
            self._race()

    def _start_next(self) -> bool:
        """Ask the parent of some stripe for its next chunk, the stripe with the most to come first."""
        now = time.monotonic()
        for waiting in sorted(self._waiting, key=len, reverse=True):
            if waiting and (url := self._sources.parent(waiting[0], now)) is not None:
                self._start(waiting.popleft(), url, now)
                return True
        return False

    def _help(self) -> bool:
        """Once a stripe has nothing to wait for, take the last chunk of the one that lags to somebody else."""
        longest = max(self._waiting, key=len)
        if all(self._waiting) or not longest:
            return False
        now = time.monotonic()
        url = self._sources.helper(longest[-1], now)
        if url is not None:
            self._start(longest.pop(), url, now)
        return url is not None

    def _race(self) -> None:
        """Ask a second source for what the first has not delivered in a multiple of the usual time."""
        patience_s = max(self._limits.race_after_s, 2 * median(self._seconds or [0.0]))
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
            seconds = time.monotonic() - attempt.started
            await asyncio.to_thread(self._file.write, attempt.index, chunk)
        finally:
            self._sources.ended(attempt.url)
        # Not after a cancellation: the thread may be writing from it still.
        self._buffers.append(buffer)
        self._sources.succeeded(attempt.url, received_bytes=length, seconds=seconds, now=time.monotonic())
        self._seconds.append(seconds)

    async def _next_event(self) -> None:
        """Sleep until an attempt ends, a source becomes usable, or it is time to race."""
        timeout_s = self._sleep_s()
        if not self._running:
            await asyncio.sleep(timeout_s)
            return
        done, _ = await asyncio.wait(self._running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task in self._running:
                await self._settle(task, self._running.pop(task))

    def _sleep_s(self) -> float:
        ceiling = self._limits.race_after_s / 2
        at = self._sources.next_usable_at()
        if self._running or at is None:
            return ceiling
        return min(ceiling, max(0.01, at - time.monotonic()))

    async def _settle(self, task: asyncio.Task[None], attempt: _Attempt) -> None:
        error = task.exception()
        if error is None:
            await self._keep(attempt)
        elif isinstance(error, ShardcastError) and not isinstance(error, LocalFault):
            logger.warning("chunk %d from %s: %s (%s)", attempt.index, attempt.url, error, error.code)
            self._sources.failed(attempt.url, error, time.monotonic())
            self._refusals[attempt.url] += error.code == "not_served"
            if attempt.index in self._left and not self._is_running(attempt.index):
                self._waiting[attempt.index % self._stripes].appendleft(attempt.index)
        else:
            raise error

    async def _keep(self, attempt: _Attempt) -> None:
        if attempt.index not in self._left:
            return
        self._left.discard(attempt.index)
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

    def _refuse_stall(self) -> None:
        if not self._left:
            return
        if self._sources.urls and all(self._refusals[url] >= REFUSALS_BELIEVED for url in self._sources.urls):
            raise NotServed("no source has it", code="not_served")
        if time.monotonic() - self._last_progress < self._limits.stall_s:
            return
        error = self._sources.last_error()
        if error is not None:
            raise error
        if not self._sources.urls:
            raise Unreachable("there is no source to fetch from", code="no_sources")
        raise TooSlow(f"no chunk arrived in {self._limits.stall_s:.0f} s")
