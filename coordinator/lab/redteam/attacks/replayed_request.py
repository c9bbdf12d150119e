"""A signed request, twice and elsewhere."""

from __future__ import annotations

from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.raid import Raid
from node.protocol.requests import sign_request
from shardcast.wire import encode


class ReplayedRequest(DoorAttack):
    """Whoever listens on the way has signed requests: to send them again, or to another endpoint."""

    name = "replayed-request"
    about = "sends a signed request again, and to another endpoint"
    stands_for = "replaying a request, or using it for another path, run or body"
    stopped_by = frozenset({"replayed_request", "bad_signature"})

    async def strike(self, raid: Raid) -> bool:
        identity = await raid.identity(self)
        body = encode(identity.registration)
        header, _ = sign_request(raid.door.claim("POST", "/v1/nodes", body), key=identity.key)
        await raid.door.send("POST", "/v1/nodes", body, header=header)
        for path in ("/v1/nodes", "/v1/nodes", "/v1/leases", "/v1/relays"):
            answer = await raid.door.send("POST", path, body, header=header)
            raid.note(self, answer.code, node=identity.node, note=path)
        return True
