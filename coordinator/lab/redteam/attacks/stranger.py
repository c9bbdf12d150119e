"""Requests by whom nobody knows, and for what does not exist."""

from __future__ import annotations

import secrets

from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.http_client import Identity
from coordinator.lab.redteam.raid import Raid
from shardcast.wire import encode

NOTHING_TO_DO = "no_work"


class Stranger(DoorAttack):
    """A key that did not register, leases that nobody gave, policies that nobody published."""

    name = "stranger"
    about = "asks under an unregistered key, for leases and policies that do not exist"
    stands_for = "uploads that end without a verdict, to fill the disk"
    stopped_by = frozenset({"unknown_identity", "unknown_lease", NOTHING_TO_DO})

    async def strike(self, raid: Raid) -> bool:
        nobody, known = Identity(), await raid.identity(self)
        ask = encode(nobody.lease_request(held=(0,)))
        nowhere = f"/v1/submissions/{secrets.token_hex(32)}"
        for identity, method, path, body in (
            (nobody, "POST", "/v1/leases", ask),
            (nobody, "PUT", nowhere, b"x" * 1000),
            (known, "PUT", nowhere, b"x" * 1000),
            (known, "POST", f"/v1/leases/{secrets.token_hex(32)}/return", b""),
        ):
            answer, _ = await raid.door.signed(identity, method, path, body)
            raid.note(self, answer.code, node=identity.node, note=f"{method} {path[:16]}")
        answer, leases = await raid.door.lease(known, held=(2**40,), slots=1024)
        raid.note(self, answer.code if leases or not answer.accepted else NOTHING_TO_DO, node=known.node)
        return True
