"""The reference prefill measures what it says, and only a sender's fault ever becomes a rejection."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from verifying import InMemory, decided, generated, judged, measured, measured_many

from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.environments import Environment, Problem, load_environment
from node.episodes.expected import expected_of
from node.policy.file import Policy, load_policy
from node.protocol.admission import NOT_FINITE, Outcome, Verdict
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, LimitsSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.slots import group_seeds, slot_problem
from node.protocol.submission import Rollout
from node.submission.reader import VerifierFailed
from node.submission.writer import write_rollouts
from node.verification.judge import JudgedClaim
from node.verification.plan import Claim, Rules, measure_all
from node.verification.verify import verify
from toploc import verify_proofs_bytes

RUN_ID, MANIFEST, VERSION = "ab" * 32, "cd" * 32, 1
SPEC = RunSpec(
    name="verification",
    environments=(EnvironmentSpec(name="arithmetic"), EnvironmentSpec(name="reverse")),
    sampling=SamplingSpec(group_size=3, max_new_tokens=40, temperature=0.7),
    proofs=ProofSpec(scheme="toploc/1"),
    limits=LimitsSpec(
        exponent_mismatches=8.0,
        mantissa_mean=0.5,
        mantissa_median=1.0,
        token_margin=1e-3,
        rollout_margin_mean=1e-4,
        logprob_error=1e-3,
    ),
)


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return load_policy(tiny_policy_path, dtype=torch.float32)


@pytest.fixture
def own_policy(tiny_policy_path: Path) -> Policy:
    """A policy that the test may break."""
    return load_policy(tiny_policy_path, dtype=torch.float32)


@pytest.fixture(scope="module")
def environments() -> list[Environment]:
    return [load_environment(environment) for environment in SPEC.environments]


@pytest.fixture(scope="module")
def groups(tiny_policy_path: Path, policy: Policy, environments: list[Environment]) -> list[list[Rollout]]:
    """What an honest worker returns for slots 0 to 3."""
    requests = []
    for slot in range(4):
        expected = expected_of(
            SPEC, policy, environments, run_id=RUN_ID, version=VERSION, manifest_digest=MANIFEST, slot=slot
        )
        requests += [SampleRequest(prompt_ids=tuple(expected.prompt_ids), seed=seed) for seed in expected.seeds]
    rollouts = generated(TorchEngine(SPEC), tiny_policy_path, requests, version=1)
    return [rollouts[start : start + 3] for start in range(0, len(rollouts), 3)]


def judgement_of(
    rollouts: Sequence[Rollout], policy: Policy, environments: Sequence[Environment], *, slot: int, **draws: Any
) -> JudgedClaim:
    rules = Rules(RUN_ID, SPEC, environments)
    (judgement,) = judged([claim_of(rollouts, slot=slot)], {VERSION: policy}, rules=rules, **draws)
    return judgement


def verdict_of(
    rollouts: Sequence[Rollout], policy: Policy, environments: Sequence[Environment], *, slot: int
) -> Verdict:
    return judgement_of(rollouts, policy, environments, slot=slot).verdict


def claim_of(rollouts: Sequence[Rollout], *, slot: int) -> Claim:
    return Claim(version=VERSION, manifest_digest=MANIFEST, slot=slot, rollouts=rollouts)


def changed(group: Sequence[Rollout], row: int, **fields: object) -> list[Rollout]:
    """`group` with some fields of one row replaced."""
    return [msgspec.structs.replace(one, **fields) if at == row else one for at, one in enumerate(group)]


def cut(rollout: Rollout, *, tokens: int, proofs: int) -> Rollout:
    """The beginning of `rollout`."""
    return msgspec.structs.replace(
        rollout,
        completion_ids=rollout.completion_ids[:tokens],
        logprobs=rollout.logprobs[:tokens],
        segment_tokens=[tokens],
        proofs=rollout.proofs[:proofs],
    )


# Measuring.


def naive(policy: Policy, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Hidden states, log-probabilities and margins of one rollout, from the whole model and one row at a time."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.inference_mode():
        output = policy.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    first, count = len(rollout.prompt_ids) - 1, len(rollout.completion_ids)
    logits = output.logits[0, first : first + count].float() / SPEC.sampling.temperature
    logprobs = torch.stack(
        [row.log_softmax(0)[token] for row, token in zip(logits, rollout.completion_ids, strict=True)]
    )
    margins = []
    for position, token in enumerate(rollout.completion_ids):
        noise = gumbel_noise([rollout.seed], [position], vocabulary=policy.vocabulary)
        score = logits[position] + torch.from_numpy(noise)[0]
        margins.append(float(score.max() - score[token]))
    return output.hidden_states[-1][0, first : first + count], logprobs, margins


def test_figures_are_those_of_the_whole_model_row_by_row(policy, groups):
    """One position off, and every honest worker would be rejected or every dishonest one admitted."""
    other = [
        msgspec.structs.replace(one, completion_ids=[3, *one.completion_ids[1:]], logprobs=[-1.0] * len(one.logprobs))
        for one in groups[0]
    ]
    found = measured({VERSION: policy}, other, spec=SPEC)
    for rollout, row in zip(other, found, strict=True):
        figures, logprobs = row.figures, row.logprobs
        hidden, expected_logprobs, margins = naive(policy, rollout)
        torch.testing.assert_close(torch.tensor(logprobs), expected_logprobs, atol=1e-5, rtol=0)
        assert figures.token_margin == pytest.approx(max(margins), abs=1e-5)
        assert figures.margin_mean == pytest.approx(sum(margins) / len(margins), abs=1e-5)
        assert figures.logprob_error == pytest.approx(float((expected_logprobs + 1.0).abs().max()), abs=1e-5)
        proofs = verify_proofs_bytes(hidden.bfloat16(), rollout.proofs, 32, 128, True)
        assert figures.exponent_mismatches == max(proof.exp_mismatches for proof in proofs)
        assert figures.mantissa_mean == pytest.approx(max(proof.mant_err_mean for proof in proofs), rel=0.05)
    assert found[0].figures.token_margin > 0.1


def test_an_honest_group_has_figures_near_zero(policy, groups):
    for group in groups:
        for row, rollout in zip(measured({VERSION: policy}, group, spec=SPEC), group, strict=True):
            figures, logprobs = row.figures, row.logprobs
            assert figures.exponent_mismatches <= 1
            assert figures.mantissa_mean < 0.1
            assert figures.token_margin < 1e-4
            assert figures.logprob_error < 1e-5
            assert logprobs == pytest.approx(rollout.logprobs, abs=1e-5)


def test_a_last_token_alone_in_its_chunk_is_measured(policy, groups):
    """Completions of 33 tokens have a chunk of one token: its proof counts."""
    long = next(one for group in groups for one in group if len(one.completion_ids) > 33)
    shorter = cut(long, tokens=33, proofs=2)
    assert measured({VERSION: policy}, [shorter], spec=SPEC)[0].figures.exponent_mismatches > 8


def test_a_single_token_completion(policy, groups):
    one = groups[0][0]
    short = cut(one, tokens=1, proofs=1)
    found = measured({VERSION: policy}, [short], spec=SPEC)
    assert found[0].logprobs == pytest.approx(one.logprobs[:1], abs=1e-5)
    assert found[0].figures.token_margin < 1e-4


def test_a_proof_too_few_in_one_row_does_not_take_the_next_rows(policy, groups):
    """Counted over a batch, one row's missing proof and another's extra one would cancel out."""
    first, second, third = groups[0]
    shifted = [
        msgspec.structs.replace(first, proofs=first.proofs[:-1]),
        msgspec.structs.replace(second, proofs=[first.proofs[-1], *second.proofs]),
        third,
    ]
    with pytest.raises(Refusal) as caught:
        measured({VERSION: policy}, shifted, spec=SPEC)
    assert caught.value.reason == Reason.WRONG_PROOF_COUNT


def test_nobodys_figures_depend_on_who_is_verified_beside_them(policy, groups):
    together = measured_many({VERSION: policy}, groups, spec=SPEC)
    for group, result in zip(groups, together, strict=True):
        assert isinstance(result, list)
        for ours, theirs in zip(measured({VERSION: policy}, group, spec=SPEC), result, strict=True):
            one, other = msgspec.structs.astuple(ours.figures), msgspec.structs.astuple(theirs.figures)
            assert one == pytest.approx(other, abs=0.05)
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_small_batches_measure_the_same_as_one_large_one(policy, groups, monkeypatch):
    whole = measured_many({VERSION: policy}, groups, spec=SPEC)
    monkeypatch.setattr("node.verification.batches.MAX_BATCH_TOKENS", 100)
    monkeypatch.setattr("node.verification.spans.MAX_LOGITS", 7 * policy.vocabulary)
    for small, large in zip(measured_many({VERSION: policy}, groups, spec=SPEC), whole, strict=True):
        assert isinstance(small, list)
        assert isinstance(large, list)
        for ours, theirs in zip(small, large, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert max(row.figures.token_margin for row in small) < 1e-4


def test_a_forward_pass_holds_a_bounded_number_of_tokens(policy, groups, monkeypatch):
    """A submission of the longest allowed completions must not take the verifier's memory."""
    monkeypatch.setattr("node.verification.batches.MAX_BATCH_TOKENS", 120)
    shapes = []
    handle = policy.model.base_model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    measured_many({VERSION: policy}, groups, spec=SPEC)
    handle.remove()
    assert len(shapes) > 1
    assert all(rows == 1 and length <= 120 for rows, length in shapes)


