"""Proofs of other tokens than those that are sent."""

from __future__ import annotations

import secrets
from dataclasses import replace

import msgspec

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work
from node.protocol.slots import SEED_BYTES


class ForeignProofs(SlotAttack):
    """The policy's states, but those of another sample of the same prompt."""

    name = "foreign-proofs"
    about = "sends proofs of one sample with the tokens of another"
    stands_for = "random, constant or replayed sketches; those of another prompt or sample"
    stopped_by = frozenset({"proof_mismatch", "wrong_proof_count", "malformed_proof"})

    async def forge(self, work: Work) -> Forged:
        """As many proofs of the right size as there are, wherever the other sample is long enough."""
        others = [replace(request, seed=secrets.token_bytes(SEED_BYTES)) for request in work.requests]
        drawn = await work.draw(requests=others)
        honest = await work.honest()
        sent = [msgspec.structs.replace(own, proofs=other.proofs) for own, other in zip(honest, drawn, strict=True)]
        return submission(sent, hostile=sent != honest)
