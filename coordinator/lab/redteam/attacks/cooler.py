"""Another temperature than the run's."""

from __future__ import annotations

from coordinator.calibration.cheats import tempered
from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Recipe, Work

RECIPE = Recipe(choose=tempered(0.9))


class Cooler(SlotAttack):
    """A little better than what was asked for, and a little less random."""

    name = "cooler"
    about = "samples at nine tenths of the run's temperature"
    stands_for = "best of many samples, greedy, another temperature or top-p"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        return await unless_forced(work, await work.draw(RECIPE))
