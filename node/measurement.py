"""How far one segment of a completion is from what a policy forces: the numbers, whoever computed the hidden states.

A `Span` is what one policy is held to: the tokens it is said to have drawn, and everything they were drawn from.
Whatever engine does the forward pass over it, `measure_states` makes the figures of docs/protocol.md, section
7.1, of its hidden states, so that engines differ in rounding and in nothing else. It needs no model: hidden
states, and a function from them to logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, islice

import msgspec
import torch
from torch import Tensor

from node.protocol.reasons import Reason, Refusal
from node.sampling import appraise
from toploc import VerificationResult, verify_chunk_proofs
from toploc.errors import BadProof, WrongProofCount

MAX_LOGITS = 2**24
"""Logits held at once: 64 MiB in float32, and a few tensors of that size."""

NOT_FINITE = 1e308
"""Stands for a figure that is NaN or infinite: JSON has neither, and no limit admits it."""


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One segment of the rollout in row `row` of its group, to be measured under the segment's policy.

    `context_ids` is all that its first token was drawn from: the prompt and the completion's `position` tokens
    before it. `first_proof` is the place of `proofs` among the rollout's, for messages.
    """

    row: int
    seed: bytes
    context_ids: list[int]
    position: int
    token_ids: list[int]
    proofs: list[bytes]
    first_proof: int

    @property
    def input_ids(self) -> list[int]:
        """What the model sees: the last token is only predicted."""
        return [*self.context_ids, *self.token_ids[:-1]]

    @property
    def length(self) -> int:
        """Tokens that the model sees."""
        return len(self.context_ids) + len(self.token_ids) - 1

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


class SpanMeasured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a span's policy says of it: the worst of its proofs, and two numbers for each token.

    `logprobs` are the recomputed ones; `margins` say by how much each token lost against the forced one.
    """

    exponent_mismatches: float
    mantissa_mean: float
    mantissa_median: float
    logprobs: list[float]
    margins: list[float]


Head = Callable[[Tensor], Tensor]
"""The output head: hidden states [tokens, hidden] to logits [tokens, vocabulary], of any float dtype."""


def measure_states(
    spans: Sequence[Span],
    states: Sequence[Tensor],
    head: Head,
    *,
    vocabulary: int,
    temperature: float,
    chunk_tokens: int,
    top_k: int,
) -> list[SpanMeasured | Refusal]:
    """For each span what its hidden states say: `states` [tokens, hidden] each, that its tokens were chosen from.

    A Refusal is for proofs that no honest prover makes of these tokens. Raises toploc's CallerFault for states
    that are not finite, ValueError for states of another shape than the spans'.
    """
    if [len(own) for own in states] != [span.tokens for span in spans]:
        raise ValueError("the hidden states are not one for each token of each span")
    logprobs, margins = _appraised(spans, states, head, vocabulary=vocabulary, temperature=temperature)
    proofs = _check_proofs(spans, states, chunk_tokens=chunk_tokens, top_k=top_k)
    ends = list(accumulate(span.tokens for span in spans))
    return [
        proof
        if isinstance(proof, Refusal)
        else SpanMeasured(
            exponent_mismatches=worst_of(result.exp_mismatches for result in proof),
            mantissa_mean=worst_of(result.mant_err_mean for result in proof),
            mantissa_median=worst_of(result.mant_err_median for result in proof),
            logprobs=logprobs[end - span.tokens : end],
            margins=margins[end - span.tokens : end],
        )
        for span, end, proof in zip(spans, ends, proofs, strict=True)
    ]


def worst_of(values: Iterable[float]) -> float:
    """The largest value; NOT_FINITE if one is not (`max` alone would let a NaN hide behind its neighbours)."""
    return max(float(value) if math.isfinite(value) else NOT_FINITE for value in values)


def _appraised(
    spans: Sequence[Span], states: Sequence[Tensor], head: Head, *, vocabulary: int, temperature: float
) -> tuple[list[float], list[float]]:
    """Sample again with each span's own seed: the tokens' log-probabilities, and by how much each lost (section 4)."""
    rows = torch.cat(list(states))
    chosen = torch.tensor([token for span in spans for token in span.token_ids], device=rows.device)
    seeds = [span.seed for span in spans for _ in range(span.tokens)]
    positions = [span.position + index for span in spans for index in range(span.tokens)]
    logprobs: list[float] = []
    margins: list[float] = []
    step = max(1, MAX_LOGITS // vocabulary)
    for start in range(0, len(seeds), step):
        part = slice(start, start + step)
        logits = head(rows[part]).float()
        ours, lost = appraise(logits, chosen[part], seeds[part], positions[part], temperature=temperature)
        logprobs += ours.tolist()
        margins += lost.tolist()
    return logprobs, margins


def _check_proofs(
    spans: Sequence[Span], states: Sequence[Tensor], *, chunk_tokens: int, top_k: int
) -> list[list[VerificationResult] | Refusal]:
    """The distances of each span's chunks from its proofs; faults are found again span by span."""
    chunks = [list(torch.split(own.bfloat16(), chunk_tokens)) for own in states]
    if any(len(span.proofs) != len(own) for span, own in zip(spans, chunks, strict=True)):
        return [_check_span(span, own, top_k=top_k) for span, own in zip(spans, chunks, strict=True)]
    try:
        proofs = list(chain.from_iterable(span.proofs for span in spans))
        results = iter(verify_chunk_proofs(list(chain.from_iterable(chunks)), proofs, top_k))
    except BadProof:
        return [_check_span(span, own, top_k=top_k) for span, own in zip(spans, chunks, strict=True)]
    return [list(islice(results, len(own))) for own in chunks]


def _check_span(span: Span, chunks: list[Tensor], *, top_k: int) -> list[VerificationResult] | Refusal:
    try:
        return verify_chunk_proofs(chunks, span.proofs, top_k)
    except WrongProofCount:
        detail = (
            f"Row {span.row} has {len(span.proofs)} proofs from position {span.position} on, {len(chunks)} are due."
        )
        return Refusal(Reason.WRONG_PROOF_COUNT, detail)
    except BadProof as error:
        index = span.first_proof + (error.index or 0)
        return Refusal(Reason.MALFORMED_PROOF, f"Row {span.row}, proof {index}: {error.code}.")
