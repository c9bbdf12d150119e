"""Curves of training, on the run's page and in the report: what is drawn must be what the trainer said."""

from __future__ import annotations

import json
import math
import re

import pytest

from coordinator.metrics.curves import (
    KINDS,
    MOST_ENVIRONMENTS,
    curve_stats,
    curves,
    environment_kinds,
    line,
    mean_stats,
    round_up,
)


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]


def test_a_value_is_as_high_as_it_is_large() -> None:
    (curve,) = curves([{"entropy": 0.0}, {"entropy": 0.5}, {"entropy": 1.0}])
    assert (curve.kind.name, curve.bottom, curve.top) == ("Entropy", 0.0, 1.0)
    assert points(curve.path) == [(0.0, 100.0), (50.0, 50.0), (100.0, 0.0)]


def test_only_what_some_step_has_is_drawn_and_what_nobody_knows_is_left_out() -> None:
    found = curves([{"grad_norm": 1.0, "tomorrows": 3.0}, {"staleness": 2.0}, {}])
    assert [curve.kind.key for curve in found] == ["grad_norm", "staleness"]
    assert curves([]) == []
    assert curves([{"reward": 1.0}], kinds=KINDS[1:]) == []


def test_a_gap_is_no_line_through_it() -> None:
    """A step that lacks a statistic, or has one that is not finite, must not look like one that had 0."""
    (curve,) = curves([{"entropy": 1.0}, {}, {"entropy": 1.0}, {"entropy": 1.0}, {"entropy": math.inf}])
    assert curve.values == (1.0, None, 1.0, 1.0, None)
    assert curve.path == "M0.00 0.0h0.8M50.00 0.0L75.00 0.0"


def test_values_below_zero_stay_in_the_box() -> None:
    (curve,) = curves([{"logprob_gap": -0.3}, {"logprob_gap": 0.1}])
    assert all(0 <= y <= 100 for _, y in points(curve.path))
    assert curve.bottom == -0.5


@pytest.mark.parametrize("value", [0.0, 1e-9, 0.0004, 0.05, 3.0, 1234.5, 1e12])
def test_the_axis_ends_above_the_largest_value_and_not_far_above(value: float) -> None:
    top = round_up(value)
    assert value <= top <= max(10 * value, 1e-6)
    assert points(line([value], bottom=0.0, top=top))


def test_what_a_page_keeps_of_a_step_is_finite_and_known() -> None:
    said = {"entropy": 0.2, "grad_norm": math.nan, "logprob_gap": math.inf, "train_seconds": 2.0, "staleness": None}
    said |= {"reward/code": 0.5, "reward/math": math.nan}
    assert curve_stats(json.dumps(said)) == {"entropy": 0.2, "reward/code": 0.5}
    assert curve_stats(None) == {}
    idle = {"entropy": 0.0, "grad_norm": 0.0, "reward": 1.0, "reward/code": 1.0, "tokens": 0.0}
    assert curve_stats(json.dumps(idle)) == {"reward": 1.0, "reward/code": 1.0}, "means over nothing are gaps"
    assert mean_stats([{"entropy": 0.2}, {"entropy": 0.4, "grad_norm": 3.0}]) == pytest.approx(
        {"entropy": 0.3, "grad_norm": 3.0}
    )


def test_each_environment_of_several_has_a_curve_and_a_step_without_its_groups_a_gap() -> None:
    """An operator who mixes two tasks would see one mean, in which the one that collapses hides."""
    kinds = environment_kinds(["math", "code", "math"])
    assert [kind.name for kind in kinds] == ["math", "code"]
    found = curves([{"reward/math": 0.5, "reward/code": 0.25}, {"reward/math": 0.75}], kinds=kinds)
    assert {curve.kind.name: curve.values for curve in found} == {"math": (0.5, 0.75), "code": (0.25, None)}
    assert mean_stats([{"reward/math": 0.5}, {"reward/math": 0.75}]) == {"reward/math": 0.625}


def test_a_run_of_one_environment_has_no_second_reward_and_one_of_many_not_a_page_of_them() -> None:
    assert environment_kinds(["math"]) == environment_kinds(["math", "math"]) == ()
    assert len(environment_kinds(map(str, range(100)))) == MOST_ENVIRONMENTS


def test_each_kind_has_its_own_key_and_name() -> None:
    assert len({kind.key for kind in KINDS}) == len({kind.name for kind in KINDS}) == len(KINDS)
