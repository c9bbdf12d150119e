"""Tokens after the end."""

from __future__ import annotations

import msgspec

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work


class Padding(SlotAttack):
    """Who is paid by the token goes on after the end mark."""

    name = "padding"
    about = "goes on after the end mark"
    stands_for = "stopping early, going on after the end, padding"
    stopped_by = frozenset({"tokens_after_eos"})

    async def forge(self, work: Work) -> Forged:
        cap = work.spec.sampling.max_new_tokens
        padded = [
            msgspec.structs.replace(
                rollout, completion_ids=[*rollout.completion_ids[: cap - 3], work.end, *rollout.completion_ids[:2]]
            )
            for rollout in await work.honest()
        ]
        return submission(await work.prove(padded))
