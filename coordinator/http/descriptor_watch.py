"""Long polls for a newer descriptor, served by one database poller per process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from starlette.concurrency import run_in_threadpool

from coordinator.http.shutdown import Shutdown
from coordinator.run.descriptors import Descriptors, IssuedDescriptor

POLL_SECONDS = 0.05
MAX_WAITERS = 64
"""Further requests are answered at once; few peers of each neighbourhood poll here."""

MAX_WAITERS_PER_ADDRESS = 32


class DescriptorWatch:
    """Wakes waiting requests when there is a newer version; does not poll while none waits."""

    def __init__(self, descriptors: Descriptors, shutdown: Shutdown | None = None) -> None:
        self._descriptors, self._shutdown = descriptors, shutdown or Shutdown()
        self._waiting: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def newest(self, *, after: int | None, wait_seconds: float, address: str = "") -> IssuedDescriptor:
        """Return the newest version; if that is `after`, wait up to `wait_seconds` for the next one.

        `address`, the client's network, bounds the waiters of one client.
        """
        issued = await self._read_newest()
        full = self._waiting.total() >= MAX_WAITERS or self._waiting[address] >= MAX_WAITERS_PER_ADDRESS
        if after != issued.version or full:
            return issued
        self._waiting[address] += 1
        try:
            async with asyncio.timeout(wait_seconds):
                while issued.version == after and not self._shutdown.requested:
                    if self._reader is None or self._reader.done():
                        self._reader = asyncio.create_task(self._poll(issued.version))
                    await self._shutdown.wait_for(self._changed)
                    issued = await self._read_newest()
        except TimeoutError:
            pass
        finally:
            self._waiting -= Counter((address,))
        return issued

    async def _read_newest(self) -> IssuedDescriptor:
        return await run_in_threadpool(self._descriptors.newest, now=time.time())

    async def _poll(self, known: int) -> None:
        """Poll until there is a version other than `known` or nobody waits; then wake all waiters."""
        try:
            while self._waiting:
                await asyncio.sleep(POLL_SECONDS)
                if (await self._read_newest()).version != known:
                    return
        except Exception:  # noqa: BLE001  (each waiter then reads, and raises, itself)
            return
        finally:
            waiting, self._changed = self._changed, asyncio.Event()
            waiting.set()
