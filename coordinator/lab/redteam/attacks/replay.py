"""One's own earlier work again."""

from __future__ import annotations

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work


class ReplayedSubmission(SlotAttack):
    """Does one slot honestly, and sends those bytes for every later one."""

    name = "replay"
    about = "does one slot, and sends the same file for every other"
    stands_for = "replaying a request, or using it for another path, run or body"
    stopped_by = frozenset({"duplicate_submission", "wrong_prompt", "wrong_seed"})

    def __init__(self) -> None:
        self._kept: bytes | None = None

    async def forge(self, work: Work) -> Forged:
        if self._kept is None:
            honest = submission(await work.honest(), hostile=False)
            self._kept = honest.body
            return honest
        return Forged(self._kept)
