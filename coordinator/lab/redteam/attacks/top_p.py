"""Sampling from the nucleus."""

from __future__ import annotations

from coordinator.calibration.cheats import nucleus
from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Recipe, Work

RECIPE = Recipe(choose=nucleus(0.9))


class TopP(SlotAttack):
    """What a serving engine does by default."""

    name = "top-p"
    about = "samples from the likeliest nine tenths only"
    stands_for = "best of many samples, greedy, another temperature or top-p"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        return await unless_forced(work, await work.draw(RECIPE))
