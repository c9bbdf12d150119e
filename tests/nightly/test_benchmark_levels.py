"""`benchmarks.levels`: its figure of rejected groups can be other than 0, and counts each group once."""

from __future__ import annotations

import random

import pytest

from benchmarks.levels import SIZES, figures_of, sampled
from node.verification.deviations import Deviations


def group(rng: random.Random, *, size: float) -> list[Deviations]:
    def some(count: int) -> list[float]:
        return [size * rng.random() for _ in range(count)]

    return [
        Deviations(
            exponent_mismatches=[0.0],
            mantissa_means=some(1),
            mantissa_medians=some(1),
            sketch_distances=some(8),
            margins=[0.0] * 8,
            errors=[1e-6 * value for value in some(8)],
        )
        for _ in range(4)
    ]


def test_groups_that_no_limits_were_fitted_on_are_judged_and_strange_ones_among_them_counted() -> None:
    rng = random.Random(1)
    alike = [[group(rng, size=0.5) for _ in range(256)] for _ in range(2)]
    found = figures_of(alike, deals=3, chance=1e-6)
    assert all(found[f"judged_{size}"] == 3 * 2 * (256 - size) for size in SIZES)
    assert all(found[f"rejected_{size}"] == found[f"drifted_{size}"] == 0 for size in SIZES)
    assert all(found[f"clean_{size}"] == 1 for size in SIZES)

    strange = [[*alike[0][1:], group(rng, size=50.0)], alike[1]]
    found = figures_of(strange, deals=6, chance=1e-6)
    # A deal either fits its limits on the strange group, or rejects it.
    assert 0 < found["rejected_24"] <= 6
    assert found["clean_24"] == pytest.approx(1 - found["rejected_24"] / 6)


@pytest.mark.parametrize("size", SIZES)
def test_a_deal_has_groups_of_each_number_of_slots_in_flight_as_a_calibration_has(size: int) -> None:
    """Limits are fitted on three equal parts: a group in the wrong one would count among others than its own."""
    taken = sorted(sampled(512, size, rng=random.Random(0)))
    assert len(set(taken)) == size
    bounds = [size * part // 3 for part in range(4)]
    for part in range(3):
        own = taken[bounds[part] : bounds[part + 1]]
        assert all(512 * part // 3 <= index < 512 * (part + 1) // 3 for index in own)
