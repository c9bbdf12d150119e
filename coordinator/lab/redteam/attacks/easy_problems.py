"""Leases that look hard are handed back."""

from __future__ import annotations

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work

MOST_TOKENS = 11


class EasyProblems(SlotAttack):
    """Reads the problem, and does only short ones: a slot that it hands back goes on to somebody else, unchanged."""

    name = "easy-problems"
    about = "hands back every slot whose problem is long, and does the others honestly"
    stands_for = "choosing easy problems, or trying identities or abandoned leases for them"
    stopped_by = frozenset({"done_by_others", "left_over"})
    picks_slots = True

    async def forge(self, work: Work) -> Forged | None:
        """Honest work: there is nothing to reject, and nothing was gained."""
        if len(work.requests[0].prompt_ids) > MOST_TOKENS:
            return None
        return submission(await work.honest(), hostile=False)
