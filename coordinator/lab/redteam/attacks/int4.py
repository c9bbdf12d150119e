"""Weights of four bits."""

from __future__ import annotations

from coordinator.calibration import cheats
from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Recipe, Work

RECIPE = Recipe("int4", change=cheats.int4)


class Int4(SlotAttack):
    """A quarter of the memory of bfloat16."""

    name = "int4"
    about = "quantises the policy's weights to four bits"
    stands_for = "another model, or weights altered beyond the limits"
    stopped_by = frozenset({"proof_mismatch", "wrong_logprob", "wrong_token"})

    async def forge(self, work: Work) -> Forged:
        return submission(await work.draw(RECIPE))
