"""What many small deviations say together: how often an honest node is stopped, and how little a cheating one gets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.protocol.evidence import (
    DRIFT_MEMORY,
    STATISTICS,
    Drift,
    Total,
    Totals,
    add,
    drift_limit,
    drifts,
    evidence,
    evidence_limit,
    evidences,
    follow,
    sketch_value,
    total,
)
from node.protocol.run import HonestSpec, LevelSpec, LimitsSpec

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
"""Honest values [trials, values] of one statistic."""

TRIALS = 20_000
LARGEST = 3.0
HONEST: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(0.2, 0.5, shape),
    "exponential": lambda rng, shape: rng.exponential(0.3, shape),
    "log-normal": lambda rng, shape: rng.lognormal(-2, 1.5, shape),
    "one in a hundred": lambda rng, shape: 2.5 * (rng.random(shape) < 0.01),
    "one in a thousand, far out": lambda rng, shape: 90.0 * (rng.random(shape) < 0.001),
    "two sides": lambda rng, shape: rng.choice([-1.0, 1.0], shape),
}


def level_of(values: np.ndarray, **changes: float) -> LevelSpec:
    """The level of these honest values, as someone fits it who has very many of them."""
    cut = np.minimum(values, LARGEST)
    fitted = {"mean": float(cut.mean()), "variance": float(cut.var()), "largest": LARGEST}
    return LevelSpec(**(fitted | changes))


def limits_of(level: LevelSpec, *, false_rejections: float = 1e-6) -> LimitsSpec:
    return LimitsSpec(honest=HonestSpec(far=None, margin=level), false_rejections=false_rejections)


def nats_of(sums: np.ndarray, count: int, level: LevelSpec) -> np.ndarray:
    return np.array([evidence(Total(count=count, sum=float(one)), level) for one in sums])


def assert_rare(nats: np.ndarray) -> None:
    """exp(-e) at most, with five standard deviations for the luck of this many trials."""
    for limit in (0.5, 1.0, 2.0, 4.0, 6.0):
        bound = math.exp(-limit)
        assert (nats > limit).mean() <= bound + 5 * math.sqrt(bound / len(nats)), limit


@pytest.mark.parametrize("count", [1, 7, 60])
@pytest.mark.parametrize("name", HONEST)
def test_honest_values_exceed_an_evidence_as_rarely_as_it_says(name: str, count: int) -> None:
    """It is what an honest worker's rejections are bounded by, whatever rounding looks like on its machine."""
    rng = np.random.default_rng(len(name) * count)
    level = level_of(HONEST[name](rng, (400_000, 1)))
    sums = np.minimum(HONEST[name](rng, (TRIALS, count)), LARGEST).sum(1)
    assert_rare(nats_of(sums, count, level))


@pytest.mark.parametrize("count", [8, 200])
def test_what_a_group_shares_does_not_make_it_suspicious(count: int) -> None:
    """A prompt that rounds badly, or a machine that does: its values are all a little high together."""
    rng = np.random.default_rng(count)
    shared = rng.normal(0, 0.2, (TRIALS, 1))
    sums = np.minimum(rng.normal(0.2, 0.5, (TRIALS, count)) + shared, LARGEST).sum(1)
    level = LevelSpec(mean=0.2, variance=0.25, largest=LARGEST, shared_variance=0.04)
    assert_rare(nats_of(sums, count, level))


def test_a_level_without_what_groups_share_would_reject_them() -> None:
    rng = np.random.default_rng(200)
    shared = rng.normal(0, 0.2, (TRIALS, 1))
    sums = np.minimum(rng.normal(0.2, 0.5, (TRIALS, 200)) + shared, LARGEST).sum(1)
    blind = LevelSpec(mean=0.2, variance=0.25, largest=LARGEST)
    assert (nats_of(sums, 200, blind) > 6.0).mean() > 0.1


def test_the_evidence_grows_with_the_number_of_values() -> None:
    """A shift that one row cannot show, a group shows: twice the values, twice the nats."""
    level = LevelSpec(mean=0.0, variance=1.0, largest=1.0)
    one, two = (evidence(Total(count=n, sum=0.3 * n), level) for n in (100, 200))
    assert two == pytest.approx(2 * one)
    assert 3.5 < one < 4.5, "0.3 standard deviations of a hundred values: about 100 x 0.3**2 / 2"


