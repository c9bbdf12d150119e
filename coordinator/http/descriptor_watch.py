"""Waiting for a newer descriptor: one reader of the database for all who wait in this process, who are few."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from starlette.concurrency import run_in_threadpool

from coordinator.http.shutdown import Ending
from coordinator.run.descriptors import Descriptors, Issued

POLL_SECONDS = 0.05
MOST_WAITING = 64
"""Peers wait here, a few of each neighbourhood; whoever else comes is answered at once."""

MOST_OF_AN_ADDRESS = 32


class DescriptorWatch:
    """Wakes those who wait when there is a newer version. Reads nothing while nobody waits."""

    def __init__(self, descriptors: Descriptors, ending: Ending | None = None) -> None:
        self._descriptors, self._ending = descriptors, ending or Ending()
        self._waiting: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def newest(self, *, after: int | None, wait_seconds: float, address: str = "") -> Issued:
        """The newest version; if that is `after`, the next one, should it come within `wait_seconds`.

        `address` is where the request comes from: whoever has one address only takes only so many places.
        """
        issued = await self._look()
        full = self._waiting.total() >= MOST_WAITING or self._waiting[address] >= MOST_OF_AN_ADDRESS
        if after != issued.version or full:
            return issued
        self._waiting[address] += 1
        try:
            async with asyncio.timeout(wait_seconds):
                while issued.version == after and not self._ending.begun:
                    if self._reader is None or self._reader.done():
                        self._reader = asyncio.create_task(self._read(issued.version))
                    await self._ending.before(self._changed)
                    issued = await self._look()
        except TimeoutError:
            pass
        finally:
            self._waiting -= Counter((address,))
        return issued

    async def _look(self) -> Issued:
        return await run_in_threadpool(self._descriptors.newest, now=time.time())

    async def _read(self, known: int) -> None:
        """Until there is news, or nobody waits any more."""
        try:
            while self._waiting:
                await asyncio.sleep(POLL_SECONDS)
                if (await self._look()).version != known:
                    return
        except Exception:  # noqa: BLE001  (each who waits looks then, and fails by itself)
            return
        finally:
            waiting, self._changed = self._changed, asyncio.Event()
            waiting.set()
