"""Always the likeliest token."""

from __future__ import annotations

from coordinator.calibration.cheats import greedy
from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Recipe, Work

RECIPE = Recipe(choose=greedy())


class Greedy(SlotAttack):
    """Better answers than were asked for."""

    name = "greedy"
    about = "takes the likeliest token, whatever the seed says"
    stands_for = "best of many samples, greedy, another temperature or top-p"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        return await unless_forced(work, await work.draw(RECIPE))
