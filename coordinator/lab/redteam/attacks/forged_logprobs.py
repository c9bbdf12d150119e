"""Log-probabilities that are not the policy's."""

from __future__ import annotations

import msgspec

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work

SHIFT = 0.5


class ForgedLogprobs(SlotAttack):
    """Would drive the trainer's importance ratios."""

    name = "forged-logprobs"
    about = "says that its tokens were less likely than they were"
    stands_for = "forged log-probabilities"
    stopped_by = frozenset({"wrong_logprob"})

    async def forge(self, work: Work) -> Forged:
        return submission(
            [
                msgspec.structs.replace(rollout, logprobs=[logprob - SHIFT for logprob in rollout.logprobs])
                for rollout in await work.honest()
            ]
        )
