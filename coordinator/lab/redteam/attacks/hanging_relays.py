"""Relays that announce themselves and never answer."""

from __future__ import annotations

import asyncio
import contextlib

from coordinator.lab.processes.journal import ACCEPTED
from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.http_client import Identity
from coordinator.lab.redteam.raid import Raid
from coordinator.lab.redteam.relay_behaviours import BEHAVIOURS, HostileRelay
from node.protocol.messages import MAX_MESSAGE_BYTES, RelayAnnouncement, RelayList
from shardcast.errors import PeerFault
from shardcast.wire import decode, encode

RELAYS = 6
PROBED_SECONDS = 12.0
"""Time for the coordinator to probe them."""
NOT_NAMED = "not_named"


class HangingRelays(DoorAttack):
    """Announces relays under free keys, each at an address that takes connections and says nothing."""

    name = "hanging-relays"
    about = f"announces {RELAYS} relays under new keys that take requests and never answer"
    stands_for = "dozens of announced relays that hang, trickle or flood, under free keys"
    stopped_by = frozenset({NOT_NAMED})

    async def strike(self, raid: Raid) -> bool:
        """Whoever is told of one of them would ask it."""
        async with contextlib.AsyncExitStack() as stack:
            urls = []
            for _ in range(RELAYS):
                relay = HostileRelay(raid.settings.coordinator, BEHAVIOURS["hangs on everything"])
                urls.append(await relay.start())
                stack.push_async_callback(relay.stop)
                await self._announce(raid, urls[-1])
            await asyncio.sleep(PROBED_SECONDS)
            named = await _named(raid)
            for url in urls:
                raid.note(self, ACCEPTED if url in named else NOT_NAMED, node="", note=url)
        return True

    async def _announce(self, raid: Raid, url: str) -> None:
        identity = Identity()
        await raid.door.register(identity)
        await raid.door.signed(identity, "POST", "/v1/relays", encode(RelayAnnouncement(url=url, version=0)))


async def _named(raid: Raid) -> tuple[str, ...]:
    answer = await raid.door.send("GET", "/v1/relays")
    with contextlib.suppress(PeerFault):
        return decode(RelayList, answer.body, max_bytes=4 * MAX_MESSAGE_BYTES).relays
    return ()
