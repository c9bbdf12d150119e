"""Batches of spans for one forward pass of a transformers model, and what of its result belongs to each span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor
from transformers import PreTrainedConfig

from node.policy.packed import (
    KeptKeys,
    ModelInput,
    by_length,
    common_beginning,
    packed_behind,
    padded_input,
)
from node.policy.packed_attention import can_share
from node.policy.routing import choices_of_lines
from node.protocol.reasons import Refusal
from node.verification.deviations import SpanMeasured
from node.verification.spans import Span

MAX_BATCH_TOKENS = 16 * 1024
"""Tokens in one forward pass, padding included and what spans share counted once; a longer sequence goes alone."""


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """Spans that go through a model together, the numbers that they have among all, and what the model reads."""

    spans: Sequence[Span]
    numbers: Sequence[int]
    input: ModelInput

    def predicting(self, hidden: Tensor) -> list[Tensor]:
        """Return each span's rows [tokens, hidden] of `hidden` [B, T, hidden] that its tokens come from."""
        flat = hidden.flatten(0, 1)
        return [
            span.predicted_from(flat[places[len(span.context_ids) - 1 :].to(flat.device)])
            for span, places in zip(self.spans, self.input.places, strict=True)
        ]

    def with_experts(
        self, measured: Sequence[SpanMeasured | Refusal], chosen: Sequence[Tensor]
    ) -> list[SpanMeasured | Refusal]:
        """Add to the measurements the experts that each span's inputs met: what each router chose of the batch."""
        choices = choices_of_lines(chosen, lines=1)
        if choices is None:
            return list(measured)
        return [
            one
            if isinstance(one, Refusal)
            else msgspec.structs.replace(one, experts=choices[0, places].numpy().tobytes())
            for one, places in zip(measured, self.input.places, strict=True)
        ]


def batches(spans: Sequence[Span], config: PreTrainedConfig, *, kept: KeptKeys | None = None) -> Iterator[SpanBatch]:
    """Yield batches of spans within MAX_BATCH_TOKENS, for a model of this configuration.

    What spans begin with in common, as a group's prompt, is computed once where the model allows that. With `kept`
    their contexts are kept, and not computed where they are; each batch has to be computed before the next is taken.
    """
    if can_share(config):
        found = _rows(spans, KeptKeys() if kept is None else kept, keeps=kept is not None)
    else:
        inputs = [span.input_ids for span in spans]
        cut = by_length([len(ids) for ids in inputs], most=MAX_BATCH_TOKENS)
        found = ((numbers, padded_input([inputs[number] for number in numbers])) for numbers in cut)
    for numbers, read in found:
        yield SpanBatch([spans[number] for number in numbers], numbers, read)


def _rows(spans: Sequence[Span], kept: KeptKeys, *, keeps: bool) -> Iterator[tuple[list[int], ModelInput]]:
    """Yield rows of spans that begin alike, each with their numbers."""
    inputs = [span.input_ids for span in spans]
    # Those of a context's tokens before the last, whose state is what a span's first token is predicted from.
    contexts = [len(span.context_ids) - 1 for span in spans]
    batch: list[int] = []
    shared: list[int] = []
    begins: list[range] = []
    tokens = begun = 0

    def row() -> tuple[list[int], ModelInput]:
        keeping = [contexts[number] if keeps else 0 for number in batch]
        sequences = [inputs[number] for number in batch]
        return batch, packed_behind(sequences, shared=shared, begins=begins, kept=kept, keeping=keeping)

    for number in sorted(range(len(inputs)), key=lambda number: inputs[number]):
        ids, most = inputs[number], contexts[number]
        known = common_beginning(inputs[batch[-1]], ids) if batch else 0
        if begun > most:  # no state of a kept token is computed
            known = min(known, most)
        begin = kept.longest(ids, most=most)
        if batch and tokens + len(ids) - max(known, len(begin)) > MAX_BATCH_TOKENS:
            yield row()
            batch, shared, begins, tokens, known = [], [], [], 0, 0
            begin = kept.longest(ids, most=most)  # of what the row has added
        if len(begin) < known:
            begin = range(0)
        begun = len(begin) or min(begun, known)
        known = max(known, len(begin))
        batch.append(number)
        shared.append(known)
        begins.append(begin)
        tokens += len(ids) - known
    if batch:
        yield row()
