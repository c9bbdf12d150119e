"""One constant answer to everything."""

from __future__ import annotations

import msgspec

from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Work

CONSTANT_ANSWER = "<think></think>0"


class Colluder(SlotAttack):
    """Needs the real weights, and passes every check but the one that a node has no choice of tokens.

    With a reward that it could claim itself, it would teach the policy its answer.
    """

    name = "colluder"
    about = "gives one constant answer, with the policy's true log-probabilities and proofs"
    stands_for = "a constant answer with true log-probabilities and proofs"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        answer = [*work.encode(CONSTANT_ANSWER), work.end]
        constant = [msgspec.structs.replace(rollout, completion_ids=answer) for rollout in await work.honest()]
        return await unless_forced(work, await work.prove(constant))
