"""Completions that end early."""

from __future__ import annotations

import msgspec

from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Work

TOKENS = 3


class EarlyStop(SlotAttack):
    """Fewer tokens cost less: cut, and closed with an end mark."""

    name = "early-stop"
    about = f"ends every completion after {TOKENS} tokens"
    stands_for = "stopping early, going on after the end, padding"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        cut = [
            msgspec.structs.replace(rollout, completion_ids=[*rollout.completion_ids[:TOKENS], work.end])
            if len(rollout.completion_ids) > TOKENS
            else rollout  # which ends by itself as early
            for rollout in await work.honest()
        ]
        return await unless_forced(work, await work.prove(cut))
