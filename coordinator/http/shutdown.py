"""The end of a coordinator's process: who waits for news gets what there is, so that nothing has to be broken off."""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType

import uvicorn


class Ending:
    """Whether the process was asked to stop; of one event loop."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether it was."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Wake all who wait; safe in a signal's handler of the loop's thread."""
        self._begun.set()

    async def before(self, event: asyncio.Event) -> bool:
        """Wait for `event`, or for the end; whether it was `event`."""
        tasks = {asyncio.create_task(event.wait()), asyncio.create_task(self._begun.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return event.is_set()


class Server(uvicorn.Server):
    """uvicorn's, which wakes who waits before it counts those that it has to break off."""

    def __init__(self, config: uvicorn.Config, ending: Ending) -> None:
        super().__init__(config)
        self._ending = ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's; a second signal does not wait for anybody."""
        super().handle_exit(sig, frame)
        self._ending.begin()

    def serve_on(self, listening: socket.socket) -> None:
        """Serve until SIGINT or SIGTERM, and return."""
        # uvicorn raises the signal again once it has ended, and what is to be done afterwards would not be.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run(sockets=[listening])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
