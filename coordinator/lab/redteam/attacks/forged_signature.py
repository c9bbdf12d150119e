"""Requests whose signature is not that of who they say they are from."""

from __future__ import annotations

import base64

from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.http_client import Identity
from coordinator.lab.redteam.raid import Raid
from node.protocol.messages import AUTHORIZATION_SCHEME
from node.protocol.requests import sign_request
from shardcast.wire import encode

SIGNATURE_BYTES = 64
NEUTRAL = bytes([1, *bytes(31)])
"""The curve's neutral element: under this as a key, (NEUTRAL, 0) is a signature of anything."""


class ForgedSignature(DoorAttack):
    """A broken signature, another's, one under a weak key, of another body, for another run, and none at all."""

    name = "forged-signature"
    about = "signs with the wrong key, for another body or run, or not at all"
    stands_for = "replaying a request, or using it for another path, run or body"
    stopped_by = frozenset({"bad_signature", "body_mismatch", "wrong_run", "unknown_identity"})

    async def strike(self, raid: Raid) -> bool:
        identity, stranger = await raid.identity(self), Identity()
        path, asks = "/v1/leases", (identity.lease_request(held=(0,), slots=slots) for slots in (1, 1024))
        body, more = map(encode, asks)
        header, envelope = sign_request(raid.door.claim("POST", path, body), key=identity.key)
        foreign, theirs = sign_request(raid.door.claim("POST", path, body), key=stranger.key)
        other_run, _ = sign_request(raid.door.claim("POST", path, body, run_id="0" * 64), key=identity.key)
        weak = envelope.replace(bytes.fromhex(identity.node), NEUTRAL)[:-SIGNATURE_BYTES] + NEUTRAL + bytes(32)
        tries = {
            "a bit flipped": (_header(bytes([*envelope[:-1], envelope[-1] ^ 1])), body),
            "another's signature": (_header(envelope[:-SIGNATURE_BYTES] + theirs[-SIGNATURE_BYTES:]), body),
            "a key that signs anything": (_header(weak), body),
            "a key that nobody knows": (foreign, body),
            "another run": (other_run, body),
            "another body": (header, more),
            "none": (None, body),
        }
        for note, (sent, what) in tries.items():
            answer = await raid.door.send("POST", path, what, header=sent)
            raid.note(self, answer.code, node=identity.node, note=note)
        return True


def _header(envelope: bytes) -> str:
    return f"{AUTHORIZATION_SCHEME} {base64.urlsafe_b64encode(envelope).decode('ascii')}"
