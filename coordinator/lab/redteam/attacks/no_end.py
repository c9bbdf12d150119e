"""Completions that never end."""

from __future__ import annotations

import torch

from coordinator.calibration.cheats import Chooser
from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Recipe, Work


class NoEnd(SlotAttack):
    """Who is paid by the token never takes an end mark."""

    name = "no-end"
    about = "never takes an end mark when one is drawn: pay is by the token"
    stands_for = "stopping early, going on after the end, padding"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        ends = sorted(work.policy.eos_ids)

        def pick(scaled: torch.Tensor, noises: torch.Tensor) -> torch.Tensor:
            scores = scaled + noises
            scores[:, ends] = -torch.inf
            return scores.argmax(-1)

        return await unless_forced(work, await work.draw(Recipe(choose=Chooser(pick))))
