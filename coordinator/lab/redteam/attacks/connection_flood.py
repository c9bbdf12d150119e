"""Connections that never say what they want."""

from __future__ import annotations

import asyncio

from coordinator.lab.processes.journal import ACCEPTED
from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.raid import Raid

CONNECTIONS = 400
HOLD_SECONDS = 5.0
ANSWER_SECONDS = 10.0
HELD, TURNED_AWAY = "held", "turned_away"


class ConnectionFlood(DoorAttack):
    """Half of a request on each of many connections, from one address: others must be served all the same."""

    name = "connection-flood"
    about = f"opens {CONNECTIONS} connections with half a request on each, and waits"
    stands_for = "many requests, large or slow bodies"
    stopped_by = frozenset({HELD, TURNED_AWAY})

    async def strike(self, raid: Raid) -> bool:
        """It gets through if somebody else is not answered meanwhile."""
        async with raid.elsewhere() as door:
            head = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: "
            opened = await asyncio.gather(*(door.connect(head) for _ in range(CONNECTIONS)))
            live = [connection for connection in opened if connection is not None]
            try:
                others = await raid.door.send("GET", "/health", seconds=ANSWER_SECONDS)
                await asyncio.sleep(HOLD_SECONDS)
                held = sum(not reader.at_eof() for reader, _ in live)
            finally:
                for _, writer in live:
                    writer.close()
        for code, count in ((HELD, held), (TURNED_AWAY, CONNECTIONS - held), (ACCEPTED, int(not others.accepted))):
            if count:
                raid.note(self, code, node="", count=count)
        return True
