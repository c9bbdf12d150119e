"""How far one segment of a completion is from what a policy forces: the numbers, whoever computed the hidden states.

A `Span` is what one policy is held to: the tokens it is said to have drawn, and everything they were drawn from.
Whatever engine does the forward pass over it, `measure_states` makes the figures of docs/protocol.md, section
7.1, of its hidden states, so that engines differ in rounding and in nothing else. It needs no model: hidden
states, and a function from them to logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor

from node.proofs import Distances, verify_proofs
from node.protocol.admission import EVIDENCE, Figures
from node.protocol.evidence import Totals, evidences, far_value, sketch_value, total
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import LimitsSpec, ProofSpec
from node.protocol.submission import chunk_sizes
from node.protocol.turns import interleaved, pieces
from node.sampling import appraise
from toploc import distances
from toploc.errors import BadProof, WrongProofCount

MAX_LOGITS = 2**24
"""Logits held at once: 64 MiB in float32, and a few tensors of that size."""

NOT_FINITE = 1e308
"""Stands for a figure that is NaN or infinite: JSON has neither, and no limit admits it."""


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One segment of the rollout in row `row` of its group, to be measured under the segment's policy.

    `context_ids` is all that its first token was drawn from: the prompt and the completion's `position` tokens
    before it, with what the environment said between them. `replies` is what it said in the segment, each behind so
    many of `token_ids`, which is more than none and fewer than all. `first_proof` is the place of `proofs` among the
    rollout's, for messages.
    """

    row: int
    seed: bytes
    context_ids: list[int]
    position: int
    token_ids: list[int]
    proofs: list[bytes]
    first_proof: int
    replies: list[tuple[int, list[int]]] = []

    @property
    def input_ids(self) -> list[int]:
        """What the model sees: the last token is only predicted."""
        return [*self.context_ids, *interleaved(self.token_ids[:-1], self.replies)]

    @property
    def length(self) -> int:
        """Tokens that the model sees."""
        return len(self.context_ids) + len(self.token_ids) - 1 + sum(len(ids) for _, ids in self.replies)

    def predicted_from(self, states: Tensor) -> Tensor:
        """Of the hidden states from the context's last token on, [R, hidden], those that tokens were chosen from."""
        if not self.replies:
            return states
        said = 0
        parts = []
        for (start, _), (end, ids) in pairwise([(0, []), *self.replies, (len(self.token_ids), [])]):
            # A turn's first token is chosen from the last thing that was said.
            parts.append(states[start + said : end + said])
            said += len(ids)
        return torch.cat(parts)

    def chunk_sizes(self, chunk_tokens: int) -> list[int]:
        """The tokens of each chunk that is proved."""
        return chunk_sizes(pieces([len(self.token_ids)], self.replies), chunk_tokens=chunk_tokens)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


class SpanMeasured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a span's policy says of it: of each of its proofs, and of each token.

    `exponent_mismatches`, `mantissa_means` and `mantissa_medians` are of each chunk, `sketch_errors` eight of each
    token, in steps; each is empty where the run's proofs do not have it. `sketch_gaps` say of each token how far two
    readings of it are apart (`node.readings`); empty where there was one. `logprobs` are the recomputed ones;
    `margins` say by how much each token lost against the forced one.
    """

    exponent_mismatches: list[float]
    mantissa_means: list[float]
    mantissa_medians: list[float]
    sketch_errors: list[list[float]]
    logprobs: list[float]
    margins: list[float]
    sketch_gaps: list[float] = []


@dataclass(frozen=True, slots=True)
class Deviations:
    """Every number by which a rollout differs from what its policies say: of each chunk, and of each token.

    `errors` are |submitted - recomputed log-probability|, `sketch_distances` root mean squares of sketch errors; the
    others as in `SpanMeasured`.
    """

    exponent_mismatches: Sequence[float]
    mantissa_means: Sequence[float]
    mantissa_medians: Sequence[float]
    sketch_distances: Sequence[float]
    margins: Sequence[float]
    errors: Sequence[float]
    sketch_gaps: Sequence[float] = ()

    @staticmethod
    def of(spans: Sequence[SpanMeasured], logprobs: Sequence[float]) -> Deviations:
        """From a rollout's spans in their order, and the log-probabilities that it was sent with."""

        def joined(name: str) -> list[Any]:
            return [value for span in spans for value in getattr(span, name)]

        return Deviations(
            exponent_mismatches=joined("exponent_mismatches"),
            mantissa_means=joined("mantissa_means"),
            mantissa_medians=joined("mantissa_medians"),
            sketch_distances=sketch_distances(joined("sketch_errors")),
            sketch_gaps=joined("sketch_gaps"),
            margins=joined("margins"),
            errors=[abs(ours - theirs) for ours, theirs in zip(joined("logprobs"), logprobs, strict=True)],
        )

    @property
    def statistics(self) -> dict[str, Sequence[float]]:
        """What is summed up, by `node.protocol.evidence.STATISTICS`."""
        return {
            "exponents": self.exponent_mismatches,
            "mantissa": self.mantissa_means,
            "sketch": self._sketch_values,
            "far": [far_value(distance) for distance in self.sketch_distances],
            "margin": self.margins,
            "logprob": self.errors,
        }

    @property
    def _sketch_values(self) -> list[float]:
        values = [sketch_value(distance) for distance in self.sketch_distances]
        if not self.sketch_gaps:
            return values
        return [value - sketch_value(gap) / 2 for value, gap in zip(values, self.sketch_gaps, strict=True)]

    def totals(self, limits: LimitsSpec) -> Totals:
        """What the values sum up to under the run's levels."""
        return Totals(**{name: total(values, getattr(limits.honest, name)) for name, values in self.statistics.items()})

    def figures(self, limits: LimitsSpec) -> Figures:
        """What the rollout is judged by."""
        far = [sketch_value(distance) for distance in self.sketch_distances]
        return Figures(
            exponent_mismatches=worst_of(self.exponent_mismatches or [0.0]),
            mantissa_mean=worst_of(self.mantissa_means or [0.0]),
            mantissa_median=worst_of(self.mantissa_medians or [0.0]),
            token_margin=worst_of(self.margins),
            margin_mean=worst_of([sum(self.margins) / len(self.margins)]),
            logprob_error=worst_of(self.errors),
            sketch_distance=math.exp(sum(far) / len(far)) if far else 0.0,
            **{f"{name}{EVIDENCE}": nats for name, nats in evidences(self.totals(limits), limits=limits)},
        )


