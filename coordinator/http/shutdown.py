"""Graceful shutdown: long polls and event streams return what they have, so that no connection has to be aborted."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from coordinator.http.connections import QUEUED
from node.runtime.service_manager import report_serving


class Shutdown:
    """Shutdown signal of one event loop."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._waking: set[asyncio.Event] = set()

    @property
    def requested(self) -> bool:
        """Whether the process was asked to stop."""
        return self._requested.is_set()

    def request(self) -> None:
        """Wake all waiters; safe in a signal handler of the loop's thread."""
        self._requested.set()
        for event in self._waking:
            event.set()

    @contextmanager
    def waking(self, event: asyncio.Event) -> Iterator[None]:
        """Set `event`, which nobody else gives here, at shutdown as well while the block runs."""
        self._waking.add(event)
        try:
            if self.requested:
                event.set()
            yield
        finally:
            self._waking.discard(event)

    async def wait_for(self, event: asyncio.Event) -> None:
        """Wait for `event` or for shutdown, whichever comes first."""
        tasks = {asyncio.create_task(event.wait()), asyncio.create_task(self._requested.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()


class Server(uvicorn.Server):
    """uvicorn server that ends long polls before it aborts the connections still open."""

    def __init__(self, config: uvicorn.Config, shutdown: Shutdown) -> None:
        super().__init__(config)
        self._shutdown = shutdown
        self._reporting: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._shutdown.request()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with a longer queue than asyncio accepts at once: it has one number for both."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUED)
        self._reporting = asyncio.create_task(report_serving())  # the loop cancels it when it ends

    def serve_on(self, listening: socket.socket) -> None:
        """Serve until SIGINT or SIGTERM, then return."""
        # uvicorn raises the signal again when it ends, which would skip the caller's cleanup.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run(sockets=[listening])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
