"""Waiting for the log to grow: one reader of the database for all who wait for a verdict in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

POLL_SECONDS = 0.05


class LogWatch:
    """Wakes everyone who waits when the log has grown. Reads nothing while nobody waits."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size = size
        self._known = -1
        self._grown = asyncio.Event()
        self._waiting = 0
        self._reader: asyncio.Task[None] | None = None

    def ticket(self) -> asyncio.Event:
        """To be taken before looking for a verdict, so that one which comes in between is not missed."""
        return self._grown

    async def wait(self, ticket: asyncio.Event, *, seconds: float) -> None:
        """Return when the log has grown since `ticket` was taken, or after `seconds`."""
        self._waiting += 1
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        try:
            await asyncio.wait_for(ticket.wait(), seconds)
        except TimeoutError:
            return
        finally:
            self._waiting -= 1

    async def _read(self) -> None:
        while self._waiting:
            size = await run_in_threadpool(self._size)
            if size != self._known:
                self._known = size
                self._grown.set()
                self._grown = asyncio.Event()
            await asyncio.sleep(POLL_SECONDS)
