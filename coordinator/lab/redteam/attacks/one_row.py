"""One bad row among honest ones."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from coordinator.calibration.cheats import as_if_asked
from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Work
from node.protocol.slots import SEED_BYTES
from node.protocol.submission import Rollout

SAMPLES = 4


class OneRow(SlotAttack):
    """If one row is looked at, most of the time it is another one."""

    name = "one-row"
    about = "replaces one row of an honest group by a sample that the reward likes better"
    stands_for = "cheating a little in every slot; good work first, to have credit"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        return await unless_forced(work, await one_row_better(work))


async def one_row_better(work: Work) -> Sequence[Rollout]:
    """The honest group, with the row of the lowest reward drawn again until it is better."""
    honest = await work.honest()
    worst = min(range(len(honest)), key=lambda row: work.reward(honest[row]))
    tries = [replace(work.requests[worst], seed=secrets.token_bytes(SEED_BYTES)) for _ in range(SAMPLES)]
    better = max(await work.draw(requests=tries), key=work.reward)
    (sent,) = await work.prove(as_if_asked([better], [work.requests[worst]]))
    return [*honest[:worst], sent, *honest[worst + 1 :]]
