"""A crowd of hostile relays that announce themselves to a run under free keys, and change their addresses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.lab.redteam.relay_behaviours import BEHAVIOURS, HostileRelay
from node.client.api import CoordinatorClient
from node.errors import CoordinatorFault
from node.protocol.messages import RelayAnnouncement

ANY: Final = (
    "hangs on everything",
    "hangs on chunks",
    "trickles everything",
    "one good chunk, then hangs",
    "endless interim responses on everything",
    "a flipped bit in chunks",
)
TWO_FACED: Final = ("one good chunk, then hangs",)
"""Serve whoever probes them first, and nobody else."""
ANNOUNCE_S: Final = 5.0
MOVE_S: Final = 20.0
"""How long a relay stays at one address: a new one begins without a record."""
PATIENCE_S: Final = 5.0


class Crowd:
    """Hostile relays of one run, `count` of these kinds in turn, until they are stopped."""

    def __init__(self, coordinator: str, run_id: str, upstream: str, *, count: int, kinds: Sequence[str] = ANY) -> None:
        self._coordinator, self._run_id, self._upstream = coordinator, run_id, upstream
        self._kinds = [kinds[number % len(kinds)] for number in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self.announced = self.refused = self.asked = 0

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._be(kind)) for kind in self._kinds]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _be(self, kind: str) -> None:
        key = Ed25519PrivateKey.generate()
        async with CoordinatorClient(self._coordinator, run_id=self._run_id, key=key) as client:
            while True:
                relay = HostileRelay(self._upstream, BEHAVIOURS[kind])
                url = await relay.start()
                try:
                    await self._stay(client, url)
                finally:
                    self.asked += relay.asked.total()
                    await relay.stop()

    async def _stay(self, client: CoordinatorClient, url: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOVE_S):
                while True:
                    try:
                        await client.announce(RelayAnnouncement(url=url, version=0), patience_seconds=PATIENCE_S)
                        self.announced += 1
                    except CoordinatorFault:
                        self.refused += 1
                    await asyncio.sleep(ANNOUNCE_S)
