"""Requests from another time."""

from __future__ import annotations

import time

from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.raid import Raid
from shardcast.wire import encode

SKEWS_SECONDS = (-86_400, -600, -90, 90, 600, 86_400)


class ClockSkew(DoorAttack):
    """Signed for later, to be replayed when the nonce is forgotten; or long ago, and kept."""

    name = "clock-skew"
    about = "signs requests for other times, to use them when their nonces are forgotten"
    stands_for = "replaying a request, or using it for another path, run or body"
    stopped_by = frozenset({"clock_skew"})

    async def strike(self, raid: Raid) -> bool:
        identity = await raid.identity(self)
        body = encode(identity.lease_request(held=(0,)))
        for skew in SKEWS_SECONDS:
            at = int(time.time()) + skew
            answer, _ = await raid.door.signed(identity, "POST", "/v1/leases", body, issued_at=at)
            raid.note(self, answer.code, node=identity.node, note=f"{skew:+d} s")
        return True
