"""Long polls for verdicts, served by one log poller per process that wakes only the submissions concerned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.concurrency import run_in_threadpool

from coordinator.storage.log import MAX_ENTRIES_PER_READ

POLL_SECONDS = 0.05


class _Verdict(msgspec.Struct):
    """The field of a log entry that says whom to wake; empty in entries of other types."""

    submission: str = ""


_DECODER = msgspec.json.Decoder(_Verdict)


class LogWatch:
    """Wakes the waiters of a submission when its verdict is in the log; does not poll while nobody waits."""

    def __init__(self, size: Callable[[], int], entries: Callable[[int, int], list[bytes]]) -> None:
        self._size, self._entries = size, entries
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._waiters = 0
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return how many wait."""
        return self._waiters

    @contextlib.asynccontextmanager
    async def subscribe(self, submission: str) -> AsyncIterator[asyncio.Event]:
        """Yield an event that is set once the verdict is logged.

        Subscribe before reading the receipt, or a verdict in between is missed.
        """
        event = asyncio.Event()
        self._waiting.setdefault(submission, set()).add(event)
        self._waiters += 1
        try:
            async with self._starting:
                if self._reader is None or self._reader.done():
                    known = await run_in_threadpool(self._size)
                    self._reader = asyncio.create_task(self._read(known))
            yield event
        finally:
            self._waiters -= 1
            self._waiting[submission].discard(event)
            if not self._waiting[submission]:
                del self._waiting[submission]

    async def _read(self, known: int) -> None:
        while self._waiting:
            await asyncio.sleep(POLL_SECONDS)
            size = await run_in_threadpool(self._size)
            while known < size:
                leaves = await run_in_threadpool(self._entries, known, min(size, known + MAX_ENTRIES_PER_READ))
                known += len(leaves)
                self._wake({_DECODER.decode(leaf).submission for leaf in leaves})

    def _wake(self, decided: set[str]) -> None:
        for submission in decided & self._waiting.keys():
            for event in self._waiting[submission]:
                event.set()
