"""Two readings of one group: what rounding explains is not held against anybody, and nothing else is forgiven."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest
import torch
from narrow_run import policy_file, sharp_model

from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.policy.file import Policy, load_policy
from node.protocol.evidence import FAR_STEPS, sketch_value
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, LimitsSpec, ModelSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout
from node.verification.deviations import Deviations, SpanMeasured
from node.verification.prefill import Prefill, TransformersPrefill, TransformersPrefills
from node.verification.readings import TwoReadings, make_prefills, policy_of, read_by_transformers
from node.verification.spans import Span, spans_of

SPEC = RunSpec(
    name="twice",
    environments=(EnvironmentSpec(name="arithmetic"),),
    model=ModelSpec(dtype="bfloat16"),
    sampling=SamplingSpec(group_size=4, max_new_tokens=24),
    proofs=ProofSpec(scheme="toploc/1+sketch/1", sketch_step=0.005),
    limits=LimitsSpec(readings=2),
)
ONCE = msgspec.structs.replace(SPEC, limits=LimitsSpec())
FLOAT32 = msgspec.structs.replace(SPEC, model=ModelSpec(dtype="float32"))


def numbers(**changes: object) -> SpanMeasured:
    """Of one token in one chunk."""
    one = SpanMeasured(
        exponent_mismatches=[1.0],
        mantissa_means=[0.25],
        mantissa_medians=[0.5],
        sketch_errors=[[0.0] * 8],
        logprobs=[-1.0],
        margins=[0.0],
    )
    return msgspec.structs.replace(one, **changes)


class Says(TransformersPrefill):
    """A prefill that has one answer."""

    def __init__(self, answer: SpanMeasured | Refusal) -> None:
        self._answer = answer

    def measure(self, spans: list[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        return [self._answer] * len(spans)


SPAN = Span(row=0, seed=bytes(16), context_ids=[1], position=0, token_ids=[2], proofs=[b""], first_proof=0)


def merged(rounded: SpanMeasured | Refusal, exact: SpanMeasured | Refusal) -> SpanMeasured | Refusal:
    (answer,) = TwoReadings(Says(rounded), Says(exact)).measure([SPAN], spec=SPEC)
    return answer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_file(sharp_model(seed=20).to(torch.bfloat16), tmp_path_factory.mktemp("policy"))


async def drawn(path: Path, *, attention: str) -> list[Rollout]:
    """An honest group in bfloat16, by that attention kernel."""
    engine = TorchEngine(SPEC)
    await engine.load(path, version=0)
    engine.policy.model.set_attn_implementation(attention)
    try:
        return await engine.generate([SampleRequest((3, 4, 5), bytes([number] * 16)) for number in range(8)])
    finally:
        await engine.close()


def spans(rollouts: list[Rollout]) -> list[Span]:
    return [span for row, one in enumerate(rollouts) for _, span in spans_of(one, row=row, chunk_tokens=32)]


def test_of_each_deviation_the_smaller_one_counts() -> None:
    """A near-tie that only this verifier's rounding decides otherwise would be a wrong token."""
    exact = numbers(exponent_mismatches=[3.0], mantissa_means=[0.125], margins=[0.5], logprobs=[-2.0])
    found = merged(numbers(mantissa_medians=[4.0], margins=[0.0]), exact)
    assert isinstance(found, SpanMeasured)
    assert (found.exponent_mismatches, found.mantissa_means, found.mantissa_medians) == ([1.0], [0.125], [0.5])
    assert (found.margins, found.logprobs) == ([0.0], [-2.0])


def test_what_is_wrong_in_both_readings_stays_wrong() -> None:
    found = merged(numbers(margins=[0.5]), numbers(margins=[0.75]))
    assert isinstance(found, SpanMeasured)
    assert found.margins == [0.5]


def test_a_sketch_counts_from_the_middle_of_both_readings_also_across_the_seam() -> None:
    """The grid goes round: from 7.5 to -7.5 it is one step, and the middle is at 8, not at 0."""
    found = merged(numbers(sketch_errors=[[7.5] * 8]), numbers(sketch_errors=[[-7.5] * 8]))
    assert isinstance(found, SpanMeasured)
    assert found.sketch_disagreements == [1.0]
    assert [abs(error) for error in found.sketch_errors[0]] == [8.0] * 8
    (distance,) = Deviations.of([found], [-1.0]).sketch_distances
    assert distance == 8.0