def test_a_figure_that_is_not_a_number_is_never_small(policy, groups):
    """NaN compares false with every limit, and `max` may skip it."""
    for bad in (float("nan"), float("-inf")):
        logprobs = [groups[0][0].logprobs[0], bad, *groups[0][0].logprobs[2:]]
        found = measured({VERSION: policy}, changed(groups[0], 0, logprobs=logprobs), spec=SPEC)
        assert found[0].figures.logprob_error == NOT_FINITE
        msgspec.json.decode(msgspec.json.encode(found[0].figures))


def test_weights_that_are_not_finite_are_the_verifiers_failure(own_policy, groups):
    with torch.no_grad():
        own_policy.model.base_model.norm.weight[0] = float("nan")
    with pytest.raises(VerifierFailed):
        measured({VERSION: own_policy}, groups[0], spec=SPEC)


def test_a_malformed_proof_is_the_senders_fault_and_nobody_elses(policy, groups):
    bad = changed(groups[1], 2, proofs=[bytes(258)] * len(groups[1][2].proofs))
    results = measured_many({VERSION: policy}, [groups[0], bad, groups[2]], spec=SPEC)
    assert [type(result) for result in results] == [list, Refusal, list]
    refusal = results[1]
    assert isinstance(refusal, Refusal)
    assert refusal.reason == Reason.MALFORMED_PROOF
    assert "Row 2, proof 0" in refusal.detail
    with pytest.raises(Refusal):
        measured({VERSION: policy}, bad, spec=SPEC)


