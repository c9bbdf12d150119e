"""Free keys that take leases and hold them, return them, or let them lapse, from a few networks of their own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Final

from coordinator.lab.processes.local_http import get_json
from coordinator.lab.redteam.http_client import HostileClient, Identity

NETWORKS: Final = 3
"""All of 127.0.0.0/8 is this machine: each 127.x.y.0/24 is another network to the coordinator."""
PAUSE_S: Final = 2.0
NEWCOMER_PAUSE_S: Final = 0.25


class Hoarders:
    """`count` keys of a run, a third of which return each lease at once and ask again, while the others hold theirs."""

    def __init__(self, coordinator: str, run_id: str, *, count: int) -> None:
        self._coordinator, self._run_id, self._count = coordinator, run_id, count
        self._tasks: list[asyncio.Task[None]] = []
        self._held: tuple[int, ...] = ()
        self.leased = self.returned = 0

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._hoard(number)) for number in range(self._count)]
        self._tasks.append(asyncio.create_task(self._follow()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            self._held = await held_versions(self._coordinator)
            await asyncio.sleep(PAUSE_S)

    async def _hoard(self, number: int) -> None:
        address = f"127.77.{number % NETWORKS}.{1 + number // NETWORKS % 250}"
        returns, identity = number % 3 == 0, Identity()
        async with HostileClient(self._coordinator, run_id=self._run_id, address=address) as client:
            await asyncio.sleep(random.uniform(0.0, PAUSE_S))
            while True:
                if not identity.is_known:
                    await client.register(identity)
                _, leases = await client.lease(identity, held=self._held, slots=1)
                self.leased += len(leases)
                for lease in leases if returns else ():
                    self.returned += (await client.give_back(identity, lease)).accepted
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))


async def held_versions(coordinator: str) -> tuple[int, ...]:
    """Return the newest policies of the run, as a node claims to hold them."""
    status = await asyncio.to_thread(get_json, f"{coordinator}/v1/status", seconds=5.0)
    head = -1 if status is None else int(status["head_version"])
    return tuple(range(max(0, head - 1), head + 1))


async def newcomer_waits(coordinator: str, run_id: str, *, number: int, patience_s: float) -> float | None:
    """Return how long a new key of a network of its own waits for a lease, which it gives back; None without one."""
    identity, started = Identity(), time.monotonic()
    async with HostileClient(coordinator, run_id=run_id, address=f"127.99.{number}.1") as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await client.register(identity)
                while True:
                    _, leases = await client.lease(identity, held=await held_versions(coordinator), slots=1)
                    if leases:
                        waited = time.monotonic() - started
                        await client.give_back(identity, leases[0])
                        return waited
                    await asyncio.sleep(NEWCOMER_PAUSE_S)
    return None
