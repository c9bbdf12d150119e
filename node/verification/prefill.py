"""Prefills: forward passes of one policy over the spans that it is claimed to have drawn.

Every span is measured by an ordinary prefill of its whole prefix under its own policy, so a completion that several
policies drew needs nothing special (docs/protocol.md, section 7.1). `TransformersPrefill` is the reference: it shares
no code with the engines that workers run, sees whole sequences at once, has no KV cache and no padding mask, and
computes in the policy's own dtype. What spans begin with in common it computes once (`node.policy.packed`).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from node.errors import EngineFailed
from node.policy.experts import routers
from node.policy.file import Blueprint, Policy
from node.policy.memory import unless_out_of_memory
from node.policy.packed import KeptKeys
from node.policy.packed_attention import can_share, packed_attention
from node.policy.reading import OpenPolicy, load_once
from node.policy.routing import noted_choices
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.verification.batches import SpanBatch, batches
from node.verification.deviations import SpanMeasured
from node.verification.spans import Span, measure_states
from node.verification.streamed import StreamedPrefill

OUT_OF_MEMORY: Final = "out_of_memory"
"""Code of an EngineFailed that another moment, or fewer policies beside it, may spare."""


class KeptContexts:
    """What prefills computed of the contexts of spans, for spans of the same claims that are measured later.

    Of each model, for as long as that is in memory.
    """

    def __init__(self) -> None:
        self.of_models: MutableMapping[nn.Module, KeptKeys] = WeakKeyDictionary()


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

    @property
    def device(self) -> torch.device:
        """Where second looks at the engine's policies are computed."""

    def memory_of(self, blueprint: Blueprint) -> int:
        """Return the bytes that a loaded policy takes, in memory that is not the engine's own."""

    async def prefill(self, path: Path, *, version: int, streamed: bool = False) -> Prefill:
        """Load policy `version` from `path`, which must stay while it is used.

        If `streamed`, leave the weights of a policy with attention in the file; an engine that has a place of its own
        for them need not. Raises PolicyError, and EngineFailed where the engine cannot hold it (`OUT_OF_MEMORY`: now).
        """

    async def close(self) -> None:
        """Stop the engine."""


def no_memory_for(version: int, device: torch.device) -> EngineFailed:
    """Return the failure of a policy for which there is no memory now."""
    return EngineFailed(f"There is no memory for policy {version} on {device}.", code=OUT_OF_MEMORY)


class TransformersPrefills:
    """The reference `Prefills`: each policy a transformers model in this process, computing in `dtype` on `device`."""

    def __init__(self, *, dtype: str, device: torch.device | str = "cpu") -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)

    def memory_of(self, blueprint: Blueprint) -> int:
        return blueprint.parameters * self._dtype.itemsize

    async def prefill(self, path: Path, *, version: int, streamed: bool = False) -> Prefill:
        if streamed:
            open_file = partial(OpenPolicy, path, device=self.device)
            file = await asyncio.to_thread(unless_out_of_memory, open_file)
            if file is None:
                raise no_memory_for(version, self.device)
            return StreamedPrefill(file, dtype=self._dtype)
        load = partial(load_once, path, dtype=self._dtype, device=self.device)
        policy = await asyncio.to_thread(unless_out_of_memory, load)
        if policy is None:
            raise no_memory_for(version, self.device)
        return TransformersPrefill(policy)

    async def close(self) -> None:
        """Do nothing."""


class TransformersPrefill:
    """The reference `Prefill`: the transformers model of a policy, in this process."""

    _contexts: KeptContexts | None = None

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._routers = routers(policy.model)
        # Without the model: plans keep it for longer than the policy may stay in memory.
        self._blueprint = Blueprint(policy.config, policy.tokenizer, policy.eos_ids, policy.parameters)

    @property
    def policy(self) -> Policy:
        """The policy, weights and all."""
        return self._policy

    @property
    def blueprint(self) -> Blueprint:
        return self._blueprint

    def keeping(self, contexts: KeptContexts) -> Self:
        """Return this prefill, computing no context that is among `contexts`, and adding to these."""
        if self._routers:
            return self  # what a router chose of a context's tokens is measured with every span
        kept = copy.copy(self)
        kept._contexts = contexts  # noqa: SLF001  (its own class's)
        return kept

    def in_float32(self) -> TransformersPrefill:
        """Return a prefill of a copy in float32, with the same weights."""
        return TransformersPrefill(self._policy.in_float32())

    def states(self, spans: Sequence[Span]) -> list[Tensor]:
        """Return each span's hidden states [tokens, hidden] that its tokens were predicted from."""
        found: dict[int, Tensor] = {}
        with self._computing():
            for batch in batches(spans, self._policy.config):
                found.update(zip(batch.numbers, self._hidden_states(batch), strict=True))
        return [found[number] for number in range(len(spans))]

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        """Measure as `Prefill.measure`, several spans in each forward pass."""
        results: dict[int, SpanMeasured | Refusal] = {}
        with self._computing(), self._kept() as kept:
            for batch in batches(spans, self._policy.config, kept=kept):
                with noted_choices(self._routers) as noted:
                    states = self._hidden_states(batch)
                measured = measure_states(
                    batch.spans,
                    states,
                    self._policy.head,
                    temperature=spec.sampling.temperature,
                    proofs=spec.proofs,
                )
                found = batch.with_experts(measured, [chosen for (chosen,) in noted])
                results.update(zip(batch.numbers, found, strict=True))
        return [results[number] for number in range(len(spans))]

    @contextmanager
    def _kept(self) -> Iterator[KeptKeys | None]:
        """Have the contexts that are kept of this model within the context; they are lost where computing fails."""
        held = None if self._contexts is None else self._contexts.of_models.pop(self._policy.model, KeptKeys())
        yield held
        if self._contexts is not None and held is not None:
            self._contexts.of_models[self._policy.model] = held

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Have the model read batches within the context."""
        model: Any = self._policy.model
        with torch.inference_mode(), packed_attention(model if can_share(self._policy.config) else None):
            yield

    def _hidden_states(self, batch: SpanBatch) -> list[Tensor]:
        """Return each span's inputs of the output head where its tokens are predicted: [tokens, hidden]."""
        model: Any = self._policy.model
        ids, others = batch.input.ids.to(model.device), batch.input.arguments(model.device)
        hidden: Tensor = model.base_model(input_ids=ids, use_cache=False, **others).last_hidden_state
        return batch.predicting(hidden)
