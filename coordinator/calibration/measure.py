"""Draw groups with an engine, and measure them as a verifier does, keeping every single value.

A verdict holds only a group's extremes and sums; levels are fitted from single values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from node.engines.base import Engine, SampleRequest
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.protocol.turns import Replies
from node.verification.deviations import Deviations
from node.verification.prefill import Prefill
from node.verification.spans import spans_of

ROLLOUTS_AT_ONCE = 512


async def draw(engine: Engine, groups: Sequence[Sequence[SampleRequest]], *, at_once: int) -> list[list[Rollout]]:
    """Draw the rollouts of each group with `at_once` groups in flight, like a worker with that many slots."""
    drawn: list[list[Rollout]] = [[] for _ in groups]
    waiting = iter(range(len(groups)))

    async def work() -> None:
        for number in waiting:
            drawn[number] = await engine.generate(groups[number])

    await asyncio.gather(*(work() for _ in range(at_once)))
    return drawn


def measure(
    prefill: Prefill,
    groups: Sequence[Sequence[Rollout]],
    replies: Sequence[Sequence[Replies]] | None = None,
    *,
    spec: RunSpec,
    at_once: int = ROLLOUTS_AT_ONCE,
) -> list[list[Deviations]]:
    """Measure each rollout under `prefill`, `at_once` per batch. Rollouts must have one segment.

    `replies` are what stands between the tokens of each rollout of each group; None where nothing does. Raises Refusal
    for proofs that no prover makes, and ValueError for several segments.
    """
    between = [[()] * len(group) for group in groups] if replies is None else replies
    flat = [
        (rollout, inserted)
        for group, own in zip(groups, between, strict=True)
        for rollout, inserted in zip(group, own, strict=True)
    ]
    measured: list[Deviations] = []
    for start in range(0, len(flat), at_once):
        part = flat[start : start + at_once]
        spans = [
            span
            for row, (rollout, inserted) in enumerate(part)
            for _, span in spans_of(rollout, inserted, row=row, chunk_tokens=spec.proofs.chunk_tokens)
        ]
        if len(spans) != len(part):
            raise ValueError("rollouts of several policies cannot be calibrated with")
        found = prefill.measure(spans, spec=spec)
        for one, (rollout, _) in zip(found, part, strict=True):
            if isinstance(one, Refusal):
                raise one
            measured.append(Deviations.of([one], rollout.logprobs))
    ordered = iter(measured)
    return [[next(ordered) for _ in group] for group in groups]