def test_a_sketchs_deviation_is_in_proportion_to_what_rounding_does_there() -> None:
    near = merged(numbers(sketch_errors=[[1.0] * 8]), numbers(sketch_errors=[[1.0] * 8]))
    loose = merged(numbers(sketch_errors=[[3.0] * 8]), numbers(sketch_errors=[[-1.0] * 8]))
    values = []
    for one in (near, loose):
        assert isinstance(one, SpanMeasured)
        deviations = Deviations.of([one], [-1.0])
        assert deviations.sketch_distances == [1.0]
        values += deviations.statistics["sketch"]
    assert values == pytest.approx([sketch_value(1.0) - math.log(0.3) / 2, sketch_value(1.0) - math.log(4.3) / 2])


@pytest.mark.parametrize("answers", [(0, 1), (1, 0), (0, 0)])
def test_what_nobody_honest_sends_is_refused_by_either_reading(answers: tuple[int, int]) -> None:
    refusal = Refusal(Reason.MALFORMED_PROOF, "Row 0, proof 0: bad_modulus.")
    assert merged(*((refusal, numbers())[answer] for answer in answers)) is refusal


def test_honest_work_of_another_kernel_is_nearer_to_two_readings_than_to_one(path: Path) -> None:
    """Otherwise the second one costs a verifier a prefill and gains it nothing."""
    rows = asyncio.run(drawn(path, attention="eager"))
    readings = [read_by_transformers(path, spec=spec).measure(spans(rows), spec=spec) for spec in (ONCE, SPEC)]
    once, twice = (
        [
            value
            for one, rollout in zip(found, rows, strict=True)
            for value in Deviations.of([one], rollout.logprobs).sketch_distances
        ]
        for found in readings
    )
    assert max(twice) < FAR_STEPS
    assert sum(map(sketch_value, twice)) < sum(map(sketch_value, once))
    assert all(apart > 0 for one in readings[1] for apart in one.sketch_disagreements)


def test_a_number_that_is_none_does_not_hide_behind_the_other_reading() -> None:
    for one, other in ((math.nan, 0.0), (0.0, math.nan)):
        found = merged(numbers(margins=[one]), numbers(margins=[other]))
        assert isinstance(found, SpanMeasured)
        assert math.isnan(found.margins[0])


def test_a_run_in_float32_is_read_once(path: Path) -> None:
    """Both readings would be the same, at twice the work."""
    assert isinstance(read_by_transformers(path, spec=FLOAT32), TransformersPrefill)
    assert isinstance(make_prefills(FLOAT32), TransformersPrefills)
    assert isinstance(read_by_transformers(path, spec=ONCE), TransformersPrefill)


async def test_both_readings_are_of_the_same_policy_and_a_second_look_takes_the_runs_own(path: Path) -> None:
    prefills = make_prefills(SPEC)
    prefill: Prefill = await prefills.prefill(path, version=3)
    assert isinstance(prefill, TwoReadings)
    rounded, exact = policy_of(prefill.rounded), policy_of(prefill.exact)
    assert rounded is not None
    assert exact is not None
    assert policy_of(prefill) is rounded
    assert (rounded.model.dtype, exact.model.dtype) == (torch.bfloat16, torch.float32)
    for name, weight in rounded.model.state_dict().items():
        assert torch.equal(weight.float(), exact.model.state_dict()[name])
    assert not isinstance(prefill.blueprint, Policy), "a plan would keep the weights after the verifier dropped them"
    await prefills.close()


def test_logits_are_not_rounded_to_the_dtype_of_the_model(path: Path) -> None:
    """In bfloat16 logits of 16 are 1/8 apart, so that kernels would disagree about one token in a thousand."""
    policy: Policy = load_policy(path, dtype=torch.bfloat16)
    states = torch.randn(5, policy.hidden, generator=torch.Generator().manual_seed(1)).bfloat16() * 8
    logits = policy.logits(states)
    weight = policy.model.get_output_embeddings().weight
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, (states.double() @ weight.double().T).float(), rtol=1e-5, atol=1e-4)
    assert (logits - logits.bfloat16().float()).abs().max() > 0.01
