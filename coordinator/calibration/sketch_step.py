"""The width of the sketch's grid that fits honest work: about the error of one of its projections."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from node.protocol.run import RunSpec

log = logging.getLogger(__name__)

FIRST = {"float32": 0.001}
FIRST_OF_OTHERS = 0.02
BOUNDS = (1e-6, 0.0625)
"""What a run may have (`node.protocol.run.ProofSpec`)."""

ROUNDS = 4
TRUSTED = (1 / 8, 2.0)
"""Errors between these many steps are read off well: smaller ones drown in the grid's own, larger ones wrap."""

LONGEST_STRIDE = 16.0

Distances = Callable[[RunSpec], Awaitable[Sequence[float]]]
"""The sketch distances of honest tokens, in steps, of the run that is given: its proofs are drawn anew."""


async def find_step(spec: RunSpec, distances: Distances, *, hidden: int) -> RunSpec:
    """`spec` with the step that fits its honest workers' errors, in at most ROUNDS draws.

    `distances` are those of the worker that is farthest off. The step is never below what one bfloat16 rounding of
    one of `hidden` elements moves a projection by: honest work of another machine is at least that far off.
    """
    least = max(BOUNDS[0], 2**-9 / math.sqrt(hidden))
    step = FIRST.get(spec.model.dtype, FIRST_OF_OTHERS)
    for _ in range(ROUNDS):
        sigma = error_of(await distances(_with(spec, step)), step=step)
        log.info("honest projections are off by %.3g of a state's rms, seen with a step of %.3g", sigma, step)
        found = min(BOUNDS[1], max(least, sigma, step / LONGEST_STRIDE))
        if TRUSTED[0] <= sigma / step <= TRUSTED[1] or found == step:
            return _with(spec, _rounded(found))
        step = found
    return _with(spec, _rounded(step))


def error_of(distances: Sequence[float], *, step: float) -> float:
    """The rms error of one projection, relative to a state's rms, from distances in steps.

    The grid, whose error is uniform over one step, adds 1/12 to their mean square.
    """
    return step * math.sqrt(max(statistics.fmean(distance**2 for distance in distances) - 1 / 12, 0.0))


def _rounded(step: float) -> float:
    return min(BOUNDS[1], max(BOUNDS[0], float(f"{step:.2g}")))


def _with(spec: RunSpec, step: float) -> RunSpec:
    return msgspec.structs.replace(spec, proofs=msgspec.structs.replace(spec.proofs, sketch_step=step))
