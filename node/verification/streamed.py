"""Prefills of policies larger than memory, layer by layer from the policy's file.

What is measured is what `node.verification.prefill.TransformersPrefill` measures, bit for bit, but the weights are read
once for each call: the more spans, the cheaper. In memory at a time: the largest layer or the output head, the hidden
states of all spans of a pass, and one layer's activations for one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from node.policy.file import Blueprint
from node.policy.layers import LayeredModel
from node.policy.reading import OpenPolicy
from node.policy.routing import noted_choices
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.verification.batches import SpanBatch, batches
from node.verification.deviations import SpanMeasured
from node.verification.spans import Span, measure_states

MAX_STATE_BYTES = 2**30
"""Hidden states that go through the layers together; more spans take another pass over the file."""

Computed = tuple[SpanBatch, list[Tensor], list[Tensor]]
"""A batch, the hidden states [tokens, hidden] that each of its span's tokens are predicted from, and what each router
chose of the whole batch [inputs, experts].
"""


class StreamedPrefill:
    """A `Prefill` of the policy in `file`, which has attention, with weights in `dtype`.

    Computes in that dtype, or in float32 if `exact`.
    """

    def __init__(self, file: OpenPolicy, *, dtype: torch.dtype, exact: bool = False) -> None:
        self._file, self._dtype, self._exact = file, dtype, exact

    @property
    def blueprint(self) -> Blueprint:
        return self._file.blueprint

    def in_float32(self) -> StreamedPrefill:
        """Return the prefill of the same weights that computes in float32."""
        return StreamedPrefill(self._file, dtype=self._dtype, exact=True)

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        """Measure as `Prefill.measure`; also raises UnreadablePolicy."""
        results: dict[int, SpanMeasured | Refusal] = {}
        model = LayeredModel(self._file, rounded=self._dtype, dtype=torch.float32 if self._exact else self._dtype)
        with torch.inference_mode():
            for done in state_passes(model, spans):
                head = model.head()
                for batch, states, chosen in done:
                    measured = measure_states(
                        batch.spans,
                        states,
                        head,
                        temperature=spec.sampling.temperature,
                        proofs=spec.proofs,
                    )
                    results.update(zip(batch.numbers, batch.with_experts(measured, chosen), strict=True))
        return [results[number] for number in range(len(spans))]


def state_passes(model: LayeredModel, spans: Sequence[Span]) -> Iterator[list[Computed]]:
    """Yield the batches of each pass over the policy's file, whose hidden states take at most MAX_STATE_BYTES."""
    for group in _grouped(batches(spans, model.config), most=MAX_STATE_BYTES // model.state_bytes):
        with noted_choices(model.routers) as noted:
            hidden = model.hidden_states([batch.input for batch in group])
        yield [
            (batch, batch.predicting(states), [chosen[at] for chosen in noted])
            for at, (batch, states) in enumerate(zip(group, hidden, strict=True))
        ]


def _grouped(found: Iterable[SpanBatch], *, most: int) -> Iterator[list[SpanBatch]]:
    """Yield batches in groups of at most `most` tokens, or of one batch."""
    group: list[SpanBatch] = []
    held = 0
    for batch in found:
        tokens = batch.input.ids.numel()
        if group and held + tokens > most:
            yield group
            group, held = [], 0
        group.append(batch)
        held += tokens
    if group:
        yield group
