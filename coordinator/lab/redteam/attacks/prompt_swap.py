"""An easier problem than the slot's, openly; or the slot's seeds in another order."""

from __future__ import annotations

import itertools
from dataclasses import replace

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work
from node.engines.base import SampleRequest
from node.policy.file import render_prompt


class PromptSwap(SlotAttack):
    """Perfect work for another problem, or for the right one with seeds of its own choice."""

    name = "prompt-swap"
    about = "answers a problem or seeds of its own choice, in the open"
    stands_for = "another prompt, other seeds, rows swapped"
    stopped_by = frozenset({"wrong_prompt", "wrong_seed"})

    def __init__(self) -> None:
        self._turn = itertools.cycle((self._easier, self._shuffled))

    async def forge(self, work: Work) -> Forged:
        return submission(await work.draw(requests=next(self._turn)(work)))

    def _easier(self, work: Work) -> list[SampleRequest]:
        # The shortest of a few problems; the slot's own is not among them.
        prompts = [render_prompt(work.policy, work.environment.problem(index).prompt) for index in range(8)]
        easiest = min(prompts, key=len)
        return [replace(request, prompt_ids=tuple(easiest)) for request in work.requests]

    def _shuffled(self, work: Work) -> list[SampleRequest]:
        return [*work.requests[1:], work.requests[0]]
