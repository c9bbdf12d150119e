"""An event loop in a thread of its own, for attackers beside what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Attackers(Protocol):
    """Tasks on a loop."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


A = TypeVar("A", bound=Attackers)


class Loop:
    """Runs coroutines for other threads; close it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="attackers", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result()

    @contextlib.contextmanager
    def attacking(self, attackers: A) -> Iterator[A]:
        """Let these attack within the block."""
        self.run(attackers.start())
        try:
            yield attackers
        finally:
            self.run(attackers.stop())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