LEVELS = st.builds(
    lambda mean, variance, reach, shared: LevelSpec(
        mean=mean, variance=variance, largest=mean + reach, shared_variance=shared
    ),
    st.floats(-1e6, 1e6),
    st.floats(1e-18, 1e9),
    st.floats(1e-3, 1e6),
    st.floats(0, 1e9),
)
SUMS = st.floats(allow_nan=False, allow_infinity=False)


@given(LEVELS, st.integers(0, 2**53 - 1), SUMS, SUMS)
@settings(max_examples=500, deadline=None)
def test_a_larger_sum_is_never_less_evidence(level: LevelSpec, count: int, one: float, other: float) -> None:
    """And no sum makes it anything but a number from 0 on: an auditor reckons with a stranger's."""
    less, more = (evidence(Total(count=count, sum=each), level) for each in sorted((one, other)))
    assert 0 <= less <= more * (1 + 1e-9)


def test_a_sum_hardly_above_the_mean_keeps_its_digits() -> None:
    """Bennett's bound is close to Gauss's there; its own terms would cancel each other."""
    level = LevelSpec(mean=0.0, variance=1.0, largest=1e-6, shared_variance=1e6)
    variance = 10_000 * (1.0 + 10_000 * 1e6)
    for excess in (1.0, 1e3, 1e6):
        assert evidence(Total(count=10_000, sum=excess), level) == pytest.approx(excess**2 / 2 / variance, rel=1e-6)


@pytest.mark.parametrize("excess", [1e-9, 3e-5, 0.9999e-4, 1.0001e-4, 1e-3])
def test_the_series_and_the_closed_form_are_one_bound(excess: float) -> None:
    """Auditors of another implementation have no series, but more digits: both must find the same of one group."""
    with localcontext(prec=60):
        ratio = Decimal(excess)
        nats = float((1 + ratio) * (1 + ratio).ln() - ratio)
    level = LevelSpec(mean=0.0, variance=1.0, largest=1.0)
    assert evidence(Total(count=1, sum=excess), level) == pytest.approx(nats, rel=1e-9, abs=0)


@given(LEVELS, st.integers(1, 10_000), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_sums_up_to_the_mean_are_no_evidence(level: LevelSpec, count: int, below: float) -> None:
    assert evidence(Total(count=count, sum=count * level.mean - below), level) == 0.0


def test_nothing_measured_and_no_level_are_no_evidence() -> None:
    level = LevelSpec(mean=0.0, variance=1.0, largest=1.0)
    assert evidence(Total(), level) == evidence(Total(count=5, sum=5.0), None) == 0.0
    assert total([1.0, 2.0], None) == Total()
    assert dict(evidences(Totals(), limits=LimitsSpec())) == dict.fromkeys(STATISTICS, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e308, 7.0])
def test_what_is_no_number_counts_as_the_largest(bad: float) -> None:
    """NaN compares false with everything: it must neither vanish from a sum nor swallow the rest of it."""
    level = LevelSpec(mean=0.0, variance=1.0, largest=2.0)
    for values in ([bad, 0.5, -0.25], [0.5, bad, -0.25], [0.5, -0.25, bad]):
        assert total(values, level) == Total(count=3, sum=2.25)


def test_a_sketchs_token_counts_by_its_logarithm_so_that_none_speaks_for_all() -> None:
    honest = [sketch_value(0.29)] * 99
    assert sum([*honest, sketch_value(8.0)]) - 100 * honest[0] < 3.0
    assert sketch_value(0.0) < sketch_value(0.29) < sketch_value(4.62)
    assert math.isfinite(sketch_value(1e308))


def test_a_groups_totals_are_its_rows_together() -> None:
    rows = [Totals(margin=Total(count=3, sum=0.1)), Totals(margin=Total(count=4, sum=0.2), sketch=Total(1, 5.0))]
    assert add(rows) == Totals(margin=Total(count=7, sum=pytest.approx(0.3)), sketch=Total(1, 5.0))
    assert add([]) == Totals()


# -- a node's slots, one after the other

TOKENS = 400
LEVEL = LevelSpec(mean=0.1, variance=0.04, largest=2.0)
LIMITS = limits_of(LEVEL)
SPREAD = math.sqrt(LEVEL.variance)


def slot(shift: float = 0.0) -> Totals:
    """A slot whose every token is `shift` standard deviations above the mean."""
    return Totals(margin=Total(count=TOKENS, sum=TOKENS * (LEVEL.mean + shift * SPREAD)))


