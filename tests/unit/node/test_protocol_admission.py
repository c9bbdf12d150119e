"""From figures to verdicts: what an honest worker is judged by, and what doubt does."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.protocol.admission import NOT_FINITE, Figures, Finding, judge, worst
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec
from shardcast.wire import decode, encode

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "protocol" / "admission.json").read_text())
LIMITS = LimitsSpec()
AT_THE_LIMIT = Figures(
    exponent_mismatches=LIMITS.exponent_mismatches,
    mantissa_mean=LIMITS.mantissa_mean,
    mantissa_median=LIMITS.mantissa_median,
    token_margin=LIMITS.token_margin,
    margin_mean=LIMITS.rollout_margin_mean,
    logprob_error=LIMITS.logprob_error,
)
REASONS = {
    "exponent_mismatches": Reason.PROOF_MISMATCH,
    "mantissa_mean": Reason.PROOF_MISMATCH,
    "mantissa_median": Reason.PROOF_MISMATCH,
    "token_margin": Reason.WRONG_TOKEN,
    "margin_mean": Reason.WRONG_TOKEN,
    "logprob_error": Reason.WRONG_LOGPROB,
}


def with_figure(name: str, value: float) -> Figures:
    return msgspec.structs.replace(AT_THE_LIMIT, **{name: value})


def test_a_figure_equal_to_its_limit_passes() -> None:
    assert judge([AT_THE_LIMIT, AT_THE_LIMIT], limits=LIMITS) is None


def test_every_figure_has_a_limit() -> None:
    assert set(REASONS) == set(Figures.__struct_fields__)


@pytest.mark.parametrize("name", REASONS)
def test_one_step_above_a_limit_is_rejected_with_its_evidence(name: str) -> None:
    limit = getattr(AT_THE_LIMIT, name)
    value = math.nextafter(limit, math.inf)
    found = judge([AT_THE_LIMIT, with_figure(name, value)], limits=LIMITS)
    assert found == Finding(reason=REASONS[name], row=1, figure=name, value=value, limit=limit)


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_a_number_never_passes(name: str, value: float) -> None:
    """NaN activations: every comparison with NaN is false, so `value > limit` alone would admit them."""
    found = judge([with_figure(name, value)], limits=LIMITS)
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
        judge([], limits=LIMITS)


def test_checks_go_figure_by_figure_and_then_row_by_row() -> None:
    """Two auditors must name the same finding for a group that fails several checks."""
    names = list(REASONS)
    for earlier, later in pairwise(names):
        found = judge([with_figure(later, 1e9), with_figure(earlier, 1e9)], limits=LIMITS)
        assert found is not None
        assert (found.figure, found.row) == (earlier, 1)
    both = judge([AT_THE_LIMIT, with_figure("logprob_error", 7.0), with_figure("logprob_error", 9.0)], limits=LIMITS)
    assert both is not None
    assert (both.row, both.value) == (1, 7.0)


@pytest.mark.parametrize("vector", VECTORS["groups"], ids=lambda v: (v["finding"] or {}).get("figure", "admitted"))
def test_verdicts_are_the_published(vector: dict) -> None:
    limits = msgspec.convert(VECTORS["limits"], LimitsSpec)
    figures = msgspec.convert(vector["figures"], list[Figures])
    assert msgspec.to_builtins(judge(figures, limits=limits)) == vector["finding"]
    assert msgspec.to_builtins(worst(figures)) == vector["worst"]


FIGURES = st.builds(Figures, **{name: st.floats(0, 100) for name in REASONS})


@given(st.lists(FIGURES, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_a_group_passes_exactly_if_its_worst_figures_do(rows: list[Figures]) -> None:
    assert (judge(rows, limits=LIMITS) is None) == (judge([worst(rows)], limits=LIMITS) is None)
