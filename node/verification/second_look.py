"""The second look: do a group's sketches point at other weights? (docs/protocol.md, section 7.4)

Deviations that are no larger than rounding may still have a direction. For weights that somebody may have used
instead (`SUSPECTS`), the matched filter of `toploc.gain` says how much of the way from the policy's own hidden states
to theirs a group's sketches go: none of it for honest work, all of it for work of those weights. It costs two more
prefills, in float32 so that this machine's rounding is in neither, and is therefore made of few groups: of those that
deviate somewhat, and of some by chance. Only where policies are transformers models in this process.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from node.policy.file import Policy
from node.protocol.admission import GAIN_ERRORS
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout, toploc_bytes
from node.protocol.turns import Replies
from node.verification.prefill import Prefill, TransformersPrefill
from node.verification.readings import policy_of
from node.verification.spans import Span, spans_of
from toploc import Gain, gain, shifts, sketch_errors


class _Policies(Protocol):
    async def prefill(self, version: int) -> Prefill:
        """Raises PolicyUnavailable."""


async def suspect_gain(
    suspect: str,
    rollouts: Sequence[Rollout],
    replies: Sequence[Replies] | None = None,
    *,
    version: int,
    policies: _Policies,
    published: Collection[int],
    spec: RunSpec,
) -> float:
    """Return how far a group of the leased policy `version` surely goes towards the weights `suspect`.

    0.0 where these cannot be had, or are of another shape.

    Args: `replies` are what the environment said in each rollout, None where it says nothing. `published` are the
    run's versions, the one before `version` among them if there is one. Raises PolicyUnavailable.
    """
    own = policy_of(await policies.prefill(version))
    other = None if own is None else await _suspected(suspect, own, version, policies=policies, published=published)
    if own is None or other is None:
        return 0.0
    spans = [
        span
        for row, (rollout, inserted) in enumerate(zip(rollouts, replies or [()] * len(rollouts), strict=True))
        for drawn_by, span in spans_of(rollout, inserted, row=row, chunk_tokens=spec.proofs.chunk_tokens)
        if drawn_by == version
    ]
    return gain_lower_bound(await asyncio.to_thread(compare_weights, own, other, spans, spec=spec))


async def _suspected(
    suspect: str, own: Policy, version: int, *, policies: _Policies, published: Collection[int]
) -> Policy | None:
    if suspect == "int8":
        return await asyncio.to_thread(quantised, own)
    earlier = max((known for known in published if known < version), default=None)
    before = None if earlier is None else policy_of(await policies.prefill(earlier))
    return before if before is not None and before.hidden == own.hidden else None


def gain_lower_bound(found: Gain) -> float:
    """Return the gain less `GAIN_ERRORS` standard errors: sqrt(gain^2 - error^2), at least 0.

    Independent deviations add up like this: honest groups scatter whatever the error is, and by the error as well.
    """
    error = GAIN_ERRORS * found.error
    return math.sqrt(found.gain**2 - error**2) if found.gain > error else 0.0


def compare_weights(own: Policy, other: Policy, spans: Sequence[Span], *, spec: RunSpec) -> Gain:
    """Return how much of the way from `own` to `other` the sketches of `spans` go."""
    size, step = spec.proofs.chunk_tokens, spec.proofs.sketch_step
    cut = toploc_bytes(spec.proofs)
    sketches = [proof[cut:] for span in spans for proof in span.proofs]
    seeds = [span.seed for span in spans for _ in span.proofs]
    ours, theirs = (_chunks(TransformersPrefill(policy.in_float32()), spans, size=size) for policy in (own, other))
    errors = sketch_errors(ours, seeds, sketches, step=step)
    return gain(errors, shifts(ours, theirs, seeds, step=step), seeds)


def _chunks(prefill: TransformersPrefill, spans: Sequence[Span], *, size: int) -> list[Tensor]:
    return [
        chunk
        for span, states in zip(spans, prefill.states(spans), strict=True)
        for chunk in torch.split(states.bfloat16(), span.chunk_sizes(size))
    ]


def quantised(policy: Policy) -> Policy:
    """Return the policy with the matrices of its layers in eight bits, by `int8`; in float32."""
    exact = policy.in_float32()
    with torch.no_grad():
        for name, weight in exact.model.named_parameters():
            if weight.ndim == 2 and ".layers." in name:
                weight.copy_(int8(weight).to(next(policy.model.parameters()).dtype))
    return exact


def int8(weight: Tensor) -> Tensor:
    """Quantise a matrix [out, in] symmetrically per row to int8, and dequantise."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    return (weight / scale).round() * scale
