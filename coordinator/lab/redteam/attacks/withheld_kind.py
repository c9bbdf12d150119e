"""Slots of one environment are held until the lease ends."""

from __future__ import annotations

from coordinator.lab.redteam.attack import SelectiveAttack
from coordinator.lab.redteam.workshop import Work


class WithheldKind(SelectiveAttack):
    """Does one environment's slots honestly, and holds all others: at once, since a lease says which it is."""

    name = "withheld-kind"
    about = "does one environment's slots, and holds those of the others until the lease ends"

    async def dislikes(self, work: Work) -> bool:
        return work.environment is not work.workshop.environments[0]
