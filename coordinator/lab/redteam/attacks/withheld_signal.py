"""Groups from which training would learn are held until the lease ends."""

from __future__ import annotations

from coordinator.lab.redteam.attack import SelectiveAttack
from coordinator.lab.redteam.workshop import Work
from node.protocol.admission import has_signal


class WithheldSignal(SelectiveAttack):
    """Draws each group, and sends those alone whose rewards are all equal."""

    name = "withheld-signal"
    about = "draws each group, and holds it until the lease ends if its rewards differ"

    async def dislikes(self, work: Work) -> bool:
        return has_signal([work.reward(rollout) for rollout in await work.honest()])