Head = Callable[[Tensor], Tensor]
"""The output head: hidden states [tokens, hidden] to logits [tokens, vocabulary], of any float dtype."""


def measure_states(
    spans: Sequence[Span],
    states: Sequence[Tensor],
    head: Head,
    *,
    vocabulary: int,
    temperature: float,
    proofs: ProofSpec,
) -> list[SpanMeasured | Refusal]:
    """For each span what its hidden states say: `states` [tokens, hidden] each, that its tokens were chosen from.

    A Refusal is for proofs that no honest prover makes of these tokens. Raises toploc's CallerFault for states
    that are not finite, ValueError for states of another shape than the spans'.
    """
    if [len(own) for own in states] != [span.tokens for span in spans]:
        raise ValueError("the hidden states are not one for each token of each span")
    logprobs, margins = _appraised(spans, states, head, vocabulary=vocabulary, temperature=temperature)
    ends = accumulate(span.tokens for span in spans)
    return [
        found
        if isinstance(found, Refusal)
        else _measured(found, logprobs[end - span.tokens : end], margins[end - span.tokens : end])
        for span, end, found in zip(spans, ends, _check_proofs(spans, states, proofs=proofs), strict=True)
    ]


def _measured(chunks: Sequence[Distances], logprobs: list[float], margins: list[float]) -> SpanMeasured:
    toploc = [chunk.toploc for chunk in chunks if chunk.toploc is not None]
    return SpanMeasured(
        exponent_mismatches=[_finite(one.exp_mismatches) for one in toploc],
        mantissa_means=[_finite(one.mant_err_mean) for one in toploc],
        mantissa_medians=[_finite(one.mant_err_median) for one in toploc],
        sketch_errors=[list(errors) for chunk in chunks for errors in chunk.sketch],
        logprobs=logprobs,
        margins=margins,
    )


def sketch_distances(errors: Sequence[Sequence[float]]) -> list[float]:
    """Of each token's eight errors their root mean square, in steps."""
    found: list[float] = distances(torch.tensor(errors)).tolist() if errors else []
    return found


def worst_of(values: Iterable[float]) -> float:
    """The largest value; NOT_FINITE if one is not (`max` alone would let a NaN hide behind its neighbours)."""
    return max(map(_finite, values))


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else NOT_FINITE


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
    spans: Sequence[Span], states: Sequence[Tensor], *, proofs: ProofSpec
) -> list[list[Distances] | Refusal]:
    """The distances of each span's chunks from its proofs; faults are found again span by span."""
    sizes = [span.chunk_sizes(proofs.chunk_tokens) for span in spans]
    chunks = [list(torch.split(own.bfloat16(), cut)) for own, cut in zip(states, sizes, strict=True)]
    if any(len(span.proofs) != len(own) for span, own in zip(spans, chunks, strict=True)):
        return [_check_span(span, own, proofs=proofs) for span, own in zip(spans, chunks, strict=True)]
    seeds = [span.seed for span in spans for _ in span.proofs]
    try:
        sent = list(chain.from_iterable(span.proofs for span in spans))
        results = iter(verify_proofs(list(chain.from_iterable(chunks)), seeds, sent, spec=proofs))
    except BadProof:
        return [_check_span(span, own, proofs=proofs) for span, own in zip(spans, chunks, strict=True)]
    return [list(islice(results, len(own))) for own in chunks]


def _check_span(span: Span, chunks: list[Tensor], *, proofs: ProofSpec) -> list[Distances] | Refusal:
    try:
        return verify_proofs(chunks, [span.seed] * len(chunks), span.proofs, spec=proofs)
    except WrongProofCount:
        detail = (
            f"Row {span.row} has {len(span.proofs)} proofs from position {span.position} on, {len(chunks)} are due."
        )
        return Refusal(Reason.WRONG_PROOF_COUNT, detail)
    except BadProof as error:
        index = span.first_proof + (error.index or 0)
        return Refusal(Reason.MALFORMED_PROOF, f"Row {span.row}, proof {index}: {error.code}.")
