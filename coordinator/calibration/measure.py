"""Drawing groups with an engine, and measuring them as a verifier does, number by number.

A verdict holds only the worst of a group and its sums; levels are fitted from every single value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from node.engines.base import Engine, SampleRequest
from node.measurement import Deviations
from node.prefill import Prefill, spans_of
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout

ROLLOUTS_AT_ONCE = 512


async def draw(engine: Engine, groups: Sequence[Sequence[SampleRequest]], *, at_once: int) -> list[list[Rollout]]:
    """The rollouts of each group, `at_once` of them in flight, as a worker with so many slots draws them."""
    drawn: list[list[Rollout]] = [[] for _ in groups]
    waiting = iter(range(len(groups)))

    async def work() -> None:
        for number in waiting:
            drawn[number] = await engine.generate(groups[number])

    await asyncio.gather(*(work() for _ in range(at_once)))
    return drawn


def measure(
    prefill: Prefill, groups: Sequence[Sequence[Rollout]], *, spec: RunSpec, at_once: int = ROLLOUTS_AT_ONCE
) -> list[list[Deviations]]:
    """What `prefill` says of each rollout, with so many in a batch. Each is of one segment.

    Raises Refusal for proofs that nobody makes.
    """
    flat = [rollout for group in groups for rollout in group]
    measured: list[Deviations] = []
    for start in range(0, len(flat), at_once):
        part = flat[start : start + at_once]
        spans = [
            span
            for row, rollout in enumerate(part)
            for _, span in spans_of(rollout, row=row, chunk_tokens=spec.proofs.chunk_tokens)
        ]
        if len(spans) != len(part):
            raise ValueError("a rollout of several policies is not for calibration")
        found = prefill.measure(spans, spec=spec)
        for one, rollout in zip(found, part, strict=True):
            if isinstance(one, Refusal):
                raise one
            measured.append(Deviations.of([one], rollout.logprobs))
    ordered = iter(measured)
    return [[next(ordered) for _ in group] for group in groups]