def is_stopped(drift: Drift, limits: LimitsSpec = LIMITS) -> bool:
    return any(nats > drift_limit(limits) for _, nats in drifts(drift))


def slots_until(stopped: bool, drift: Drift, *, shift: float, most: int = 1000) -> int:
    """How many more slots of this kind it takes until the node is stopped, or until it no longer is."""
    for number in itertools.count(1):
        drift = follow(drift, slot(shift), limits=LIMITS)
        if is_stopped(drift) is stopped:
            return number
        assert number < most
    raise AssertionError


def after(slots: int, *, shift: float, drift: Drift | None = None) -> Drift:
    drift = drift or Drift()
    for _ in range(slots):
        drift = follow(drift, slot(shift), limits=LIMITS)
    return drift


@pytest.mark.parametrize("name", ["normal", "exponential", "one in a hundred", "two sides"])
def test_an_honest_node_is_stopped_more_rarely_than_stated(name: str) -> None:
    """Stated here: once in a hundred slots. Eight nodes of two thousand slots may be stopped 160 times."""
    rng = np.random.default_rng(len(name))
    level = level_of(HONEST[name](rng, (400_000, 1)))
    limits = limits_of(level, false_rejections=0.01)
    stops = 0
    for _ in range(8):
        drift = Drift()
        for one in np.minimum(HONEST[name](rng, (2000, 50)), LARGEST).sum(1):
            drift = follow(drift, Totals(margin=Total(count=50, sum=float(one))), limits=limits)
            if is_stopped(drift, limits):
                stops, drift = stops + 1, Drift()
    assert stops <= 160


def test_a_small_shift_that_no_slot_shows_stops_a_node() -> None:
    """Weights of a step ago, or every near-tie taken: 0.15 standard deviations in each token, group after group."""
    assert evidence(slot(0.15).margin, LEVEL) < evidence_limit(LIMITS) / 2
    assert slots_until(True, Drift(), shift=0.15) <= 8


def test_a_few_tokens_far_out_in_each_slot_stop_a_node() -> None:
    """A worker that chooses three tokens of four hundred itself, and is within every limit with each."""
    few = Totals(margin=Total(count=TOKENS, sum=(TOKENS - 3) * LEVEL.mean + 3 * LEVEL.largest))
    assert evidence(few.margin, LEVEL) < evidence_limit(LIMITS) / 2
    drift, slots = Drift(), 0
    while not is_stopped(drift):
        drift, slots = follow(drift, few, limits=LIMITS), slots + 1
        assert slots < 30


def test_credit_cannot_be_saved_up() -> None:
    """Good work first, however much of it, buys not one slot of bad work."""
    for good in (1, 10, 1000):
        assert slots_until(True, after(good, shift=-0.5), shift=0.15) == slots_until(True, Drift(), shift=0.15)


def test_good_slots_between_bad_ones_buy_no_more_than_they_are_worth() -> None:
    """A node that cheats in every other slot is stopped, if its slots deviate on average."""
    drift, number = Drift(), 0
    while not is_stopped(drift):
        drift, number = follow(drift, slot(0.3 if number % 2 else 0.0), limits=LIMITS), number + 1
        assert number < 40


def test_a_node_that_mends_is_believed_again() -> None:
    """However long it cheated, and not before its good slots make up for what is remembered."""
    long, longer = after(100, shift=0.5), after(10_000, shift=0.5)
    assert long == longer
    most = DRIFT_MEMORY * drift_limit(LIMITS)
    assert max(nats for _, nats in drifts(long)) == most
    per_slot = follow(Drift(), slot(), limits=LIMITS).margin
    assert per_slot < 0
    needed = slots_until(False, long, shift=0.0)
    assert needed == math.ceil((most - drift_limit(LIMITS)) / -per_slot)
    assert 2 <= needed <= 20


def test_a_node_is_judged_only_by_what_the_run_has_a_level_for() -> None:
    everything = Totals(**{name: Total(count=100, sum=100.0) for name in STATISTICS})
    assert follow(Drift(), everything, limits=LimitsSpec(honest=HonestSpec(far=None))) == Drift()
    drifted = dict(drifts(follow(Drift(), everything, limits=LIMITS)))
    assert [name for name, nats in drifted.items() if nats] == ["margin"]
