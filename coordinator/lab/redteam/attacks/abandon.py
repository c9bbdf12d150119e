"""Slots that turn out badly are abandoned."""

from __future__ import annotations

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work


class Abandon(SlotAttack):
    """Draws the group, and hands the slot back if the reward is low: whoever gets it next draws the very same."""

    name = "abandon"
    about = "does a slot, and hands it back if the reward is low"
    stands_for = "choosing easy problems, or trying identities or abandoned leases for them"
    stopped_by = frozenset({"done_by_others", "left_over"})
    picks_slots = True

    async def forge(self, work: Work) -> Forged | None:
        """Honest work: there is nothing to reject, and nothing was gained."""
        honest = await work.honest()
        if sum(map(work.reward, honest)) < len(honest) / 2:
            return None
        return submission(honest, hostile=False)
