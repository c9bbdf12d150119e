"""A run with a tool, a policy that uses it all the time, and workers that lie about what the tool said."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from narrow_run import LIMITS, policy_file
from torch import Tensor

from node.policy.file import Policy
from node.policy.models.tiny_llama import EOS, make_model
from node.protocol.run import BatchSpec, EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec, StandingSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Rollout
from node.protocol.turns import RUN_RULES, AskReply, Dialogue, TurnRules
from node.verification.proofs import build_proofs

SHARPNESS = 3.0
END_LOGIT = 6.0
"""By how much the end of a turn is likelier than the random policy thinks: a turn has about ten tokens."""

SPEC = RunSpec(
    name="talking",
    environments=(EnvironmentSpec(name="calculator"),),
    sampling=SamplingSpec(group_size=4, max_new_tokens=48, max_turns=4, max_reply_tokens=64),
    proofs=ProofSpec(chunk_tokens=8),
    limits=LIMITS,
    standing=StandingSpec(ban_after=1000),
    batch=BatchSpec(groups_per_step=200, lease_seconds=900.0, max_leases_per_node=1000, rejection_backoff_seconds=0.0),
)


@cache
def talkative_model(seed: int = 0) -> torch.nn.Module:
    """Random weights, in whose every state the end of the turn is far from unlikely."""
    model = make_model(seed=seed)
    with torch.no_grad():
        model.base_model.norm.weight.fill_(SHARPNESS)
        states = model.base_model(input_ids=torch.arange(5, 101)[None]).last_hidden_state[0]
        mean = states.mean(0)
        model.get_input_embeddings().weight[EOS] += END_LOGIT * mean / mean.square().sum()
    return model


def talkative_file(folder: Path, seed: int = 0) -> Path:
    return policy_file(talkative_model(seed), folder)


@torch.inference_mode()
def talk(
    policy: Policy,
    prompt_ids: Sequence[int],
    seed: bytes,
    ask: AskReply | None,
    *,
    spec: RunSpec = SPEC,
    version: int = 0,
    rules: TurnRules = RUN_RULES,
) -> Rollout:
    """A completion over what `ask` says and `rules` put in, by plain transformers that read all anew for each token."""
    dialogue = Dialogue(spec.sampling, policy.eos_ids, ask, rules)
    context, tokens, logprobs, proofs = list(prompt_ids), list[int](), list[float](), list[bytes]()
    while True:
        turn, states = list[int](), list[Tensor]()
        while len(turn) < dialogue.room and not (turn and rules.ends_turn(turn, policy.eos_ids)):
            output = policy.model(input_ids=torch.tensor([context]), output_hidden_states=True, use_cache=False)
            scaled = output.logits[0, -1].float() / spec.sampling.temperature
            noise = gumbel_noise([seed], [len(tokens)], vocabulary=policy.vocabulary)
            token = int((scaled + torch.from_numpy(noise)[0]).argmax())
            logprobs.append(float(scaled.log_softmax(-1)[token]))
            states.append(output.hidden_states[-1][0, -1])
            for each in (tokens, turn, context):
                each.append(token)
        chunks = list(torch.split(torch.stack(states).bfloat16(), spec.proofs.chunk_tokens))
        proofs += build_proofs(chunks, [seed] * len(chunks), spec=spec.proofs)
        said = dialogue.after(turn)
        if said is None:
            break
        context += said
    return Rollout(
        seed=seed,
        prompt_ids=list(prompt_ids),
        completion_ids=tokens,
        logprobs=logprobs,
        segment_versions=[version],
        segment_tokens=[len(tokens)],
        proofs=proofs,
    )
