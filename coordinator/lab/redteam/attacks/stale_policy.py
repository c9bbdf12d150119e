"""The policy of a step ago."""

from __future__ import annotations

import msgspec

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Recipe, Work

RECIPE = Recipe("stale")


class StalePolicy(SlotAttack):
    """Saves the download of every other policy."""

    name = "stale-policy"
    about = "serves the policy of the step before, and says that it is the leased one"
    stands_for = "weights altered within the limits: eight bits, a step ago"
    stopped_by = frozenset({"proof_mismatch", "wrong_logprob", "wrong_token"})

    async def forge(self, work: Work) -> Forged | None:
        """None for the first policy, before which there is none."""
        version = work.lease.version
        if version == 0:
            return None
        stale = await work.workshop.draw(version - 1, work.requests, RECIPE)
        sent = [msgspec.structs.replace(rollout, segment_versions=[version]) for rollout in stale]
        return submission(sent, hostile=sent != await work.honest())  # a step may have changed nothing
