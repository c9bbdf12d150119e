"""Levels and limits from honest work: too narrow, and honest workers starve; too wide, and they catch nobody."""

from __future__ import annotations

import math
import random

import pytest
from honest_groups import ROLLOUTS, rollout, worker_groups

from coordinator.calibration.fit import (
    MIN_LIMITS,
    ROUTED_HEADROOM,
    fit,
    fit_limits,
    round_up,
    rounded,
    single_value_limits,
)
from coordinator.calibration.result import CalibrationResult
from coordinator.calibration.trial import try_groups
from node.protocol.evidence import STATISTICS, add, evidence, evidence_limit
from node.protocol.run import EnvironmentSpec, LimitsSpec, ProofSpec, RunSpec
from node.verification.deviations import Deviations


def levels(*workers):
    return fit(*workers, false_rejections=1e-6)


def bits(values):
    return Deviations(
        exponent_mismatches=values,
        mantissa_means=values,
        mantissa_medians=values,
        sketch_distances=[],
        margins=[0.0] * len(values),
        errors=[0.0] * len(values),
    )


def most_evidence(groups, limits):
    """Of each group and each statistic, in nats."""
    totals = [add(one.totals(limits) for one in group) for group in groups]
    return {name: [evidence(getattr(t, name), getattr(limits.honest, name)) for t in totals] for name in STATISTICS}


# -- levels


@pytest.mark.parametrize("seed", range(6))
def test_a_rare_bit_that_all_completions_of_a_group_share_rejects_nobody(seed):
    """In float32 a bit differs in one chunk of a thousand; a group of equal completions has it in all, or in none."""
    rng, same, other = random.Random(seed), bits([0.0]), bits([0.0078125])

    def group():
        rare = (
            [rng.random() < 0.002] * ROLLOUTS if rng.random() < 0.7 else [rng.random() < 0.002 for _ in range(ROLLOUTS)]
        )
        return [other if one else same for one in rare]

    limits = fit_limits([group() for _ in range(64)], [group() for _ in range(64)], false_rejections=1e-6)
    caught = try_groups([group() for _ in range(500)], rounded(limits))
    assert (caught.rejected_groups, caught.drifted_groups) == (0, 0)


def test_a_cheat_whose_bits_all_differ_is_stopped_within_three_slots_where_none_ever_did():
    """By what its slots show together: one group of equal completions could be an honest accident."""
    limits = fit_limits(*[[[bits([0.0])] * ROLLOUTS for _ in range(64)] for _ in range(2)], false_rejections=1e-6)
    assert try_groups([[bits([0.0078125])] * ROLLOUTS] * 3, rounded(limits)).first <= 3


def test_no_honest_group_is_refused_by_the_levels_that_it_was_fitted_to():
    """One prompt of hundreds may be harder on the arithmetic than its mean square tells: its worker is as honest."""
    groups = worker_groups(300, seed=6)
    rng = random.Random(7)
    groups[123] = [rollout(rng, shared=3.0) for _ in range(ROLLOUTS)]
    limits = LimitsSpec(honest=levels(groups))
    nats = most_evidence(groups, limits)
    assert max(map(max, nats.values())) < evidence_limit(limits) - 2
    assert nats["mantissa"].index(max(nats["mantissa"])) == 123


@pytest.mark.parametrize("size", ["a rollout", "a group"])
def test_levels_fitted_on_one_half_hold_on_the_other(size):
    """P(evidence > s) <= exp(-s), though the values of a group share something."""
    groups = worker_groups(1200, seed=1)
    limits = LimitsSpec(honest=levels(groups[::2]))
    held_out = groups[1::2] if size == "a group" else [[one] for group in groups[1::2] for one in group]
    for name, nats in most_evidence(held_out, limits).items():
        for s in (0.5, 1.0, 2.0, 3.0, 4.0):
            allowed = math.exp(-s) + 3 * math.sqrt(math.exp(-s) / len(nats))
            assert sum(value > s for value in nats) / len(nats) <= allowed, (name, s)


