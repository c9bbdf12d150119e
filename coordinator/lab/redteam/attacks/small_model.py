"""Tokens of a small model, and a prefill of the right one."""

from __future__ import annotations

from coordinator.lab.redteam.attack import Forged, SlotAttack, unless_forced
from coordinator.lab.redteam.workshop import Recipe, Work
from node.policy.file import save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer

SMALL_SEED = 0x5AA11


class SmallModel(SlotAttack):
    """Decoding costs most: a cheap model decodes, and one prefill of the real one makes all proofs true."""

    name = "small-model"
    about = "decodes with a cheap model, and has the policy prove its tokens"
    stands_for = "tokens from a small model, proofs from the right one"
    stopped_by = frozenset({"wrong_token"})

    async def forge(self, work: Work) -> Forged:
        path = work.workshop.folder / "small-model.safetensors"
        if not path.exists():
            save_policy(make_model(SMALL_SEED), make_tokenizer(), path)  # there is none smaller than the tiny policy
        return await unless_forced(work, await work.prove(await work.draw(Recipe("small-model", model=path))))
