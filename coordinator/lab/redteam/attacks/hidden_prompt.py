"""A hint before the prompt that nobody is told of."""

from __future__ import annotations

from coordinator.calibration.cheats import as_if_asked, prefixed
from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work


class HiddenPrompt(SlotAttack):
    """Samples with other text before the prompt, and sends the result under the slot's own."""

    name = "hidden-prompt"
    about = "samples with other text before the prompt, and says that there was none"
    stands_for = "another prompt, other seeds, rows swapped"
    stopped_by = frozenset({"proof_mismatch", "wrong_token", "wrong_logprob"})

    async def forge(self, work: Work) -> Forged | None:
        """None where the longer prompt is more than the run allows."""
        requests = prefixed(work.requests)
        if len(requests[0].prompt_ids) > work.spec.sampling.max_prompt_tokens:
            return None
        return submission(as_if_asked(await work.draw(requests=requests), work.requests))
