"""Introducing the node to the coordinator: at the start, whenever the coordinator forgot it, and to be heard.

The coordinator lets one machine work with a key. So that no other takes this one's place while its slots take long, it
registers again when nothing else was heard of it for a while; and where another one has the key, this one ends.
"""

from __future__ import annotations

import asyncio
import time
from importlib import metadata
from typing import Final

from node.client.api import CoordinatorClient
from node.client.http import Backoff
from node.errors import BadReply, Refused
from node.protocol.messages import Registration
from node.protocol.reasons import Reason
from node.worker.complaints import Complaints
from node.worker.delivery import FOR_EVER
from node.worker.instance import Instance

HEARD_SECONDS: Final = 50.0
"""An instance that was not heard for 120 s may be replaced (docs/protocol.md, 3.4)."""


class Registrar:
    """Registers one node that works with `engine` on one machine.

    `dismissal` is the refusal after which the coordinator wants nothing more of this worker: its node is banned, or
    its key is at work elsewhere. `changed` is set when there is one.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        *,
        engine: str,
        instance: Instance,
        backoff: Backoff,
        changed: asyncio.Event,
    ) -> None:
        self.dismissal: Refused | None = None
        self.instance = instance
        self._client = client
        self._engine = engine
        self._backoff = backoff
        self._complaints = Complaints()
        self._changed = changed
        self._heard_at = time.monotonic()

    def heard(self) -> None:
        """Note that the coordinator has just answered a lease request."""
        self._heard_at = time.monotonic()

    def dismiss(self, refusal: Refused) -> None:
        """Treat a refusal as final."""
        self.dismissal = self.dismissal or refusal
        self._changed.set()

    async def register(self) -> None:
        """Register once, retrying while the coordinator is away. Raises Refused and BadReply, but for `dismissal`."""
        registration = Registration(
            software=software(), engine=self._engine, instance=self.instance.id, name=self.instance.name
        )
        try:
            await self._client.register(registration, patience_seconds=FOR_EVER)
        except Refused as error:
            if error.code != Reason.KEY_IN_USE:
                raise
            self.dismiss(error)  # the node is known all the same: what is done can be delivered
        self.heard()

    async def register_until_known(self) -> None:
        """Retry registering until the coordinator accepts or dismisses this worker."""
        failures = 0
        while True:
            try:
                await self.register()
                return
            except (Refused, BadReply) as error:
                failures += 1
                self._complaints.note("not registered", error)
                await asyncio.sleep(self._backoff.delay(failures))

    async def stay_known(self) -> None:
        """Register again whenever nothing was heard of this worker for a while."""
        while self.dismissal is None:
            left = self._heard_at + HEARD_SECONDS - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self.register_until_known()


def software() -> str:
    """Return the name and version of this installation."""
    try:
        return f"swarmproof/{metadata.version('swarmproof')}"
    except metadata.PackageNotFoundError:
        return "swarmproof/uninstalled"
