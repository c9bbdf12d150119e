"""Batches of spans for one forward pass of a transformers model, and what of its result belongs to each span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from node.policy.routing import choices_of_lines
from node.protocol.reasons import Refusal
from node.verification.deviations import SpanMeasured
from node.verification.spans import Span

MAX_BATCH_TOKENS = 16 * 1024
"""Tokens in one forward pass, padding included; a longer sequence goes alone."""


def batches(spans: Sequence[Span]) -> Iterator[list[int]]:
    """Yield batches of span indices of similar length, within MAX_BATCH_TOKENS."""
    batch: list[int] = []
    for index in sorted(range(len(spans)), key=lambda index: spans[index].length, reverse=True):
        if batch and spans[batch[0]].length * (len(batch) + 1) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def padded_ids(batch: Sequence[Span]) -> Tensor:
    """Return the inputs of a batch [spans, tokens].

    Padding is on the right, and no token attends to a later one, so it needs no mask and changes nothing.
    """
    ids = torch.zeros(len(batch), max(span.length for span in batch), dtype=torch.int64)
    for index, span in enumerate(batch):
        ids[index, : span.length] = torch.tensor(span.input_ids)
    return ids


def predicting(hidden: Tensor, batch: Sequence[Span]) -> list[Tensor]:
    """Return each span's rows [tokens, hidden] of `hidden` [spans, tokens, hidden] that its tokens come from."""
    return [
        span.predicted_from(hidden[index, len(span.context_ids) - 1 : span.length]) for index, span in enumerate(batch)
    ]


def with_experts(
    measured: Sequence[SpanMeasured | Refusal], chosen: Sequence[Tensor], batch: Sequence[Span]
) -> list[SpanMeasured | Refusal]:
    """Add to a batch's measurements the experts that each span's inputs met: what each router chose of the batch."""
    choices = choices_of_lines(chosen, lines=len(batch))
    if choices is None:
        return list(measured)
    return [
        one if isinstance(one, Refusal) else msgspec.structs.replace(one, experts=line[: span.length].numpy().tobytes())
        for one, line, span in zip(measured, choices, batch, strict=True)
    ]