# Deciding.


@dataclass(frozen=True)
class Length:
    """An environment whose reward shows which text it was given."""

    name: str = "length"

    def problem(self, index: int) -> Problem:
        return Problem(prompt=f"Q:{index % 90 + 10}?\nA:")

    def reward(self, problem: Problem, completion: str) -> float:
        assert "<eos>" not in completion
        return len(completion) / 1000


def test_what_a_slot_must_contain_is_derived_from_its_number(policy, environments):
    expected = expected_of(SPEC, policy, environments, run_id=RUN_ID, version=VERSION, manifest_digest=MANIFEST, slot=5)
    drawn = slot_problem(SPEC, run_id=RUN_ID, manifest_digest=MANIFEST, slot=5)
    prompt = environments[drawn.environment].problem(drawn.problem).prompt
    assert policy.tokenizer.backend_tokenizer.decode(list(expected.prompt_ids), skip_special_tokens=False) == prompt
    assert list(expected.seeds) == group_seeds(SPEC, run_id=RUN_ID, manifest_digest=MANIFEST, slot=5)
    assert (expected.vocabulary, expected.eos_ids) == (policy.vocabulary, policy.eos_ids)


def test_honest_work_is_admitted_with_the_verifiers_own_logprobs_and_rewards(policy, environments, groups):
    """A worker may round its log-probabilities within the limit; the trainer must not use its version."""
    rounded = [
        msgspec.structs.replace(one, logprobs=[min(0.0, value + 5e-4) for value in one.logprobs]) for one in groups[0]
    ]
    judgement = judgement_of(rounded, policy, environments, slot=0)
    verdict = judgement.verdict
    assert (verdict.outcome, verdict.reason, verdict.finding) == (Outcome.ADMITTED, None, None)
    assert verdict.tokens == sum(len(one.completion_ids) for one in rounded)
    assert verdict.figures is not None
    assert verdict.figures.logprob_error == pytest.approx(5e-4, rel=0.1)
    assert verdict.rewards == (0.0,) * 3
    assert judgement.rollouts == rounded
    assert judgement.logprobs is not None
    for ours, honest in zip(judgement.logprobs, groups[0], strict=True):
        assert ours == pytest.approx(honest.logprobs, abs=1e-5)


