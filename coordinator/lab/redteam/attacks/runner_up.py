"""The second best token wherever it is almost the best."""

from __future__ import annotations

from coordinator.calibration.cheats import runner_up
from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Recipe, Work

RECIPE = Recipe(choose=runner_up(0.1))


class RunnerUp(SlotAttack):
    """Poison through the tolerance: near-ties that go the other way."""

    name = "runner-up"
    about = "takes the second best token wherever that loses by less than 0.1"
    stands_for = "taking near-ties that help, within the tolerance"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        return await unless_forced(work, await work.draw(RECIPE))
