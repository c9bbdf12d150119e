"""Groups that are as good as the others, or better, are held until the lease ends."""

from __future__ import annotations

import statistics

from coordinator.lab.redteam.attack import SelectiveAttack
from coordinator.lab.redteam.workshop import Work


class WithheldGood(SelectiveAttack):
    """Draws each group, and sends those alone that are worse than the mean of all that it drew."""

    name = "withheld-good"
    about = "draws each group, and holds it until the lease ends unless it is worse than the mean of those before"

    def __init__(self) -> None:
        self._rewards = list[float]()

    async def dislikes(self, work: Work) -> bool:
        reward = statistics.fmean(map(work.reward, await work.honest()))
        self._rewards.append(reward)
        return reward >= statistics.fmean(self._rewards)
