"""Reading a group twice, in the run's dtype and in float32 (docs/protocol.md, section 7.1).

How far rounding moves a token's numbers depends on the token, and one reading cannot tell it from a cheat. Two readings
of the same weights differ by rounding alone. Where they disagree honest work may lie anywhere between, so that chunks
and margins count from the nearer of the two, and a sketch from their middle and in proportion to what lies between.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from node.policy.errors import MalformedPolicy
from node.policy.file import Blueprint, Policy, load_policy
from node.policy.memory import unless_out_of_memory
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.verification.deviations import SpanMeasured
from node.verification.prefill import (
    KeptContexts,
    Prefill,
    Prefills,
    TransformersPrefill,
    TransformersPrefills,
    no_memory_for,
)
from node.verification.spans import Span
from node.verification.streamed import StreamedPrefill
from toploc import distances
from toploc.sketch import LEVELS

MakePrefills = Callable[[RunSpec, float], Prefills]
"""Makes the prefills in a run's dtype, with a share of the engine's memory."""

EXACT_SHARE = 2 / 3
"""Of that memory, for the reading whose weights have twice the bytes."""


def transformers_prefills(spec: RunSpec, share: float = 1.0) -> Prefills:  # noqa: ARG001  (it takes what it needs)
    """Return the reference engine, in the run's dtype."""
    return TransformersPrefills(dtype=spec.model.dtype)


def make_prefills(spec: RunSpec, make: MakePrefills = transformers_prefills) -> Prefills:
    """Make the run's prefills: one reading, or two with a second one in float32."""
    if not reads_twice(spec):
        return make(spec, 1.0)
    return _TwoReadingsPrefills(spec, make(spec, 1 - EXACT_SHARE), make(_exact(spec), EXACT_SHARE))


def read_by_transformers(path: Path, *, spec: RunSpec) -> Prefill:
    """Load a policy into this process, with the run's number of readings; blocks. Raises PolicyError."""
    rounded = TransformersPrefill(load_policy(path, dtype=getattr(torch, spec.model.dtype)))
    return _with_exact(rounded) if reads_twice(spec) else rounded


def _with_exact(rounded: TransformersPrefill | StreamedPrefill) -> TwoReadings:
    # Of the rounded weights: those that the file has in more digits would not be those of the run.
    return TwoReadings(rounded, rounded.in_float32())


def policy_of(prefill: Prefill) -> Policy | None:
    """Return the policy in the run's dtype, where `prefill` has it in this process."""
    if isinstance(prefill, TwoReadings):
        return policy_of(prefill.rounded)
    return prefill.policy if isinstance(prefill, TransformersPrefill) else None


def reads_twice(spec: RunSpec) -> bool:
    """Return whether the run asks for a second reading that could differ from the first."""
    return spec.limits.readings == 2 and spec.model.dtype != "float32"


def keeping(prefill: Prefill, contexts: KeptContexts) -> Prefill:
    """Return `prefill`, adding to `contexts` and using them if it computes in this process with weights in memory."""
    return prefill.keeping(contexts) if isinstance(prefill, TwoReadings | TransformersPrefill) else prefill


def _exact(spec: RunSpec) -> RunSpec:
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, dtype="float32"))


@dataclass(frozen=True, slots=True)
class TwoReadings:
    """A `Prefill` of one policy in two dtypes; `exact` is the one in float32."""

    rounded: Prefill
    exact: Prefill

    @property
    def blueprint(self) -> Blueprint:
        return self.rounded.blueprint

    def keeping(self, contexts: KeptContexts) -> TwoReadings:
        """Return this prefill as `TransformersPrefill.keeping`, where its readings can."""
        return TwoReadings(keeping(self.rounded, contexts), keeping(self.exact, contexts))

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        """Measure in both dtypes and merge; a Refusal of either reading counts."""
        first = self.rounded.measure(spans, spec=spec)
        second = self.exact.measure(spans, spec=_exact(spec))
        return [_merged(one, other) for one, other in zip(first, second, strict=True)]


def _merged(one: SpanMeasured | Refusal, exact: SpanMeasured | Refusal) -> SpanMeasured | Refusal:
    if isinstance(one, Refusal) or isinstance(exact, Refusal):
        return one if isinstance(one, Refusal) else exact
    errors, exact_errors = torch.tensor(one.sketch_errors), torch.tensor(exact.sketch_errors)
    apart = _wrapped(errors - exact_errors)
    return SpanMeasured(
        exponent_mismatches=_nearer(one.exponent_mismatches, exact.exponent_mismatches),
        mantissa_means=_nearer(one.mantissa_means, exact.mantissa_means),
        mantissa_medians=_nearer(one.mantissa_medians, exact.mantissa_medians),
        sketch_errors=_wrapped(exact_errors + apart / 2).tolist(),
        sketch_disagreements=distances(apart).tolist() if one.sketch_errors else [],
        logprobs=exact.logprobs,
        margins=_nearer(one.margins, exact.margins),
        experts=exact.experts,
    )


def _nearer(one: Sequence[float], other: Sequence[float]) -> list[float]:
    # Both at once, so that one that is not a number does not hide behind the other.
    return [math.nan if math.isnan(a + b) else min(a, b) for a, b in zip(one, other, strict=True)]


def _wrapped(errors: Tensor) -> Tensor:
    """Wrap errors around the sketch's cyclic grid of `LEVELS` levels."""
    return (errors + LEVELS / 2).remainder(LEVELS) - LEVELS / 2


@dataclass(frozen=True, slots=True)
class _TwoReadingsPrefills:
    """Loader of policies into two engines, as `TwoReadings`."""

    spec: RunSpec
    rounded: Prefills
    exact: Prefills

    @property
    def device(self) -> torch.device:
        return self.rounded.device

    def memory_of(self, blueprint: Blueprint) -> int:
        return self.rounded.memory_of(blueprint) + self.exact.memory_of(blueprint)

    async def prefill(self, path: Path, *, version: int, streamed: bool = False) -> Prefill:
        """Load both readings; raises MalformedPolicy for weights that two engines would round differently."""
        rounded = await self.rounded.prefill(path, version=version, streamed=streamed)
        if isinstance(rounded, TransformersPrefill | StreamedPrefill):
            both = await asyncio.to_thread(unless_out_of_memory, partial(_with_exact, rounded))
            del rounded  # or the failure would hold it
            if both is None:
                raise no_memory_for(version, self.device)
            return both
        if rounded.blueprint.config.dtype != getattr(torch, self.spec.model.dtype):
            raise MalformedPolicy(f"is not in {self.spec.model.dtype}, as the run is", code="wrong_tensors")
        return TwoReadings(rounded, await self.exact.prefill(path, version=version))

    async def close(self) -> None:
        await asyncio.gather(self.rounded.close(), self.exact.close())
