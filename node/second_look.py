"""A second look at a group that would pass: do its sketches point at other weights? (docs/protocol.md, section 7.4)

Deviations that are no larger than rounding may still have a direction. For weights that somebody may have used
instead (`SUSPECTS`), the matched filter of `toploc.gain` says how much of the way from the policy's own hidden states
to theirs a group's sketches go: none of it for honest work, all of it for work of those weights. It costs two more
prefills, in float32 so that this machine's rounding is in neither, and is therefore made of few groups: of those that
deviate somewhat, and of some by chance. Only where policies are transformers models in this process.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from node.measurement import Span
from node.policy import Policy
from node.prefill import Prefill, TransformersPrefill, spans_of
from node.protocol.admission import GAIN, GAIN_ERRORS, Finding, limit_of
from node.protocol.evidence import Totals, evidences
from node.protocol.run import LimitsSpec, RunSpec
from node.protocol.submission import Rollout, toploc_bytes
from node.protocol.turns import Replies
from node.readings import policy_of
from toploc import Gain, gain, shifts, sketch_errors

Look = Callable[[Totals, LimitsSpec], bool]
"""Whether a group with these totals, which would be admitted, is looked at again."""


class _Policies(Protocol):
    async def prefill(self, version: int) -> Prefill:
        """Raises PolicyAway."""


def at_doubt(totals: Totals, limits: LimitsSpec) -> bool:
    """Where the sketch deviates more than most honest groups' do; else by chance, which nobody can foresee."""
    nats = dict(evidences(totals, limits=limits))["sketch"]
    return nats > limits.suspicion or random.SystemRandom().random() < limits.second_looks


def always(_totals: Totals, _limits: LimitsSpec) -> bool:
    """The look of whoever checks what one found."""
    return True


def never(_totals: Totals, _limits: LimitsSpec) -> bool:
    """The look of whoever checks a verdict that none was needed for."""
    return False


async def look_again(
    rollouts: Sequence[Rollout],
    replies: Sequence[Replies] | None = None,
    *,
    version: int,
    policies: _Policies,
    published: Collection[int],
    spec: RunSpec,
) -> Finding | None:
    """What a group of the leased policy `version` turns out to be the work of; None if of nothing we suspect.

    `replies` are what the environment said in each rollout; None where it says nothing.
    `published` are the run's versions, the one before `version` among them if there is one. Raises PolicyAway.
    """
    if not spec.proofs.has_sketch:
        return None
    spans = [
        span
        for row, (rollout, said) in enumerate(zip(rollouts, replies or [()] * len(rollouts), strict=True))
        for drawn_by, span in spans_of(rollout, said, row=row, chunk_tokens=spec.proofs.chunk_tokens)
        if drawn_by == version
    ]
    for name in spec.limits.suspects:
        own = await policies.prefill(version)
        other = await _suspected(name, own, version=version, policies=policies, published=published)
        policy = policy_of(own)
        if policy is None or other is None:
            continue
        found = await asyncio.to_thread(measure_gain, policy, other, spans, spec=spec)
        reason, limit = limit_of(name + GAIN, spec.limits)
        if certain(found) > limit:
            return Finding(reason=reason, row=None, figure=name + GAIN, value=certain(found), limit=limit)
    return None


async def _suspected(
    name: str, own: Prefill, *, version: int, policies: _Policies, published: Collection[int]
) -> Policy | None:
    """The weights that go by `name`, where they can be had and are of the same shape."""
    policy = policy_of(own)
    if policy is None:
        return None
    if name == "int8":
        return await asyncio.to_thread(quantised, policy)
    earlier = max((known for known in published if known < version), default=None)
    if earlier is None:
        return None
    before = policy_of(await policies.prefill(earlier))
    return before if before is not None and before.hidden == policy.hidden else None


def certain(found: Gain) -> float:
    """What is left of the gain without `GAIN_ERRORS` standard errors: sqrt(gain^2 - error^2), at least 0.

    Independent deviations add up like this: honest groups scatter whatever the error is, and by the error as well.
    """
    error = GAIN_ERRORS * found.error
    return math.sqrt(found.gain**2 - error**2) if found.gain > error else 0.0


def measure_gain(own: Policy, other: Policy, spans: Sequence[Span], *, spec: RunSpec) -> Gain:
    """How much of the way from `own` to `other` the sketches of `spans` go."""
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
    """The policy with the matrices of its layers in eight bits, by `int8`; in float32."""
    exact = policy.in_float32()
    with torch.no_grad():
        for name, weight in exact.model.named_parameters():
            if weight.ndim == 2 and ".layers." in name:
                weight.copy_(int8(weight).to(next(policy.model.parameters()).dtype))
    return exact


def int8(weight: Tensor) -> Tensor:
    """A matrix [out, in] in eight bits: each row symmetric about zero, its largest magnitude 127 steps."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    return (weight / scale).round() * scale
