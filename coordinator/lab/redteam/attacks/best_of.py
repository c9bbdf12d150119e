"""The best of several samples."""

from __future__ import annotations

import secrets
from dataclasses import replace

from coordinator.calibration.cheats import as_if_asked
from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Work
from node.protocol.slots import SEED_BYTES

SAMPLES = 4


class BestOf(SlotAttack):
    """Who is paid by reward draws until the answer is right: it knows the run's own reward function."""

    name = "best-of"
    about = f"draws each row {SAMPLES} times with seeds of its own, and sends what the reward likes best"
    stands_for = "best of many samples, greedy, another temperature or top-p"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        tries = [
            replace(request, seed=secrets.token_bytes(SEED_BYTES)) for request in work.requests for _ in range(SAMPLES)
        ]
        drawn = await work.draw(requests=tries)
        best = [max(drawn[at : at + SAMPLES], key=work.reward) for at in range(0, len(drawn), SAMPLES)]
        return await unless_forced(work, await work.prove(as_if_asked(best, work.requests)))
