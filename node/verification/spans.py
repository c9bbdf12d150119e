"""Spans: segments of completions, measured under the policies that are claimed to have drawn them.

A `Span` holds the tokens of one segment and everything that they were drawn from. Whatever engine does the forward
pass over it, `measure_states` compares its hidden states with the proofs and samples its tokens again
(docs/protocol.md, section 7.1), so that engines differ in rounding and in nothing else. It needs no model: hidden
states, and a function from them to logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from node.protocol.admission import finite
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import ProofSpec
from node.protocol.submission import Rollout, chunk_count, chunk_sizes
from node.protocol.turns import Replies, interleaved, pieces
from node.sampling.forced import appraise
from node.verification.deviations import SpanMeasured
from node.verification.proofs import Distances, verify_proofs
from toploc.errors import BadProof, WrongProofCount

MAX_LOGITS = 2**24
"""Logits, and numbers of hidden states in float32, held at once: 64 MiB, and a few tensors of that size."""


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
        """The model's input: all but the last token, which is only predicted."""
        return [*self.context_ids, *interleaved(self.token_ids[:-1], self.replies)]

    @property
    def length(self) -> int:
        """The number of input tokens."""
        return len(self.context_ids) + len(self.token_ids) - 1 + sum(len(ids) for _, ids in self.replies)

    def predicted_from(self, states: Tensor) -> Tensor:
        """Select from `states` [R, hidden] (the context's last token on) those that tokens were predicted from."""
        if not self.replies:
            return states
        offset = 0
        parts = []
        for (start, _), (end, ids) in pairwise([(0, []), *self.replies, (len(self.token_ids), [])]):
            # A turn's first token is predicted from the reply's last token.
            parts.append(states[start + offset : end + offset])
            offset += len(ids)
        return torch.cat(parts)

    def chunk_sizes(self, chunk_tokens: int) -> list[int]:
        """Return the tokens of each chunk that is proved."""
        return chunk_sizes(pieces([len(self.token_ids)], self.replies), chunk_tokens=chunk_tokens)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def spans_of(rollout: Rollout, replies: Replies = (), *, row: int, chunk_tokens: int) -> Iterator[tuple[int, Span]]:
    """Return the segments of `rollout`, in which the environment said `replies`, with the versions that drew them.

    Proofs left over go to the last.
    """
    first = 0
    for segment in rollout.segments:
        tokens = rollout.completion_ids[segment.start : segment.end]
        last = segment.end == len(rollout.completion_ids)
        within = [(at - segment.start, list(ids)) for at, ids in replies if segment.start < at < segment.end]
        end = None if last else first + chunk_count(pieces([len(tokens)], within), chunk_tokens=chunk_tokens)
        before = [(at, ids) for at, ids in replies if at <= segment.start]
        proofs = rollout.proofs[first:end]
        yield (
            segment.version,
            Span(
                row=row,
                seed=rollout.seed,
                context_ids=[*rollout.prompt_ids, *interleaved(rollout.completion_ids[: segment.start], before)],
                position=segment.start,
                token_ids=tokens,
                proofs=proofs,
                first_proof=first,
                replies=within,
            ),
        )
        first += len(proofs)


class LogitParts(Protocol):
    """The output head."""

    @property
    def width(self) -> int:
        """The most logits that a part has of a token."""

    def parts(self, states: Tensor) -> Iterable[Tensor]:
        """Compute the logits of hidden states [tokens, hidden], of any float dtype, as `appraise` takes them."""


def measure_states(
    spans: Sequence[Span],
    states: Sequence[Tensor],
    head: LogitParts,
    *,
    temperature: float,
    proofs: ProofSpec,
) -> list[SpanMeasured | Refusal]:
    """Measure spans by the hidden states [tokens, hidden] that their tokens were predicted from.

    A Refusal is for proofs that no honest prover makes of these tokens. Raises toploc's CallerFault for states
    that are not finite, ValueError for states of another shape than the spans'.
    """
    if [len(own) for own in states] != [span.tokens for span in spans]:
        raise ValueError("the hidden states are not one for each token of each span")
    logprobs, margins = appraise_spans(spans, states, head, temperature=temperature)
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
        exponent_mismatches=[finite(float(one.exp_mismatches)) for one in toploc],
        mantissa_means=[finite(float(one.mant_err_mean)) for one in toploc],
        mantissa_medians=[finite(float(one.mant_err_median)) for one in toploc],
        sketch_errors=[list(errors) for chunk in chunks for errors in chunk.sketch],
        logprobs=logprobs,
        margins=margins,
    )


def appraise_spans(
    spans: Sequence[Span], states: Sequence[Tensor], head: LogitParts, *, temperature: float
) -> tuple[list[float], list[float]]:
    """Sample again with each span's own seed: the tokens' log-probabilities, and by how much each lost (section 4).

    `states` are as for `measure_states`. No more than MAX_LOGITS logits exist at a time, whatever the vocabulary.
    """
    rows = torch.cat(list(states))
    chosen = torch.tensor([token for span in spans for token in span.token_ids], device=rows.device)
    seeds = [span.seed for span in spans for _ in range(span.tokens)]
    positions = [span.position + index for span in spans for index in range(span.tokens)]
    logprobs: list[float] = []
    margins: list[float] = []
    step = max(1, MAX_LOGITS // max(head.width, rows.shape[1]))
    for start in range(0, len(seeds), step):
        part = slice(start, start + step)
        logits = (some.float() for some in head.parts(rows[part]))
        ours, lost = appraise(logits, chosen[part], seeds[part], positions[part], temperature=temperature)
        logprobs += ours.tolist()
        margins += lost.tolist()
    return logprobs, margins


def _check_proofs(
    spans: Sequence[Span], states: Sequence[Tensor], *, proofs: ProofSpec
) -> list[list[Distances] | Refusal]:
    """Return the distances of each span's chunks from its proofs; faults are found again span by span."""
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
