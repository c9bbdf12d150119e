"""Find the sketch step that fits honest work: about the error of one projection."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from node.protocol.run import RunSpec

log = logging.getLogger(__name__)

INITIAL_STEPS = {"float32": 0.001}
DEFAULT_INITIAL_STEP = 0.02
BOUNDS = (1e-6, 0.0625)
"""The range of `node.protocol.run.ProofSpec`."""

ROUNDS = 4
RELIABLE_RANGE = (1 / 8, 2.0)
"""Errors in this range of steps are estimated reliably: smaller ones drown in quantisation, larger ones wrap."""

MAX_STEP_RATIO = 16.0

Distances = Callable[[RunSpec], Awaitable[Sequence[float]]]
"""Draw anew with the given run's proofs; return the sketch distances of honest tokens, in steps."""


async def find_step(spec: RunSpec, distances: Distances, *, hidden: int) -> RunSpec:
    """Return `spec` with the step that fits the errors behind `distances`, after at most ROUNDS draws.

    They are those of one worker, or of the farthest of several. The step is never below the effect on a projection of
    one bfloat16 rounding of one of `hidden` elements: honest work on another machine is at least that far off.
    """
    min_step = max(BOUNDS[0], 2**-9 / math.sqrt(hidden))
    step = INITIAL_STEPS.get(spec.model.dtype, DEFAULT_INITIAL_STEP)
    for _ in range(ROUNDS):
        sigma = error_of(await distances(_with_step(spec, step)), step=step)
        log.info("honest projections deviate by %.3g of a state's rms (measured with step %.3g)", sigma, step)
        candidate = min(BOUNDS[1], max(min_step, sigma, step / MAX_STEP_RATIO))
        if RELIABLE_RANGE[0] <= sigma / step <= RELIABLE_RANGE[1] or candidate == step:
            return _with_step(spec, _rounded(candidate))
        step = candidate
    return _with_step(spec, _rounded(step))


def error_of(distances: Sequence[float], *, step: float) -> float:
    """Estimate the rms error of one projection, relative to a state's rms, from distances in steps.

    Quantisation, uniform over one step, adds 1/12 to their mean square.
    """
    return step * math.sqrt(max(statistics.fmean(distance**2 for distance in distances) - 1 / 12, 0.0))


def _rounded(step: float) -> float:
    return min(BOUNDS[1], max(BOUNDS[0], float(f"{step:.2g}")))


def _with_step(spec: RunSpec, step: float) -> RunSpec:
    return msgspec.structs.replace(spec, proofs=msgspec.structs.replace(spec.proofs, sketch_step=step))