def test_rewards_are_of_the_text_without_its_end_mark(policy, tiny_policy_path):
    environments = [Length(), Length()]
    expected = expected_of(SPEC, policy, environments, run_id=RUN_ID, version=VERSION, manifest_digest=MANIFEST, slot=0)
    requests = [SampleRequest(tuple(expected.prompt_ids), seed) for seed in expected.seeds]
    rollouts = generated(TorchEngine(SPEC), tiny_policy_path, requests, version=1)
    verdict = verdict_of(rollouts, policy, environments, slot=0)
    assert verdict.rewards is not None
    for rollout, reward in zip(rollouts, verdict.rewards, strict=True):
        kept = [token for token in rollout.completion_ids if token not in policy.eos_ids]
        text = policy.tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=False)
        assert reward == len(text) / 1000


def test_a_rejection_names_the_row_the_figure_and_the_limit(policy, environments, groups):
    forged = changed(groups[0], 1, logprobs=[-0.1] * len(groups[0][1].logprobs))
    judgement = judgement_of(forged, policy, environments, slot=0)
    verdict = judgement.verdict
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, Reason.WRONG_LOGPROB)
    assert verdict.finding is not None
    assert (verdict.finding.row, verdict.finding.figure, verdict.finding.limit) == (1, "logprob_error", 1e-3)
    assert verdict.detail.startswith("Row 1: logprob_error is ")
    assert verdict.figures is not None
    assert (verdict.rewards, judgement.logprobs) == (None, None), "nothing to train on"


def test_what_needs_no_model_is_refused_before_the_model_is_asked(own_policy, environments, groups):
    """Garbage must not buy a forward pass."""
    own_policy.model.base_model.register_forward_pre_hook(broken)
    verdict = verdict_of(changed(groups[0], 0, seed=bytes(16)), own_policy, environments, slot=0)
    assert (verdict.outcome, verdict.reason, verdict.figures) == (Outcome.REJECTED, Reason.WRONG_SEED, None)


def broken(*_: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate 20 GiB in /home/operator/secret")


def test_a_failing_model_blames_nobody(own_policy, environments, groups):
    own_policy.model.base_model.register_forward_pre_hook(broken)
    verdict = verdict_of(groups[0], own_policy, environments, slot=0)
    assert (verdict.outcome, verdict.reason) == (Outcome.INDETERMINATE, Reason.VERIFIER_FAILED)
    assert verdict.detail == "OutOfMemoryError."
    assert (verdict.finding, verdict.figures, verdict.rewards) == (None, None, None)


@dataclass(frozen=True)
class Unreliable(Length):
    reward_value: float | None = None

    def reward(self, problem: Problem, completion: str) -> float:
        if self.reward_value is None:
            raise ZeroDivisionError("a bug of the environment")
        return self.reward_value


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -0.1, 1.1])
def test_a_failing_environment_blames_nobody(policy, environments, groups, value):
    """A reward that is no reward would poison training; one that raises would stop it."""
    unreliable = [WithRewards(inner, Unreliable(reward_value=value)) for inner in environments]
    assert verdict_of(groups[0], policy, unreliable, slot=0).outcome == Outcome.INDETERMINATE


