"""An upload that hardly moves."""

from __future__ import annotations

import asyncio

from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.http_client import CLOSED
from coordinator.lab.redteam.raid import Raid
from node.protocol.requests import sign_request

BODY_BYTES = 4096
SECONDS_PER_BYTE = 1.0


class SlowUpload(DoorAttack):
    """A byte a second, and a second upload for the same lease meanwhile."""

    name = "slow-upload"
    about = "uploads a byte a second, and starts another upload for the same lease meanwhile"
    stands_for = "many requests, large or slow bodies"
    stopped_by = frozenset({"bad_request", "too_many_requests", "expired_lease", CLOSED})

    async def strike(self, raid: Raid) -> bool:
        """Goes on until it is thrown out, which takes minutes."""
        taken = await raid.lease(self)
        if taken is None:
            return False
        identity, lease = taken
        path, body = f"/v1/submissions/{lease.lease_id}", b"x" * BODY_BYTES
        header, _ = sign_request(raid.door.claim("PUT", path, body), key=identity.key)
        lines = (f"PUT {path} HTTP/1.1", "Host: x", f"Authorization: {header}", f"Content-Length: {len(body)}")
        connection = await raid.door.connect("\r\n".join((*lines, "", "")).encode())
        if connection is None:
            return False
        trickle = asyncio.create_task(_trickle(*connection, body))
        try:
            await asyncio.sleep(SECONDS_PER_BYTE)
            answer, _ = await raid.door.submit(identity, lease, b"y" * 1000)
            raid.note(self, answer.code, node=identity.node, note="beside it")
            raid.note(self, await trickle, node=identity.node, note="a byte a second")
        finally:
            trickle.cancel()
            connection[1].close()
        raid.discard(self)
        return True


async def _trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> str:
    """The code that the coordinator throws it out with."""
    answer = asyncio.create_task(reader.read(4096))
    try:
        for at in range(len(body)):
            writer.write(body[at : at + 1])
            await writer.drain()
            await asyncio.wait({answer}, timeout=SECONDS_PER_BYTE)
            if answer.done():
                break
        said = await answer
    except OSError:
        return CLOSED
    finally:
        answer.cancel()
    _, _, after = said.partition(b'"code":"')
    return after.partition(b'"')[0].decode("ascii", errors="replace") or CLOSED
