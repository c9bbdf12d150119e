"""A new key for every slot."""

from __future__ import annotations

import random

import torch

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work
from node.engines.base import SampleRequest
from node.protocol.submission import Rollout
from node.verification.proofs import build_proofs


class Sybils(SlotAttack):
    """A flood of garbage that is well formed in every way, each piece by somebody whom nobody has seen before."""

    name = "sybils"
    about = "sends invented tokens with well-formed proofs, each time under a new key"
    stands_for = "a flood of invented tokens with well-formed proofs, to waste prefills"
    stopped_by = frozenset({"proof_mismatch", "wrong_token"})
    slots_per_key = 1

    async def forge(self, work: Work) -> Forged:
        """It costs its author nothing: no model is asked."""
        return submission([invented(work, request) for request in work.requests])


def invented(work: Work, request: SampleRequest) -> Rollout:
    """A completion that no policy drew."""
    rng = random.Random(request.seed)
    tokens, proofs = work.spec.sampling.max_new_tokens, work.spec.proofs
    allowed = [token for token in range(work.policy.vocabulary) if token not in work.policy.eos_ids]
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    states = torch.randn(tokens, work.policy.hidden, generator=generator).bfloat16()
    chunks = list(torch.split(states, proofs.chunk_tokens))
    return Rollout(
        seed=request.seed,
        prompt_ids=list(request.prompt_ids),
        completion_ids=rng.choices(allowed, k=tokens),
        logprobs=[-rng.random() * 8 for _ in range(tokens)],
        segment_versions=[work.lease.version],
        segment_tokens=[tokens],
        proofs=build_proofs(chunks, [request.seed] * len(chunks), spec=proofs),
    )