def test_a_group_that_shares_nothing_shows_more_than_one_that_may():
    """A shared variance that is not there would hide a cheat."""
    together, apart = (levels(worker_groups(400, seed=2, spread=spread)) for spread in (0.15, 0.0))
    assert together.mantissa.shared_variance > 4 * apart.mantissa.shared_variance
    shifted = worker_groups(50, seed=3, worker=0.3, spread=0.0)
    seen = [sum(most_evidence(shifted, LimitsSpec(honest=honest))["mantissa"]) for honest in (together, apart)]
    assert seen[1] > 2 * seen[0]


def test_an_honest_worker_on_the_machine_that_is_farthest_off_is_not_stopped_by_its_drift():
    """Fitted as one mixture, the levels lie between the machines, and it would be: nothing averages over machines."""
    near = worker_groups(120, seed=4)
    far = worker_groups(120, seed=5, worker=0.6)
    later = worker_groups(200, seed=6, worker=0.6)
    mixed = [group for pair in zip(near, far, strict=True) for group in pair]
    as_one = LimitsSpec(**NO_LIMITS, honest=levels(mixed))
    apart = LimitsSpec(**NO_LIMITS, honest=levels(near, far))
    assert try_groups(later, as_one).first_drifted is not None
    assert try_groups(later, apart).first is None


def test_a_worker_whose_groups_differ_more_is_not_stopped_because_another_ones_mean_is_higher():
    """What its groups share may be larger by the room below the higher mean, and by no more: any more is rejected."""
    steady = worker_groups(400, seed=8, worker=0.4, spread=0.02)
    varied = worker_groups(400, seed=9, spread=0.25)
    later = worker_groups(1200, seed=10, spread=0.25)
    honest = levels(varied, steady)
    alone, both = levels(varied).mantissa, honest.mantissa
    room = both.mean - alone.mean
    spreads = math.sqrt(2 * (math.log(1e6) + math.log(12)))
    assert both.shared_variance**0.5 == pytest.approx(alone.shared_variance**0.5 - room / spreads, rel=0.2)
    limits = LimitsSpec(**NO_LIMITS, honest=honest)
    assert try_groups(later, limits).first is None
    for name, nats in most_evidence(later, limits).items():
        for s in (0.5, 1.0, 2.0, 3.0, 4.0):
            allowed = math.exp(-s) + 3 * math.sqrt(math.exp(-s) / len(nats))
            assert sum(value > s for value in nats) / len(nats) <= allowed, (name, s)


NO_LIMITS = dict.fromkeys(MIN_LIMITS, 1e9)


def test_what_experts_do_to_few_groups_rejects_none_that_deviates_half_as_far_again():
    """Rounding has a router choose others for one prompt in eighty, and all completions of its group are off."""

    def groups(count, *, seed, far):
        rng = random.Random(seed)
        shares = [far if at % 80 == 79 else rng.gauss(0, 0.05) for at in range(count)]
        return [[rollout(rng, shared=shared) for _ in range(ROLLOUTS)] for shared in shares]

    seen = [groups(80, seed=seed, far=1.0) for seed in (1, 2)]
    unseen = groups(240, seed=3, far=1.45)
    plain, routed = (
        rounded(fit_limits(*seen, false_rejections=1e-6, headroom=headroom)) for headroom in (1.0, ROUTED_HEADROOM)
    )
    assert try_groups(unseen, plain).rejected_groups > 0
    assert try_groups(unseen, routed).rejected_groups == 0
    assert try_groups(worker_groups(20, seed=4, worker=4.0), routed).rejected_groups == 20


def test_a_statistic_without_any_value_has_no_level():
    groups = [[bits([1.0, 0.0]) for _ in range(4)] for _ in range(4)]
    honest = levels(groups)
    assert honest.sketch is None
    assert honest.exponents is not None
    assert levels([[bits([])] * 4] * 4).exponents is None


@pytest.mark.parametrize(("groups", "warns"), [(127, True), (128, False)])
def test_an_operator_is_told_that_too_few_groups_were_fitted(groups, warns):
    """A run's limits never change: honest workers pay for what a short calibration did not see."""
    found = CalibrationResult(
        spec=RunSpec(name="t", environments=(EnvironmentSpec(name="arithmetic"),)),
        swarmproof="",
        policy="",
        verifier="torch",
        groups=groups,
        least_groups=128,
        largest={},
        honest=[],
        recorded=[],
        cheats=[],
        measured={},
    )
    assert [f"Of {groups} groups" in line and "Take 128 or more" in line for line in found.warnings] == [True] * warns


