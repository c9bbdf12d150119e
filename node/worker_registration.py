"""Introducing the node to the coordinator: at the start, and whenever the coordinator forgot it."""

from __future__ import annotations

import asyncio
from importlib import metadata

from node.coordinator_client import CoordinatorClient
from node.errors import BadReply, Refused
from node.exchange import Backoff
from node.protocol.messages import Registration
from node.worker_delivery import FOR_EVER
from node.worker_leases import Complaints


class Registrar:
    """Registers one node that works with `engine`."""

    def __init__(self, client: CoordinatorClient, *, engine: str, backoff: Backoff) -> None:
        self._client = client
        self._engine = engine
        self._backoff = backoff
        self._complaints = Complaints()

    async def register(self) -> None:
        """Once, for as long as the coordinator is away. Raises Refused and BadReply."""
        registration = Registration(software=_software(), engine=self._engine)
        await self._client.register(registration, patience_seconds=FOR_EVER)

    async def register_until_known(self) -> None:
        """Again and again, until the coordinator takes it."""
        failures = 0
        while True:
            try:
                await self.register()
                return
            except (Refused, BadReply) as error:
                failures += 1
                self._complaints.note("not registered", error)
                await asyncio.sleep(self._backoff.delay(failures))


def _software() -> str:
    try:
        return f"veriswarm/{metadata.version('veriswarm')}"
    except metadata.PackageNotFoundError:
        return "veriswarm/uninstalled"
