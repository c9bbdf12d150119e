"""The figures of a segment from hidden states alone: what any engine that does the forward pass relies on."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from node.policy.products import OutputHead
from node.protocol.admission import NOT_FINITE
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import ProofSpec
from node.protocol.sampling import gumbel_noise
from node.verification.deviations import SpanMeasured, worst_of
from node.verification.proofs import build_proofs
from node.verification.spans import Span, measure_states
from toploc import distances
from toploc.errors import CallerFault

HIDDEN, VOCABULARY, TEMPERATURE = 24, 50, 0.7
PROOFS = ProofSpec(scheme="toploc/1", chunk_tokens=4, top_k=8)
BOTH = ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=4, top_k=8)
SKETCH = ProofSpec(scheme="sketch/1", chunk_tokens=4)
SEED = bytes(range(16))
GENERATOR = torch.Generator().manual_seed(1)
WEIGHT = torch.randn(VOCABULARY, HIDDEN, generator=GENERATOR)


HEAD = OutputHead(WEIGHT)


def a_span(
    states: Tensor, *, position: int = 0, row: int = 0, first_proof: int = 0, proofs: ProofSpec = PROOFS
) -> Span:
    """The tokens that are forced at `position` on, by the reference."""
    chunks = list(torch.split(states.bfloat16(), proofs.chunk_tokens))
    logits = HEAD.logits(states).numpy() / np.float32(TEMPERATURE)
    positions = [position + index for index in range(len(states))]
    noise = gumbel_noise([SEED] * len(states), positions, vocabulary=VOCABULARY)
    return Span(
        row=row,
        seed=SEED,
        context_ids=[1] * (3 + position),
        position=position,
        token_ids=np.argmax(logits + noise, axis=1).tolist(),
        proofs=build_proofs(chunks, [SEED] * len(chunks), spec=proofs),
        first_proof=first_proof,
    )


def states_of(tokens: int) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=GENERATOR)


def measured(spans: list[Span], states: list[Tensor], *, proofs: ProofSpec = PROOFS) -> list[SpanMeasured | Refusal]:
    return measure_states(spans, states, HEAD, temperature=TEMPERATURE, proofs=proofs)


def test_forced_tokens_lose_nothing_wherever_in_the_completion_they_stand() -> None:
    """The noise counts from the completion's start: counted from the segment's, every honest switch is rejected."""
    states = [states_of(5), states_of(1), states_of(9)]
    spans = [a_span(own, position=position) for own, position in zip(states, (0, 7, 40), strict=True)]
    for span, own, result in zip(spans, states, measured(spans, states), strict=True):
        assert isinstance(result, SpanMeasured)
        assert max(result.margins) < 1e-5
        expected = (HEAD.logits(own) / TEMPERATURE).log_softmax(-1)[range(span.tokens), span.token_ids]
        assert result.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        none = [0.0] * len(span.proofs)
        assert (result.exponent_mismatches, result.mantissa_means, result.mantissa_medians) == (none, none, none)
        assert result.sketch_errors == []
    moved = [msgspec.structs.replace(span, position=span.position + 1) for span in spans]
    for result in measured(moved, states):
        assert isinstance(result, SpanMeasured)
        assert max(result.margins) > 0.01


@pytest.mark.parametrize("proofs", [PROOFS, SKETCH, BOTH], ids=lambda proofs: proofs.scheme)
def test_each_scheme_has_its_own_numbers_of_each_chunk_or_token(proofs: ProofSpec) -> None:
    """Numbers of a scheme that the run does not have would be summed up as if they were measured."""
    states = [states_of(9), states_of(4)]
    spans = [a_span(own, proofs=proofs) for own in states]
    for span, result in zip(spans, measured(spans, states, proofs=proofs), strict=True):
        assert isinstance(result, SpanMeasured)
        chunks = len(span.proofs) if proofs.has_toploc else 0
        assert len(result.exponent_mismatches) == len(result.mantissa_means) == len(result.mantissa_medians) == chunks
        assert len(result.sketch_errors) == (span.tokens if proofs.has_sketch else 0)
        assert all(abs(error) <= 0.5 for errors in result.sketch_errors for error in errors)


def test_a_sketch_counts_only_with_the_rollouts_own_seed() -> None:
    """Projections that were the same for all could be answered with a sketch kept from another rollout."""
    states = states_of(32)
    span = a_span(states, proofs=SKETCH)
    chunks = list(torch.split(states.bfloat16(), 4))
    foreign = build_proofs(chunks, [bytes(16)] * len(chunks), spec=SKETCH)
    (result,) = measured([msgspec.structs.replace(span, proofs=foreign)], [states], proofs=SKETCH)
    assert isinstance(result, SpanMeasured)
    assert float(distances(torch.tensor(result.sketch_errors)).mean()) > 4


def test_a_span_is_the_same_over_a_wire() -> None:
    """An engine whose model lives in another process sends spans there, and measurements back."""
    states = states_of(6)
    span = msgspec.msgpack.decode(msgspec.msgpack.encode(a_span(states, proofs=BOTH)), type=Span)
    (result,) = measured([span], [states], proofs=BOTH)
    assert isinstance(result, SpanMeasured)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=SpanMeasured) == result


def test_what_is_held_at_once_does_not_change_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [states_of(5), states_of(9)]
    spans = [a_span(own) for own in states]
    whole = measured(spans, states)
    monkeypatch.setattr("node.verification.spans.MAX_LOGITS", 2 * VOCABULARY)
    for small, large in zip(measured(spans, states), whole, strict=True):
        assert isinstance(small, SpanMeasured)
        assert isinstance(large, SpanMeasured)
        assert small.margins == pytest.approx(large.margins, abs=1e-5)
        assert small.logprobs == pytest.approx(large.logprobs, abs=1e-5)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_proofs_too_few_or_too_many_are_the_spans_own_fault(count: int) -> None:
    states = [states_of(8), states_of(8)]
    spans = [a_span(own, row=row) for row, own in enumerate(states)]
    wrong = msgspec.structs.replace(spans[1], proofs=[spans[1].proofs[0]] * count)
    fine, refused = measured([spans[0], wrong], states)
    assert isinstance(fine, SpanMeasured)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.WRONG_PROOF_COUNT


def test_a_malformed_proof_is_named_by_its_place_in_the_rollout() -> None:
    states = states_of(8)
    span = a_span(states, row=2, first_proof=3)
    (refused,) = measured([msgspec.structs.replace(span, proofs=[span.proofs[0], bytes(18)])], [states])
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.detail[:15]) == (Reason.MALFORMED_PROOF, "Row 2, proof 4:")


def test_states_that_are_not_the_spans_are_an_engines_fault() -> None:
    states = states_of(5)
    with pytest.raises(ValueError, match="one for each token"):
        measured([a_span(states)], [states[:-1]])
    broken = states.clone()
    broken[2, 3] = math.nan
    with pytest.raises(CallerFault):
        measured([a_span(states)], [broken])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_number_hides_behind_its_neighbours(bad: float) -> None:
    assert worst_of([1.0, bad, 2.0]) == worst_of([bad]) == NOT_FINITE
    assert worst_of([1.0, 3.0, 2.0]) == 3.0
