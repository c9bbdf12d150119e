"""The second look: do a group's sketches point at other weights? (docs/protocol.md, section 7.4)

Deviations that are no larger than rounding may still have a direction. For weights that somebody may have used
instead (`SUSPECTS`), the matched filter of `toploc.gain` says how much of the way from the policy's own hidden states
to theirs a group's sketches go: none of it for honest work, all of it for work of those weights. It costs two more
prefills, in float32 so that this machine's rounding is in neither, and is therefore made of few groups: of those that
deviate somewhat, and of some by chance. The weights come from the policies' files, layer by layer, so that it neither
depends on the verifier's engine nor takes a policy's memory; a recurrent policy is loaded whole.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from node.policy.config import ATTENTION
from node.policy.errors import PolicyError
from node.policy.file import Policy, load_policy
from node.policy.layers import Alter, LayeredModel
from node.policy.reading import OpenPolicy
from node.policy.skeleton import layer_matrices
from node.protocol.admission import GAIN_ERRORS
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout, toploc_bytes
from node.protocol.turns import Replies
from node.verification.measure import PolicyUnavailable
from node.verification.prefill import TransformersPrefill
from node.verification.spans import Span, spans_of
from node.verification.streamed import state_passes
from toploc import Gain, gain, shifts, sketch_errors


class _Policies(Protocol):
    async def file(self, version: int) -> OpenPolicy:
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

    0.0 where there are no such weights, or they are of another shape.

    Args: `replies` are what the environment said in each rollout, None where it says nothing. `published` are the
    run's versions, the one before `version` among them if there is one. Raises PolicyUnavailable.
    """
    own = await policies.file(version)
    other, alter = own, int8 if suspect == "int8" else None
    if alter is None:
        earlier = max((known for known in published if known < version), default=None)
        if earlier is None:
            return 0.0
        other = await policies.file(earlier)
    if other.blueprint.hidden != own.blueprint.hidden:
        return 0.0
    spans = [
        span
        for row, (rollout, inserted) in enumerate(zip(rollouts, replies or [()] * len(rollouts), strict=True))
        for drawn_by, span in spans_of(rollout, inserted, row=row, chunk_tokens=spec.proofs.chunk_tokens)
        if drawn_by == version
    ]
    try:
        found = await asyncio.to_thread(compare_weights, own, other, spans, spec=spec, alter=alter)
    except PolicyError as error:
        raise PolicyUnavailable(f"policy {version} or the one before: {error}") from error
    return gain_lower_bound(found)


def gain_lower_bound(found: Gain) -> float:
    """Return the gain less `GAIN_ERRORS` standard errors: sqrt(gain^2 - error^2), at least 0.

    Independent deviations add up like this: honest groups scatter whatever the error is, and by the error as well.
    """
    error = GAIN_ERRORS * found.error
    return math.sqrt(found.gain**2 - error**2) if found.gain > error else 0.0


def compare_weights(
    own: OpenPolicy, other: OpenPolicy, spans: Sequence[Span], *, spec: RunSpec, alter: Alter | None = None
) -> Gain:
    """Return how much of the way from `own` to `other`, altered by `alter`, the sketches of `spans` go.

    Raises PolicyError.
    """
    size, step = spec.proofs.chunk_tokens, spec.proofs.sketch_step
    dtype: torch.dtype = getattr(torch, spec.model.dtype)
    cut = toploc_bytes(spec.proofs)
    sketches = [proof[cut:] for span in spans for proof in span.proofs]
    seeds = [span.seed for span in spans for _ in span.proofs]
    ours = _chunks(exact_states(own, spans, dtype=dtype), spans, size=size)
    theirs = _chunks(exact_states(other, spans, dtype=dtype, alter=alter), spans, size=size)
    errors = sketch_errors(ours, seeds, sketches, step=step)
    return gain(errors, shifts(ours, theirs, seeds, step=step), seeds)


def _chunks(states: Sequence[Tensor], spans: Sequence[Span], *, size: int) -> list[Tensor]:
    return [
        chunk
        for span, own in zip(spans, states, strict=True)
        for chunk in torch.split(own.bfloat16(), span.chunk_sizes(size))
    ]


def exact_states(
    file: OpenPolicy, spans: Sequence[Span], *, dtype: torch.dtype, alter: Alter | None = None
) -> list[Tensor]:
    """Return each span's hidden states [tokens, hidden] that its tokens were predicted from, computed in float32.

    The weights are those of `file` in the run's `dtype`, the layers' matrices changed by `alter`. Raises PolicyError.
    """
    if file.blueprint.config.model_type not in ATTENTION:
        policy = load_policy(file.path, dtype=dtype)
        return TransformersPrefill(policy.in_float32() if alter is None else altered(policy, alter)).states(spans)
    model = LayeredModel(file, rounded=dtype, dtype=torch.float32, alter=alter)
    found: dict[int, Tensor] = {}
    with torch.inference_mode():
        for done in state_passes(model, spans):
            for batch, states, _ in done:
                found.update(zip(batch.numbers, states, strict=True))
    return [found[index] for index in range(len(spans))]


def altered(policy: Policy, alter: Alter) -> Policy:
    """Copy the policy to compute in float32, with the matrices of its layers changed by `alter` and rounded again."""
    exact = policy.in_float32()
    with torch.no_grad():
        for weight in layer_matrices(exact.model):
            weight.copy_(alter(weight).to(policy.model.dtype))
    return exact


def int8(weight: Tensor) -> Tensor:
    """Quantise a matrix [out, in] symmetrically per row to int8, and dequantise."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    return (weight / scale).round() * scale
