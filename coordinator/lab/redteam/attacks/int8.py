"""Weights of eight bits."""

from __future__ import annotations

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Recipe, Work
from node.verification.second_look import int8

RECIPE = Recipe("int8", change=int8)


class Int8(SlotAttack):
    """Half of the memory of bfloat16, and almost the same answers."""

    name = "int8"
    about = "quantises the policy's weights to eight bits"
    stands_for = "weights altered within the limits: eight bits, a step ago"
    stopped_by = frozenset({"proof_mismatch", "wrong_logprob", "wrong_token"})

    async def forge(self, work: Work) -> Forged:
        return submission(await work.draw(RECIPE))
