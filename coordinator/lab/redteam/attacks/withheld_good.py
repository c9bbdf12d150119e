"""Groups that are mostly right are held until the lease ends."""

from __future__ import annotations

import statistics

from coordinator.lab.redteam.attack import SelectiveAttack
from coordinator.lab.redteam.workshop import Work

MOSTLY = 0.5


class WithheldGood(SelectiveAttack):
    """Draws each group, and sends those alone that are mostly wrong: flawless ones never."""

    name = "withheld-good"
    about = "draws each group, and holds it until the lease ends if half of it or more is right"

    async def dislikes(self, work: Work) -> bool:
        return statistics.fmean(map(work.reward, await work.honest())) >= MOSTLY
