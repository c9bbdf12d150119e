"""The node's standing at the coordinator, for observers only."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from node.client.api import CoordinatorClient
from node.errors import CoordinatorFault
from node.protocol.messages import NodeStanding
from node.worker.state import VerdictTally

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 10.0
STALE_SECONDS: Final = 60.0
"""Maximum age while no verdict arrives."""


class StandingPoller:
    """Polls one node's standing after verdicts, and every STALE_SECONDS."""

    def __init__(self, client: CoordinatorClient, *, node: str, tally: VerdictTally) -> None:
        self._client = client
        self._node = node
        self._tally = tally
        self._standing: NodeStanding | None = None

    async def follow(self) -> None:
        """Poll the standing; never ends."""
        judged, age = -1, STALE_SECONDS
        while True:
            now = self._tally.admitted + self._tally.rejected + self._tally.indeterminate
            if not self._client.away and (now != judged or age >= STALE_SECONDS):
                judged, age = now, 0.0
                await self._look()
            await asyncio.sleep(LOOK_SECONDS if self._standing is not None else 1.0)
            age += LOOK_SECONDS

    def status(self) -> dict[str, Any] | None:
        """Return the standing, ready for JSON; None while unknown."""
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
            self._standing = await self._client.standing(self._node, patience_seconds=0.0)
        except CoordinatorFault as error:
            log.debug("no standing: %s", error)
