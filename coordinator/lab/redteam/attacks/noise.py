"""Weights with noise."""

from __future__ import annotations

from coordinator.calibration import cheats
from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Recipe, Work

RECIPE = Recipe("noise", change=cheats.noise)


class Noise(SlotAttack):
    """Stands for any lossy way to hold or to compute with the weights."""

    name = "noise"
    about = "changes each weight by a hundredth of itself, at random"
    stands_for = "another model, or weights altered beyond the limits"
    stopped_by = frozenset({"proof_mismatch", "wrong_logprob", "wrong_token"})

    async def forge(self, work: Work) -> Forged:
        return submission(await work.draw(RECIPE))
