"""Bodies that are larger than allowed, or than signed."""

from __future__ import annotations

from collections.abc import AsyncIterator

from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.http_client import CLOSED
from coordinator.lab.redteam.raid import Raid
from node.protocol.requests import sign_request

PIECE_BYTES = 64 * 1024
ENDLESS_BYTES = 16 * 1024 * 1024


class HugeUpload(DoorAttack):
    """Says that it will send too much; and says that it will not, and does."""

    name = "huge-upload"
    about = "uploads more than the run allows, and more than it signed"
    stands_for = "many requests, large or slow bodies"
    stopped_by = frozenset({"oversized_body", "body_mismatch", CLOSED})

    async def strike(self, raid: Raid) -> bool:
        taken = await raid.lease(self)
        if taken is None:
            return False
        identity, lease = taken
        most = raid.spec.limits.max_submission_bytes
        answer, _ = await raid.door.submit(identity, lease, b"x", body_bytes=most + 1)
        raid.note(self, answer.code, node=identity.node, note="announced")
        path = f"/v1/submissions/{lease.lease_id}"
        header, _ = sign_request(raid.door.claim("PUT", path, b"x" * 1000), key=identity.key)
        answer = await raid.door.send("PUT", path, _endless(), header=header)
        raid.note(self, answer.code, node=identity.node, note="not announced")
        answer, _ = await raid.door.signed(identity, "POST", "/v1/leases", b" " * (PIECE_BYTES + 1))
        raid.note(self, answer.code, node=identity.node, note="a message")
        await raid.door.give_back(identity, lease)
        return True


async def _endless() -> AsyncIterator[bytes]:
    for _ in range(ENDLESS_BYTES // PIECE_BYTES):
        yield bytes(PIECE_BYTES)