def test_a_level_needs_groups_to_compare():
    for workers in ([], [worker_groups(1, seed=1)], [worker_groups(5, seed=1), []]):
        with pytest.raises(ValueError, match="two groups"):
            levels(*workers)


def test_work_without_any_deviation_has_levels_that_bear_one():
    """In float32 every number is 0.0 on the machines at hand; elsewhere one may differ once."""
    limits = LimitsSpec(honest=levels([[bits([0.0] * 3) for _ in range(ROLLOUTS)] for _ in range(64)]))
    once = [[bits([0.0] * 3) for _ in range(ROLLOUTS - 1)] + [bits([0.0, 1.0, 0.0])]]
    assert try_groups(once, limits).first is None


def test_one_value_in_a_thousand_does_not_widen_a_level():
    groups = worker_groups(100, seed=7)
    before = levels(groups)
    rng = random.Random(8)
    wild = [[rollout(rng, scale=1000.0)], *groups]
    assert levels(wild).mantissa.largest < 1.5 * before.mantissa.largest


# -- limits of single values


def test_what_is_judged_alone_has_as_much_to_spare_as_the_largest_honest_value():
    near, far = worker_groups(40, seed=9), worker_groups(40, seed=10, scale=3.0)
    limits = fit_limits(near, far, false_rejections=1e-6)
    largest = max(value for group in far for one in group for value in one.mantissa_means)
    assert limits.mantissa_mean == pytest.approx(2 * largest)
    assert try_groups(far, limits).rejected_groups == 0


def test_limits_of_faultless_work_leave_room_for_another_machine():
    limits = fit_limits([[bits([0.0] * 30)] * 4] * 4, false_rejections=1e-6)
    assert {name: getattr(limits, name) for name in MIN_LIMITS} == MIN_LIMITS


def test_a_sketch_limit_stays_below_unrelated_states_while_honest_work_does():
    groups = worker_groups(40, seed=11)
    typical = max(one.figures(LimitsSpec()).sketch_distance for group in groups for one in group)
    assert 1.5 < typical < 2.0 < 2 * typical
    assert fit_limits(groups, false_rejections=1e-6).sketch_distance == max(3.0, 1.5 * typical)


def test_rare_margins_get_the_tail_that_honest_ones_have():
    """The largest of a few margins says little: the median of those above 0 says how long the tail is."""
    groups = [[bits([0.0] * 3) for _ in range(4)] for _ in range(20)]
    lost = Deviations([0.0], [0.0], [0.0], [], margins=[0.01] + [0.0] * 19, errors=[0.0] * 20)
    limits = fit_limits([*groups, [lost]], false_rejections=1e-6)
    assert limits.token_margin == pytest.approx(0.8)


def test_limits_that_mean_nothing_for_the_runs_proofs_are_left_alone():
    assert "sketch_distance" not in single_value_limits(ProofSpec(scheme="toploc/1"))
    assert not {
        name for name in single_value_limits(ProofSpec(scheme="sketch/1")) if name.startswith(("exponent", "mantissa"))
    }
    assert single_value_limits(ProofSpec(scheme="toploc/1+sketch/1")) == list(MIN_LIMITS)


# -- few digits


def test_rounding_narrows_nothing():
    limits = fit_limits(worker_groups(30, seed=12), worker_groups(30, seed=13, worker=0.4), false_rejections=1e-6)
    short = rounded(limits)
    for name in MIN_LIMITS:
        assert getattr(limits, name) <= getattr(short, name) <= 1.1 * getattr(limits, name), name
    for name in STATISTICS:
        level, rough = getattr(limits.honest, name), getattr(short.honest, name)
        assert rough.mean >= level.mean
        assert rough.variance >= level.variance
        assert rough.shared_variance >= level.shared_variance
        assert rough.largest - rough.mean >= (level.largest - level.mean) * (1 - 1e-9)
        assert rough.largest - rough.mean <= (level.largest - level.mean) * 1.002


@pytest.mark.parametrize(
    ("value", "up"), [(0.0, 0.0), (0.1, 0.1), (0.101, 0.11), (38.0, 38.0), (99.5, 100.0), (1e-18, 1e-18), (2e-4, 2e-4)]
)
def test_round_up(value, up):
    assert round_up(value, digits=2) == up
