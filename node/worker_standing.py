"""What the coordinator says of this node's standing, for whoever watches; nothing the worker does depends on it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from node.coordinator_client import CoordinatorClient
from node.errors import CoordinatorFault
from node.protocol.messages import MAX_MESSAGE_BYTES, NodeStanding
from node.worker_state import Tally
from shardcast.errors import PeerFault
from shardcast.wire import decode

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 10.0
STALE_SECONDS: Final = 60.0
"""How old it may become while no verdict arrives."""


class StandingDesk:
    """Asks for one node's standing after verdicts, and now and then."""

    def __init__(self, client: CoordinatorClient, *, node: str, tally: Tally) -> None:
        self._client = client
        self._node = node
        self._tally = tally
        self._standing: NodeStanding | None = None

    async def follow(self) -> None:
        """Keep it current; never ends."""
        judged, age = -1, STALE_SECONDS
        while True:
            now = self._tally.admitted + self._tally.rejected + self._tally.indeterminate
            if not self._client.away and (now != judged or age >= STALE_SECONDS):
                judged, age = now, 0.0
                await self._look()
            await asyncio.sleep(LOOK_SECONDS if self._standing is not None else 1.0)
            age += LOOK_SECONDS

    def status(self) -> dict[str, Any] | None:
        """What a person wants to know of it, ready for JSON; None as long as it is unknown."""
        said = self._standing
        if said is None or not said.known:
            return None
        return {
            "banned": said.banned,
            "verified": said.verified,
            "probation": said.probation,
            "strikes": said.strikes,
            "ban_after": said.ban_after,
            "full_rate": said.full_rate,
            "most_slots": said.most_slots,
            "wait_seconds": round(said.wait_seconds, 1),
            "vested_tokens": said.vested,
            "unvested_tokens": said.unvested,
            "void_tokens": said.void,
        }

    async def _look(self) -> None:
        try:
            body = await self._client.fetch(
                f"/v1/nodes/{self._node}", max_bytes=MAX_MESSAGE_BYTES, patience_seconds=0.0
            )
            found = decode(NodeStanding, body, max_bytes=MAX_MESSAGE_BYTES)
        except (CoordinatorFault, PeerFault) as error:
            log.debug("no standing: %s", error)
            return
        if found.node == self._node:
            self._standing = found
