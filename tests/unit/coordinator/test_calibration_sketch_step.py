"""The sketch's step: too wide, and small cheats drown in the grid; too narrow, and honest work looks unrelated."""

from __future__ import annotations

import math
import random

import pytest

from coordinator.calibration.sketch_step import BOUNDS, ROUNDS, error_of, find_step
from node.protocol.run import EnvironmentSpec, ModelSpec, ProofSpec, RunSpec

HIDDEN = 1024


def run_of(dtype):
    return RunSpec(
        name="test",
        environments=(EnvironmentSpec(name="arithmetic"),),
        model=ModelSpec(dtype=dtype),
        proofs=ProofSpec(scheme="sketch/1"),
    )


def honest(sigma, *, tokens=4000):
    """Distances of states whose projections are off by `sigma`, through a dithered grid that wraps at 16 steps."""
    rng = random.Random(1)
    asked = []

    async def distances(spec):
        step = spec.proofs.sketch_step
        asked.append(step)

        def error():
            value = rng.gauss(0, sigma / step) + rng.random() - 0.5
            return (value + 8) % 16 - 8

        return [math.sqrt(sum(error() ** 2 for _ in range(8)) / 8) for _ in range(tokens)]

    return distances, asked


@pytest.mark.parametrize("sigma", [0.0005, 0.002, 0.006, 0.03])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_the_step_is_the_error_of_a_projection(dtype, sigma):
    distances, asked = honest(sigma)
    spec = await find_step(run_of(dtype), distances, hidden=HIDDEN)
    assert spec.proofs.sketch_step == pytest.approx(sigma, rel=0.15)
    assert len(asked) <= ROUNDS


async def test_an_error_that_the_first_grid_shows_well_costs_one_draw():
    distances, asked = honest(0.006)
    await find_step(run_of("bfloat16"), distances, hidden=HIDDEN)
    assert asked == [0.02]


async def test_identical_states_keep_a_step_that_one_rounding_elsewhere_does_not_overstep():
    distances, _ = honest(0.0)
    spec = await find_step(run_of("float32"), distances, hidden=HIDDEN)
    assert spec.proofs.sketch_step == pytest.approx(2**-9 / math.sqrt(HIDDEN), rel=0.05)


async def test_states_that_have_nothing_in_common_end_at_the_widest_step():
    distances, _ = honest(0.5)
    spec = await find_step(run_of("bfloat16"), distances, hidden=HIDDEN)
    assert spec.proofs.sketch_step == pytest.approx(BOUNDS[1], rel=0.01)


def test_the_grids_own_error_is_none_of_the_worker():
    assert error_of([math.sqrt(1 / 12)] * 10, step=0.01) == pytest.approx(0.0, abs=1e-9)
    assert error_of([0.1] * 10, step=0.01) == 0.0
    assert error_of([math.sqrt(1 + 1 / 12)] * 10, step=0.01) == pytest.approx(0.01)
