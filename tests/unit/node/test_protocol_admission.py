"""From figures to verdicts: what an honest worker is judged by, and what doubt does."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from locations import VECTORS_FOLDER

from node.protocol.admission import (
    DRIFT,
    EVIDENCE,
    NOT_FINITE,
    Figures,
    Finding,
    judge_drift,
    judge_group,
    judge_rows,
    limit_of,
    worst,
)
from node.protocol.evidence import STATISTICS, Drift, Total, Totals, add, drift_limit, evidences
from node.protocol.reasons import Reason
from node.protocol.run import HonestSpec, LevelSpec, LimitsSpec
from shardcast.wire import decode, encode

VECTORS = json.loads((VECTORS_FOLDER / "protocol" / "admission.json").read_text())
LIMITS = LimitsSpec()
NATS = -math.log(LIMITS.false_rejections)
AT_THE_LIMIT = Figures(
    exponent_mismatches=LIMITS.exponent_mismatches,
    mantissa_mean=LIMITS.mantissa_mean,
    mantissa_median=LIMITS.mantissa_median,
    token_margin=LIMITS.token_margin,
    margin_mean=LIMITS.rollout_margin_mean,
    logprob_error=LIMITS.logprob_error,
    sketch_distance=LIMITS.sketch_distance,
    exponents_evidence=NATS,
    mantissa_evidence=NATS,
    sketch_evidence=NATS,
    far_evidence=NATS,
    margin_evidence=NATS,
    logprob_evidence=NATS,
)
REASONS = {
    "exponent_mismatches": Reason.PROOF_MISMATCH,
    "mantissa_mean": Reason.PROOF_MISMATCH,
    "mantissa_median": Reason.PROOF_MISMATCH,
    "token_margin": Reason.WRONG_TOKEN,
    "margin_mean": Reason.WRONG_TOKEN,
    "logprob_error": Reason.WRONG_LOGPROB,
    "sketch_distance": Reason.PROOF_MISMATCH,
    "exponents_evidence": Reason.PROOF_MISMATCH,
    "mantissa_evidence": Reason.PROOF_MISMATCH,
    "sketch_evidence": Reason.PROOF_MISMATCH,
    "far_evidence": Reason.PROOF_MISMATCH,
    "margin_evidence": Reason.WRONG_TOKEN,
    "logprob_evidence": Reason.WRONG_LOGPROB,
}
LEVEL = LevelSpec(mean=0.0, variance=1e-4, largest=0.5)
SUMMED = LimitsSpec(honest=HonestSpec(margin=LEVEL, logprob=LEVEL))


def with_figure(name: str, value: float) -> Figures:
    return msgspec.structs.replace(AT_THE_LIMIT, **{name: value})


def test_a_figure_equal_to_its_limit_passes() -> None:
    assert judge_rows({0: AT_THE_LIMIT, 1: AT_THE_LIMIT}, limits=LIMITS) is None


def test_every_figure_has_a_limit() -> None:
    assert list(REASONS) == list(Figures.__struct_fields__)
    for name, reason in REASONS.items():
        assert limit_of(name, LIMITS) == (reason, getattr(AT_THE_LIMIT, name))
    for name in STATISTICS:
        reason, limit = limit_of(name + DRIFT, LIMITS)
        assert (reason, limit) == (REASONS[name + EVIDENCE], pytest.approx(NATS + math.log(12)))


@pytest.mark.parametrize(
    "name", ["", "_", "margin", "_evidence", "margin_drifts", "token_drift", "evidence", "__class__"]
)
def test_what_is_no_figure_has_no_limit(name: str) -> None:
    """An operator who rejects for a made-up figure must not find a limit for it."""
    with pytest.raises(KeyError):
        limit_of(name, LIMITS)


@pytest.mark.parametrize("name", REASONS)
def test_one_step_above_a_limit_is_rejected_with_its_evidence(name: str) -> None:
    limit = getattr(AT_THE_LIMIT, name)
    value = math.nextafter(limit, math.inf)
    found = judge_rows({0: AT_THE_LIMIT, 1: with_figure(name, value)}, limits=LIMITS)
    assert found == Finding(reason=REASONS[name], row=1, figure=name, value=value, limit=limit)


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_a_number_never_passes(name: str, value: float) -> None:
    """NaN activations: every comparison with NaN is false, so `value > limit` alone would admit them."""
    found = judge_rows({0: with_figure(name, value)}, limits=LIMITS)
    assert found is not None
    assert (found.reason, found.figure, found.value) == (REASONS[name], name, NOT_FINITE)
    assert decode(Finding, encode(found), max_bytes=1000) == found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_log_never_hides_a_figure_that_is_not_a_number(value: float) -> None:
    rows = [AT_THE_LIMIT, with_figure("token_margin", value), AT_THE_LIMIT]
    for order in (rows, rows[::-1], rows[1:]):
        shown = worst(order)
        assert shown.token_margin == NOT_FINITE
        assert decode(Figures, encode(shown), max_bytes=1000) == shown


def test_nothing_measured_is_not_nothing_wrong() -> None:
    """`all([])` is true: a verifier that measured no rollout must not admit the group."""
    with pytest.raises(ValueError, match="nothing was measured"):
        judge_rows({}, limits=LIMITS)


def test_checks_go_figure_by_figure_and_then_row_by_row() -> None:
    """Two auditors must name the same finding for a group that fails several checks."""
    names = list(REASONS)
    for earlier, later in pairwise(names):
        found = judge_rows({0: with_figure(later, 1e9), 1: with_figure(earlier, 1e9)}, limits=LIMITS)
        assert found is not None
        assert (found.figure, found.row) == (earlier, 1)
    rows = [AT_THE_LIMIT, with_figure("logprob_error", 7.0), with_figure("logprob_error", 9.0)]
    both = judge_rows(dict(enumerate(rows)), limits=LIMITS)
    assert both is not None
    assert (both.row, both.value) == (1, 7.0)


@pytest.mark.parametrize("vector", VECTORS["groups"], ids=lambda v: (v["finding"] or {}).get("figure", "admitted"))
def test_verdicts_are_the_published(vector: dict) -> None:
    limits = msgspec.convert(VECTORS["limits"], LimitsSpec)
    figures = msgspec.convert(vector["figures"], list[Figures])
    assert msgspec.to_builtins(judge_rows(dict(enumerate(figures)), limits=limits)) == vector["finding"]
    assert msgspec.to_builtins(worst(figures)) == vector["worst"]


def margins(count: int, sum_: float) -> Totals:
    return Totals(margin=Total(count=count, sum=sum_))


def test_a_group_is_judged_by_what_its_rows_show_together() -> None:
    """Four rows, each within its limit, of a worker that prefers the runner-up a little in each."""
    row = margins(40, 0.6)
    (nats,) = (value for name, value in evidences(row, limits=SUMMED) if name == "margin")
    assert NATS / 4 < nats < NATS
    assert judge_group(row, limits=SUMMED) is None
    found = judge_group(add([row] * 4), limits=SUMMED)
    assert found == Finding(
        reason=Reason.WRONG_TOKEN, row=None, figure="margin_evidence", value=pytest.approx(4 * nats), limit=NATS
    )
    assert decode(Finding, encode(found), max_bytes=1000) == found


def test_of_several_statistics_the_first_in_the_order_is_named() -> None:
    both = Totals(margin=Total(count=100, sum=9.0), logprob=Total(count=100, sum=40.0))
    found = judge_group(both, limits=SUMMED)
    assert found is not None
    assert found.figure == "margin_evidence"
    for drift in (Drift(margin=100.0, logprob=300.0), Drift(margin=1.0, margin_fast=100.0, logprob=300.0)):
        drifted = judge_drift(drift, limits=SUMMED)
        assert drifted is not None
        assert (drifted.figure, drifted.row, drifted.value) == ("margin_drift", None, 100.0)


def test_a_drift_at_its_limit_passes_and_one_step_above_does_not() -> None:
    limit = drift_limit(SUMMED)
    assert judge_drift(Drift(sketch=limit, sketch_fast=limit), limits=SUMMED) is None
    assert judge_drift(Drift(sketch=-1e300), limits=SUMMED) is None
    above = math.nextafter(limit, math.inf)
    assert judge_drift(Drift(sketch=above), limits=SUMMED) == Finding(
        reason=Reason.PROOF_MISMATCH, row=None, figure="sketch_drift", value=above, limit=limit
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sum_that_is_not_a_number_never_passes(value: float) -> None:
    for found in (
        judge_group(margins(10, value), limits=SUMMED),
        judge_group(margins(10, 1e308), limits=SUMMED),
        judge_drift(Drift(margin=value), limits=SUMMED),
    ):
        assert found is not None
        assert found.value >= 1e300
        assert decode(Finding, encode(found), max_bytes=1000) == found


FIGURES = st.builds(Figures, **{name: st.floats(0, 100) for name in REASONS})


@given(st.lists(FIGURES, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_a_group_passes_exactly_if_its_worst_figures_do(rows: list[Figures]) -> None:
    assert (judge_rows(dict(enumerate(rows)), limits=LIMITS) is None) == (
        judge_rows({0: worst(rows)}, limits=LIMITS) is None
    )
