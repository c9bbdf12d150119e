"""Tokens, log-probabilities and proofs of another model."""

from __future__ import annotations

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Recipe, Work
from node.policy.file import save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer

OTHER_SEED = 0x0DD


class OtherModel(SlotAttack):
    """Somebody who saves the cost of the real weights: a model of the tiny policy's shape."""

    name = "other-model"
    about = "serves another model than the run's policy"
    stands_for = "another model"
    stopped_by = frozenset({"proof_mismatch"})

    async def forge(self, work: Work) -> Forged:
        path = work.workshop.folder / "other-model.safetensors"
        if not path.exists():
            save_policy(make_model(OTHER_SEED), make_tokenizer(), path)
        return submission(await work.draw(Recipe("other-model", model=path)))
