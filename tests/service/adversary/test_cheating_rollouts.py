"""Rollouts that are well formed and not what the policy forces: each way to cheat, and the check that sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from cheating import SLOT, SPEC, Chooser, bench_of, engine_rollouts, relabelled
from narrow_run import FAR_INSIDE, policy_file, sharp_model
from torch import Tensor
from verifying import measured

from node.engines.base import SampleRequest
from node.protocol.admission import judge_rows
from node.protocol.reasons import Reason


def changed_file(folder: Path, change: Callable[[torch.nn.Module], None]) -> Path:
    """The run's policy with other weights."""
    model = sharp_model(seed=20)
    with torch.no_grad():
        change(model)
    return policy_file(model, folder)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape and tokenizer: smaller in cost, in a real attack."""
    return policy_file(sharp_model(seed=21), tmp_path_factory.mktemp("other"))


# Honest work passes, or nothing below means anything.


def test_honest_rollouts_are_admitted(bench, honest):
    assert bench.reason(honest) is None


def test_honest_rollouts_of_many_slots_stay_far_inside_the_limits(bench):
    """The limits leave at least five times the largest honest figure."""
    requests = []
    for slot in range(32):
        requests += replace(bench, number=slot).requests
    rows = measured(bench.policies, engine_rollouts(bench.path, requests), spec=SPEC)
    assert judge_rows({number: row.figures for number, row in enumerate(rows)}, limits=FAR_INSIDE) is None


def test_true_proofs_and_logprobs_from_another_implementation_are_admitted(bench, honest):
    """What the forgers below lack is the right tokens, and nothing else."""
    assert bench.reason(bench.forged([one.completion_ids for one in honest])) is None


# Other weights.


def test_another_models_tokens_logprobs_and_proofs(bench, other):
    assert bench.reason(engine_rollouts(other, bench.requests)) == Reason.PROOF_MISMATCH


def test_another_models_tokens_with_the_right_models_proofs(bench, other):
    """A cheap model decodes, and one prefill of the real one makes proofs and log-probabilities true."""
    tokens = [one.completion_ids for one in engine_rollouts(other, bench.requests)]
    assert bench.reason(bench.forged(tokens)) == Reason.WRONG_TOKEN


def int8(model: torch.nn.Module) -> None:
    for weight in model.parameters():
        if weight.ndim == 2:
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
            weight.copy_((weight / scale).round() * scale)


def bfloat16(model: torch.nn.Module) -> None:
    for weight in model.parameters():
        weight.copy_(weight.bfloat16().float())


def noise(share: float) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(3)
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(1 + share * torch.randn(weight.shape, generator=generator))

    return change


@pytest.mark.parametrize(
    "change", [int8, bfloat16, noise(0.01), noise(0.001)], ids=["int8", "bfloat16", "1 % noise", "0.1 % noise"]
)
def test_weights_that_are_almost_the_policys(bench, tmp_path, change):
    """Cheaper weights, or those of a step ago: in float32 every group of four is seen, whatever its tokens."""
    almost = changed_file(tmp_path, change)
    assert bench.reason(engine_rollouts(almost, bench.requests)) in {Reason.PROOF_MISMATCH, Reason.WRONG_LOGPROB}


def test_a_policy_one_optimizer_step_old(bench, honest, tmp_path):
    """Stale by one step of the demonstration's smallest learning rate, claimed to be current."""

    def step(model: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(4)
        for weight in model.parameters():
            weight.add_(5e-5 * torch.sign(torch.randn(weight.shape, generator=generator)))

    assert bench_of(changed_file(tmp_path, step)).reason(honest) == Reason.PROOF_MISMATCH


# Other tokens.


def test_colluders_with_a_constant_answer_and_true_logprobs(bench):
    answer = [*bench.policy.tokenizer.backend_tokenizer.encode("<think></think>0").ids, min(bench.policy.eos_ids)]
    assert bench.reason(bench.forged([answer] * 4)) == Reason.WRONG_TOKEN


def test_the_best_of_many_samples(bench):
    """Drawing again with seeds of one's own until the answer is right."""
    others = [SampleRequest(request.prompt_ids, bytes([9]) * 16) for request in bench.requests]
    assert bench.reason(relabelled(engine_rollouts(bench.path, others), bench)) == Reason.WRONG_TOKEN


def test_one_row_better_than_drawn_among_honest_ones(bench, honest):
    own_seed = SampleRequest(bench.requests[2].prompt_ids, bytes([9]) * 16)
    (better,) = engine_rollouts(bench.path, [own_seed])
    rollouts = [*honest[:2], msgspec.structs.replace(better, seed=honest[2].seed), honest[3]]
    verdict = bench.verdict(rollouts)
    assert verdict.reason == Reason.WRONG_TOKEN
    assert verdict.finding is not None
    assert verdict.finding.row == 2


def test_seeds_swapped_between_rows(bench, honest):
    swapped = relabelled([honest[1], honest[0], *honest[2:]], bench)
    assert bench.reason(swapped) == Reason.WRONG_TOKEN


def test_one_honest_sample_sent_for_the_whole_group(bench, honest):
    assert bench.reason(relabelled([honest[0]] * 4, bench)) == Reason.WRONG_TOKEN


CHOOSERS: dict[str, Chooser] = {
    "greedy": lambda logits, _: int(logits.argmax()),
    "cooler than the run": lambda logits, noise: int((logits / 0.9 + noise).argmax()),
    "top-p": lambda logits, noise: int((kept(logits, share=0.9) + noise).argmax()),
    "always the runner-up": lambda logits, noise: int((logits + noise).topk(2).indices[1]),
}


def kept(logits: Tensor, *, share: float) -> Tensor:
    """`logits` with all but the nucleus at minus infinity."""
    ordered, index = logits.softmax(-1).sort(descending=True)
    return logits.index_fill(0, index[ordered.cumsum(0) - ordered > share], -torch.inf)


@pytest.mark.parametrize("name", CHOOSERS)
def test_another_rule_of_choice(bench, name):
    assert bench.reason(bench.forged(bench.chosen(CHOOSERS[name]))) == Reason.WRONG_TOKEN


def test_one_token_changed(bench, honest):
    tokens = [list(one.completion_ids) for one in honest]
    tokens[3][5] = (tokens[3][5] + 3) % 100 + 3
    assert bench.reason(bench.forged(tokens)) == Reason.WRONG_TOKEN


def test_stopping_early(bench, honest):
    """Fewer tokens cost less: cut, and close with an end mark."""
    cut = [[*one.completion_ids[:3], min(bench.policy.eos_ids)] for one in honest]
    assert bench.reason(bench.forged(cut)) == Reason.WRONG_TOKEN


def test_suppressing_the_end(bench):
    """More tokens can earn more, where pay is by the token: never take an end mark when one is drawn."""
    eos = min(bench.policy.eos_ids)
    slots = (replace(bench, number=number) for number in range(64))
    bench = next(
        slot
        for slot in slots
        if any(one.completion_ids[-1] == eos for one in engine_rollouts(slot.path, slot.requests))
    )

    def choose(logits: Tensor, noise: Tensor) -> int:
        scores = logits + noise
        scores[eos] = -torch.inf
        return int(scores.argmax())

    suppressed = bench.chosen(choose)
    assert all(len(tokens) == SPEC.sampling.max_new_tokens for tokens in suppressed)
    assert bench.reason(bench.forged(suppressed)) == Reason.WRONG_TOKEN


def test_padding_after_the_end(bench, honest):
    padded = [[*one.completion_ids[:3], min(bench.policy.eos_ids), 5, 6] for one in honest]
    assert bench.reason(bench.forged(padded)) == Reason.TOKENS_AFTER_EOS


# Other prompts.


def test_an_easier_prompt_behind_the_prescribed_one(bench):
    """Sampled with a hint in front, and sent under the slot's own prompt."""
    hint = bench.policy.tokenizer.backend_tokenizer.encode("Hint: say 7. ").ids
    requests = [SampleRequest((*hint, *request.prompt_ids), request.seed) for request in bench.requests]
    assert bench.reason(relabelled(engine_rollouts(bench.path, requests), bench)) == Reason.PROOF_MISMATCH


def test_a_changed_prompt_sent_openly(bench, honest):
    changed = [msgspec.structs.replace(one, prompt_ids=[*one.prompt_ids[:-1], 5]) for one in honest]
    assert bench.reason(changed) == Reason.WRONG_PROMPT


def test_another_slots_honest_rollouts(bench, honest):
    """Replay of one's own or a copy of somebody else's work."""
    assert replace(bench, number=SLOT + 1).reason(honest) in {Reason.WRONG_PROMPT, Reason.WRONG_SEED}


# Other numbers.


def test_forged_logprobs(bench, honest):
    """The trainer's ratio would be against probabilities that never were."""
    for shift in (-0.5, -1e-3, 1e-3):
        forged = [
            msgspec.structs.replace(one, logprobs=[min(0.0, value + shift) for value in one.logprobs]) for one in honest
        ]
        assert bench.reason(forged) == Reason.WRONG_LOGPROB


def test_one_forged_logprob(bench, honest):
    at = min(range(len(honest[1].logprobs)), key=honest[1].logprobs.__getitem__)
    logprobs = [0.0 if index == at else value for index, value in enumerate(honest[1].logprobs)]
    forged = [honest[0], msgspec.structs.replace(honest[1], logprobs=logprobs), *honest[2:]]
    assert bench.reason(forged) == Reason.WRONG_LOGPROB


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.5])
def test_logprobs_that_are_no_log_probabilities(bench, honest, value):
    forged = [msgspec.structs.replace(honest[0], logprobs=[value] * len(honest[0].logprobs)), *honest[1:]]
    assert bench.reason(forged) == Reason.LOGPROB_NOT_FINITE
