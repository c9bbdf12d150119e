"""Registration with the coordinator: at the start, when it forgot the node, and as a keep-alive.

The coordinator lets one instance work with a key. This one registers again after a silence, so that none replaces it
during long slots, and ends if another instance holds the key.
"""

from __future__ import annotations

import asyncio
import time
from importlib import metadata
from typing import Final

from node.client.api import FOREVER, CoordinatorClient
from node.client.http import Backoff
from node.errors import BadReply, Refused
from node.protocol.messages import Registration
from node.protocol.reasons import Reason
from node.worker.complaints import WarnOnce
from node.worker.instance import Instance

HEARD_SECONDS: Final = 50.0
"""An instance silent for 120 s may be replaced (docs/protocol.md, 3.4)."""


class Registrar:
    """Registers one instance of a node.

    `dismissal` is the final refusal: the node is banned, or its key is in use elsewhere. `changed` is set with it.
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
        self._warn_once = WarnOnce()
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
            await self._client.register(registration, patience_seconds=FOREVER)
        except Refused as error:
            if error.code != Reason.KEY_IN_USE:
                raise
            self.dismiss(error)  # the node is registered, so finished slots can still be delivered
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
                self._warn_once.note("not registered", error)
                await asyncio.sleep(self._backoff.delay(failures))

    async def keep_registered(self) -> None:
        """Register again after HEARD_SECONDS without a request."""
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
