"""Prefills: forward passes of one policy over the spans that it is claimed to have drawn.

Every span is measured by an ordinary prefill of its whole prefix under its own policy, so a completion that several
policies drew needs nothing special (docs/protocol.md, section 7.1). `TransformersPrefill` is the reference: it shares
no code with the engines that workers run, sees whole sequences at once, has no KV cache and no padding mask, and
computes in the policy's own dtype.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from node.policy.file import Blueprint, Policy, load_policy
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.verification.deviations import SpanMeasured
from node.verification.spans import Span, measure_states

logger = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 16 * 1024
"""Tokens in one forward pass, padding included; a longer sequence goes alone."""


class Prefill(Protocol):
    """One policy, ready to measure."""

    @property
    def blueprint(self) -> Blueprint:
        """The policy without its weights."""

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        """Measure each span, in their order; blocks.

        A Refusal is for proofs that no honest prover makes of the span's tokens. Whatever else goes wrong raises.
        """


class Prefills(Protocol):
    """Loader of policy files into one engine."""

    async def prefill(self, path: Path, *, version: int) -> Prefill:
        """Load policy `version` from `path`, which must stay while it is used; raises PolicyError."""

    async def close(self) -> None:
        """Stop the engine."""


class TransformersPrefills:
    """The reference `Prefills`: each policy a transformers model in this process, computing in `dtype`."""

    def __init__(self, *, dtype: str) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)

    async def prefill(self, path: Path, *, version: int) -> Prefill:  # noqa: ARG002  (the file says it all)
        return TransformersPrefill(await asyncio.to_thread(load_policy, path, dtype=self._dtype))

    async def close(self) -> None:
        """Do nothing."""


class TransformersPrefill:
    """The reference `Prefill`: the transformers model of a policy, in this process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def policy(self) -> Policy:
        """The policy, weights and all."""
        return self._policy

    @property
    def blueprint(self) -> Blueprint:
        return self._policy

    def states(self, spans: Sequence[Span]) -> list[Tensor]:
        """Return each span's hidden states [tokens, hidden] that its tokens were predicted from."""
        found: dict[int, Tensor] = {}
        with torch.inference_mode():
            for batch in _batches(spans):
                found.update(zip(batch, self._hidden_states([spans[index] for index in batch]), strict=True))
        return [found[index] for index in range(len(spans))]

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        """Measure as `Prefill.measure`, batching spans of similar length."""
        results: dict[int, SpanMeasured | Refusal] = {}
        with torch.inference_mode():
            for batch in _batches(spans):
                own = [spans[index] for index in batch]
                measured = measure_states(
                    own,
                    self._hidden_states(own),
                    self._policy.logits,
                    vocabulary=self._policy.vocabulary,
                    temperature=spec.sampling.temperature,
                    proofs=spec.proofs,
                )
                results.update(zip(batch, measured, strict=True))
        return [results[index] for index in range(len(spans))]

    def _hidden_states(self, batch: Sequence[Span]) -> list[Tensor]:
        """Return each span's inputs of the output head where its tokens are predicted: [tokens, hidden].

        Padding is on the right, and no token attends to a later one, so it needs no mask and changes nothing.
        """
        ids = torch.zeros(len(batch), max(span.length for span in batch), dtype=torch.int64)
        for index, span in enumerate(batch):
            ids[index, : span.length] = torch.tensor(span.input_ids)
        model: Any = self._policy.model
        hidden: Tensor = model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
        return [
            span.predicted_from(hidden[index, len(span.context_ids) - 1 : span.length])
            for index, span in enumerate(batch)
        ]


def _batches(spans: Sequence[Span]) -> Iterator[list[int]]:
    """Yield batches of span indices of similar length, within MAX_BATCH_TOKENS."""
    batch: list[int] = []
    for index in sorted(range(len(spans)), key=lambda index: spans[index].length, reverse=True):
        if batch and spans[batch[0]].length * (len(batch) + 1) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