@dataclass(frozen=True)
class WithRewards:
    """The problems of one environment with the rewards of another."""

    inner: Environment
    judge: Environment
    name: str = "mixed"

    def problem(self, index: int) -> Problem:
        return self.inner.problem(index)

    def reward(self, problem: Problem, completion: str) -> float:
        return self.judge.reward(problem, completion)


def claims_of(groups: Sequence[Sequence[Rollout]]) -> list[Claim]:
    return [claim_of(group, slot=slot) for slot, group in enumerate(groups)]


def decided_together(claims: Sequence[Claim], policy: Policy, environments: Sequence[Environment]) -> list[Verdict]:
    return decided(claims, {VERSION: policy}, rules=Rules(RUN_ID, SPEC, environments))


def test_each_claim_of_a_batch_gets_its_own_verdict(policy, environments, groups):
    claims = claims_of(
        [
            groups[0],
            changed(groups[1], 0, seed=bytes(16)),
            changed(groups[2], 1, proofs=[bytes(258)] * len(groups[2][1].proofs)),
            changed(groups[3], 2, logprobs=[-0.1] * len(groups[3][2].logprobs)),
        ]
    )
    verdicts = decided_together(claims, policy, environments)
    assert [verdict.reason for verdict in verdicts] == [
        None,
        Reason.WRONG_SEED,
        Reason.MALFORMED_PROOF,
        Reason.WRONG_LOGPROB,
    ]
    assert decided_together([], policy, environments) == []


@pytest.mark.parametrize("probed", [None, 0, 1, 2])
def test_a_verdict_is_the_same_whichever_row_is_measured_first(policy, environments, groups, probed):
    whole = verdict_of(groups[0], policy, environments, slot=0)
    probe = measure_all if probed is None else lambda _: probed
    verdict = judgement_of(groups[0], policy, environments, slot=0, probe=probe).verdict
    assert (verdict.outcome, verdict.rewards, verdict.tokens) == (whole.outcome, whole.rewards, whole.tokens)
    assert verdict.figures is not None
    assert whole.figures is not None
    assert msgspec.structs.astuple(verdict.figures) == pytest.approx(msgspec.structs.astuple(whole.figures), abs=0.05)


def test_a_groups_prompt_is_computed_with_the_row_that_is_measured_first_alone(policy, environments, groups):
    """But for its last token, whose state the others' first tokens are predicted from."""
    computed = []
    hook = policy.model.base_model.register_forward_pre_hook(
        lambda _, __, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    try:
        verdict = judgement_of(groups[0], policy, environments, slot=0, probe=lambda _: 0).verdict
    finally:
        hook.remove()
    assert verdict.outcome is Outcome.ADMITTED
    prompt, (first, *others) = len(groups[0][0].prompt_ids), [len(each.completion_ids) - 1 for each in groups[0]]
    assert computed[0] == prompt + first
    assert computed[1] <= 1 + sum(others)


def judged_partly(
    rollouts: list[Rollout], policy: Policy, environments: Sequence[Environment], row: int
) -> JudgedClaim:
    """The judgement of a proven node's group of which only `row` is measured."""
    claim = dataclasses.replace(claim_of(rollouts, slot=0), full=False)
    rules = Rules(RUN_ID, SPEC, environments)
    (judgement,) = judged([claim], {VERSION: policy}, rules=rules, probe=lambda _: row)
    return judgement


def partly(rollouts: list[Rollout], policy: Policy, environments: Sequence[Environment], row: int) -> Verdict:
    return judged_partly(rollouts, policy, environments, row).verdict


def test_a_proven_nodes_group_is_admitted_by_one_row_and_says_which(policy, environments, groups):
    """What nobody measured goes to training as it was submitted; nothing in the verdict claims more than was seen."""
    judgement = judged_partly(groups[0], policy, environments, row=1)
    verdict = judgement.verdict
    assert (verdict.outcome, verdict.spot) == (Outcome.ADMITTED, 1)
    assert set(judgement.rows) == {1}
    assert verdict.rewards == verdict_of(groups[0], policy, environments, slot=0).rewards
    assert judgement.logprobs is not None
    assert [judgement.logprobs[row] == groups[0][row].logprobs for row in (0, 2)] == [True, True]


def test_the_one_row_that_is_measured_convicts_the_group(policy, environments, groups):
    forged = changed(groups[0], 2, logprobs=[-0.1] * len(groups[0][2].logprobs))
    assert partly(forged, policy, environments, row=0).outcome is Outcome.ADMITTED
    caught = partly(forged, policy, environments, row=2)
    assert (caught.outcome, caught.reason, caught.spot) == (Outcome.REJECTED, Reason.WRONG_LOGPROB, None)


def test_every_row_is_held_to_the_checks_without_a_model_whichever_is_measured(policy, environments, groups):
    forged = changed(groups[0], 2, seed=bytes(16))
    assert partly(forged, policy, environments, row=0).reason is Reason.WRONG_SEED


def test_a_logprob_that_would_blow_up_the_trainers_ratio_is_refused_unmeasured(policy, environments, groups):
    """exp(new - old) of a row that nobody measures must stay finite, and is clipped."""
    forged = changed(groups[0], 2, logprobs=[-1e30] * len(groups[0][2].logprobs))
    assert partly(forged, policy, environments, row=0).reason is Reason.LOGPROB_NOT_FINITE


def test_an_auditor_sees_every_rows_figures(policy, environments, groups):
    """Two rows are bad: whichever of them a verifier met first, an auditor must be able to look it up."""
    forged = [msgspec.structs.replace(one, logprobs=[-0.1] * len(one.logprobs)) for one in groups[0]]
    group = [groups[0][0], *forged[1:]]
    rows = judgement_of(group, policy, environments, slot=0, probe=measure_all).rows
    over = {row: one.figures.logprob_error > SPEC.limits.logprob_error for row, one in rows.items()}
    assert over == {0: False, 1: True, 2: True}


def test_a_model_that_fails_after_the_first_row_blames_nobody(own_policy, environments, groups):
    """One good row is no admission, and a failure over the others no rejection."""

    passes = count()

    def second(*_: object) -> None:
        if next(passes) > 0:
            broken()

    own_policy.model.base_model.register_forward_pre_hook(second)
    verdict = verdict_of(groups[0], own_policy, environments, slot=0)
    assert (verdict.outcome, verdict.reason, verdict.figures) == (
        Outcome.INDETERMINATE,
        Reason.VERIFIER_FAILED,
        None,
    )


def test_a_batch_too_large_for_the_machine_is_measured_one_by_one(own_policy, environments, groups):
    def small(_: object, __: object, inputs: dict[str, torch.Tensor]) -> None:
        if len(inputs["input_ids"]) > 3:
            broken()

    own_policy.model.base_model.register_forward_pre_hook(small, with_kwargs=True)
    verdicts = decided_together(claims_of(groups), own_policy, environments)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.ADMITTED] * 4


# From the bytes.


def verified(body: bytes | Path, policy: Policy, environments: Sequence[Environment]) -> Verdict:
    return asyncio.run(
        verify(
            body,
            version=VERSION,
            manifest_digest=MANIFEST,
            slot=0,
            policies=InMemory({VERSION: policy}),
            published=[VERSION],
            rules=Rules(RUN_ID, SPEC, environments),
        )
    ).verdict


def test_a_submission_is_judged_from_its_bytes(policy, environments, groups):
    assert verified(write_rollouts(groups[0]), policy, environments).outcome == Outcome.ADMITTED
    assert verified(write_rollouts(groups[1]), policy, environments).reason == Reason.WRONG_PROMPT
    assert verified(write_rollouts(groups[0][:2]), policy, environments).reason == Reason.WRONG_GROUP_SIZE
    assert verified(b"garbage", policy, environments).reason == Reason.MALFORMED_SUBMISSION


def test_a_body_that_the_verifier_has_lost_blames_nobody(policy, environments, tmp_path):
    verdict = verified(tmp_path / "gone", policy, environments)
    assert (verdict.outcome, verdict.reason) == (Outcome.INDETERMINATE, Reason.VERIFIER_FAILED)
    assert str(tmp_path) not in verdict.detail
