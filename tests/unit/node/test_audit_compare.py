"""How an auditor compares a logged verdict with its own: what convicts, what rounding explains, and what it lets be."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

import pytest
from logged import (
    HONEST_TOTALS,
    SHIFTED,
    SPEC,
    ZERO,
    admitted,
    drifting,
    rejected,
    replace,
    row_of,
    together,
    unmeasured,
)
from rich.console import Console

from node.audit.compare import BORDERLINE_FACTOR, TOTALS_APART, compare, is_borderline
from node.audit.log import LoggedVerdict
from node.audit.report import AuditResult, Checked, Report, show
from node.protocol.admission import Figures, Finding, Outcome, Verdict, judge_rows, worst
from node.protocol.evidence import Total, Totals
from node.protocol.messages import VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec
from node.verification.judge import JudgedClaim

CHEAP = unmeasured(5, reason=Reason.MALFORMED_SUBMISSION, tokens=0)
LIMITS = LimitsSpec(token_margin=1.0, mantissa_mean=10.0, honest=SPEC.limits.honest)
JUDGED = replace(SPEC, limits=LIMITS)


def verdict_of(entry: VerdictEntry, rows: Sequence[Figures] = (), **changes: object) -> JudgedClaim:
    """What an auditor derives that agrees with `entry`, but for `changes`, from these rows."""
    return JudgedClaim(verdict=replace(entry.verdict, **changes), rows=dict(enumerate(map(row_of, rows))))


def measured(**figures: float) -> Figures:
    return replace(ZERO, **figures)


def summed(each: float, *, count: int = 100) -> Totals:
    return Totals(margin=Total(count=count, sum=count * each))


def rejection(figures: Figures, reason: Reason) -> JudgedClaim:
    return derived_from(figures, figures, reason=reason)


def derived_from(*rows: Figures, reason: Reason = Reason.WRONG_TOKEN) -> JudgedClaim:
    """A rejection of a group with these figures."""
    verdict = Verdict(
        outcome=Outcome.REJECTED,
        reason=reason,
        finding=judge_rows(dict(enumerate(rows)), limits=LIMITS),
        figures=worst(rows),
        totals=HONEST_TOTALS,
        tokens=100,
    )
    return JudgedClaim(verdict=verdict, rows=dict(enumerate(map(row_of, rows))))


def found(row: int, figure: str, value: float) -> VerdictEntry:
    """A logged rejection for this."""
    (reason, limit) = (Reason.WRONG_TOKEN, 1.0) if figure == "token_margin" else (Reason.PROOF_MISMATCH, 10.0)
    finding = Finding(reason=reason, row=row, figure=figure, value=value, limit=limit)
    return rejected(1, reason=reason, finding=finding, figures=measured(**{figure: value}))


def test_rewards_that_nobody_here_can_derive_are_neither_right_nor_a_lie() -> None:
    """An auditor without the operator's answers must not vouch for rewards, nor accuse anybody of them."""
    blind = verdict_of(admitted(1), rewards=())
    assert compare(admitted(1), blind, spec=JUDGED)[0] == "ungraded"
    assert compare(admitted(1), verdict_of(admitted(1), rewards=(), tokens=9), spec=JUDGED)[0] == "disagree"
    unsure = compare(admitted(1, totals=summed(0.0045)), verdict_of(admitted(1), rewards=()), spec=JUDGED)
    assert unsure[0] == "indeterminate"
    assert "rewards cannot be derived" in unsure[1]
    assert compare(admitted(1), rejection(measured(token_margin=9.0), Reason.WRONG_TOKEN), spec=JUDGED)[0] == "disagree"


def test_ungraded_verdicts_have_a_count_of_their_own_and_are_said_at_the_end() -> None:
    entry = LoggedVerdict(1, admitted(1))
    report = Report(
        url="u", run_id="r", checked=[Checked(entry, AuditResult.UNGRADED), Checked(entry, AuditResult.AGREE)]
    )
    said = Console(file=StringIO(), width=200)
    show(report, said)
    assert (report.count(AuditResult.AGREE), report.count(AuditResult.UNGRADED), report.exit_code) == (1, 1, 0)
    assert "1 verdicts derived again. 1 are right as far as can be told without the answers" in said.file.getvalue()


def test_the_same_decision_agrees_whatever_its_figures() -> None:
    assert compare(admitted(1), verdict_of(admitted(1), figures=measured(token_margin=0.5)), spec=JUDGED)[0] == "agree"
    assert compare(CHEAP, verdict_of(CHEAP), spec=JUDGED)[0] == "agree"


@pytest.mark.parametrize(
    "changes",
    [{"rewards": (1.0, 1.0)}, {"rewards": (1.0, 0.0)}, {"tokens": 101}],
)
def test_other_rewards_or_tokens_disagree(changes: dict) -> None:
    assert compare(admitted(1), verdict_of(admitted(1), **changes), spec=JUDGED)[0] is AuditResult.DISAGREE


def test_junk_that_was_admitted_disagrees() -> None:
    derived = rejection(measured(token_margin=9.0), Reason.WRONG_TOKEN)
    assert compare(admitted(1), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_junk_admitted_under_invented_figures_near_the_limit_still_disagrees() -> None:
    """An operator cannot hide behind rounding: what counts is this machine's figure too."""
    entry = admitted(1, figures=measured(token_margin=0.99))
    assert compare(entry, rejection(measured(token_margin=9.0), Reason.WRONG_TOKEN), spec=JUDGED)[0] == "disagree"


def test_an_honest_worker_rejected_under_invented_figures_still_disagrees() -> None:
    figures = measured(token_margin=0.0001)
    derived = verdict_of(admitted(1), figures=figures, rows=[figures, figures])
    assert compare(found(1, "token_margin", 1.1), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_a_finding_may_be_any_of_those_that_are_there() -> None:
    """Which row is measured first is the verifier's to draw: an auditor who finds more must not call it a liar."""
    derived = derived_from(measured(mantissa_mean=99.0), measured(token_margin=9.0, mantissa_mean=40.0))
    for row, figure, value in ((0, "mantissa_mean", 80.0), (1, "token_margin", 7.0), (1, "mantissa_mean", 41.0)):
        assert compare(found(row, figure, value), derived, spec=JUDGED)[0] is AuditResult.AGREE
    other = replace(found(0, "mantissa_mean", 80.0), tokens=101)
    assert compare(other, derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_a_finding_invented_for_an_honest_row_beside_a_bad_one_disagrees() -> None:
    """The verdict would be right, but what it says of that row is a lie."""
    derived = derived_from(measured(mantissa_mean=99.0, token_margin=0.1), measured(token_margin=9.0))
    assert compare(found(0, "token_margin", 9.0), derived, spec=JUDGED)[0] is AuditResult.DISAGREE
    assert compare(found(1, "mantissa_mean", 99.0), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_a_finding_close_to_its_limit_is_nobodys_fault_whatever_another_row_shows() -> None:
    derived = derived_from(measured(mantissa_mean=99.0, token_margin=0.9), ZERO)
    assert compare(found(0, "token_margin", 1.1), derived, spec=JUDGED)[0] is AuditResult.INDETERMINATE
    assert compare(found(0, "token_margin", 1.3), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


@pytest.mark.parametrize(
    "change",
    [{"row": 2}, {"row": -1}, {"figure": "figures"}, {"limit": 0.5}, {"value": 1.0}, {"reason": Reason.WRONG_LOGPROB}],
)
def test_a_finding_that_no_verifier_makes_convicts_and_does_not_stop_the_audit(change: dict) -> None:
    derived = derived_from(measured(token_margin=9.0), measured(token_margin=9.0))
    entry = found(0, "token_margin", 9.0)
    assert compare(entry, derived, spec=JUDGED)[0] is AuditResult.AGREE
    assert compare(replace(entry, finding=replace(entry.finding, **change)), derived, spec=JUDGED)[0] == "disagree"


def test_a_rejection_by_measurement_names_what_was_found() -> None:
    derived = derived_from(measured(token_margin=9.0), ZERO)
    assert compare(unmeasured(1), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


@pytest.mark.parametrize(("ours", "theirs"), [(0.81, 1.24), (1.24, 0.81), (1.01, 1.0), (1.0, 1.01)])
def test_figures_on_both_sides_of_a_limit_are_nobodys_fault(ours: float, theirs: float) -> None:
    figures = measured(token_margin=ours), measured(token_margin=theirs)
    entry = found(1, "token_margin", theirs) if theirs > 1 else admitted(1, figures=figures[1])
    rows = [ZERO, figures[0]]
    admission = verdict_of(admitted(1), figures=figures[0], rows=rows)
    derived = rejection(figures[0], Reason.WRONG_TOKEN) if ours > 1 else admission
    assert is_borderline(entry, derived.verdict, limits=LIMITS)
    assert compare(entry, derived, spec=JUDGED)[0] is AuditResult.INDETERMINATE


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"token_margin": 0.79}, {"token_margin": 1.01}),
        ({"token_margin": 1.26}, {"token_margin": 0.99}),
        ({"token_margin": 0.9}, {"token_margin": 0.9}),
        ({"mantissa_mean": 10.1, "token_margin": 9.0}, {"mantissa_mean": 1.0, "token_margin": 9.0}),
    ],
)
def test_what_rounding_does_not_explain_is_not_borderline(ours: dict, theirs: dict) -> None:
    assert not borders(measured(**ours), measured(**theirs))


def borders(ours: Figures, theirs: Figures, *, limits: LimitsSpec = LIMITS) -> bool:
    return is_borderline(admitted(1, figures=theirs), verdict_of(admitted(1), figures=ours).verdict, limits=limits)


def test_one_figure_near_its_limit_does_not_excuse_another_that_is_far_over() -> None:
    ours = measured(mantissa_mean=10.1, token_margin=1.1)
    assert borders(ours, measured(mantissa_mean=9.9, token_margin=0.9))
    assert not borders(ours, measured(mantissa_mean=9.9, token_margin=0.1))


def test_a_limit_of_zero_has_no_border() -> None:
    assert not borders(ZERO, measured(token_margin=1e-9), limits=LimitsSpec(token_margin=0.0))


def test_what_all_rows_show_together_borders_likewise() -> None:
    """13.8 nats are the limit; 0.0095, 0.0105 and 0.012 a token are 12.8, 15.2 and 18.9."""
    near, over, far = (summed(each) for each in (0.0095, 0.0105, 0.012))
    derived = verdict_of(admitted(1), totals=over, outcome=Outcome.REJECTED, reason=Reason.WRONG_TOKEN).verdict
    assert is_borderline(admitted(1, totals=near), derived, limits=LIMITS)
    assert not is_borderline(admitted(1, totals=HONEST_TOTALS), derived, limits=LIMITS)
    derived = replace(derived, totals=far)
    assert not is_borderline(admitted(1, totals=near), derived, limits=LIMITS)


def test_a_check_without_a_model_has_no_border() -> None:
    unseen = verdict_of(admitted(1), figures=None, totals=None).verdict
    assert not is_borderline(admitted(1), unseen, limits=LIMITS)
    derived = JudgedClaim(verdict=Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_SEED, tokens=9))
    assert compare(admitted(1), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_this_machines_failure_is_no_disagreement() -> None:
    derived = JudgedClaim(
        verdict=Verdict(outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED, detail="MemoryError.")
    )
    assert compare(admitted(1), derived, spec=JUDGED)[0] is AuditResult.UNAVAILABLE


# -- totals: a run judges its nodes by them, so what they say of a slot must be true


@pytest.mark.parametrize(
    ("theirs", "result"),
    [
        (0.001, AuditResult.AGREE),
        (0.0034, AuditResult.AGREE),
        (0.0045, AuditResult.INDETERMINATE),
        (0.0115, AuditResult.DISAGREE),
        (-0.01, AuditResult.DISAGREE),
    ],
)
def test_totals_are_compared_in_standard_deviations_of_one_value(theirs: float, result: AuditResult) -> None:
    """A level of 0.001 with a standard deviation of 0.01: a quarter of one is rounding, a whole one is a lie."""
    derived = verdict_of(admitted(1), totals=summed(0.001))
    assert compare(admitted(1, totals=summed(theirs)), derived, spec=JUDGED)[0] is result


@pytest.mark.parametrize("theirs", [summed(0.001, count=99), summed(0.001, count=0), Totals()])
def test_totals_of_fewer_values_disagree(theirs: Totals) -> None:
    """Leaving out the tokens that show a friend's cheating would be the simplest way to hide it."""
    derived = verdict_of(admitted(1), totals=summed(0.001))
    assert compare(admitted(1, totals=theirs), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_a_sum_of_nothing_disagrees() -> None:
    derived = verdict_of(admitted(1), totals=Totals())
    entry = admitted(1, totals=Totals(sketch=Total(count=0, sum=5.0)))
    assert compare(entry, derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_totals_that_rounding_may_explain_do_not_hide_other_rewards() -> None:
    derived = verdict_of(admitted(1), totals=summed(0.001))
    entry = admitted(1, totals=summed(0.0045), rewards=(1.0, 1.0))
    assert compare(entry, derived, spec=JUDGED)[0] is AuditResult.DISAGREE
    assert compare(replace(entry, rewards=(0.0, 1.0), tokens=7), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


@pytest.mark.parametrize(
    ("ours", "result"),
    [(0.0105, AuditResult.AGREE), (0.0095, AuditResult.INDETERMINATE), (0.001, AuditResult.DISAGREE)],
)
def test_a_finding_of_all_rows_must_be_there_here_too(ours: float, result: AuditResult) -> None:
    entry = together(summed(0.0105))
    derived = verdict_of(admitted(1), totals=summed(ours), rows=[ZERO, ZERO])
    assert compare(entry, derived, spec=JUDGED)[0] is result


@pytest.mark.parametrize(("ours", "result"), [(0.0035, AuditResult.AGREE), (-0.0075, AuditResult.DISAGREE)])
def test_of_a_drift_a_slots_own_share_must_be_true(ours: float, result: AuditResult) -> None:
    slots = drifting(*[SHIFTED] * 40)
    entry = next(entry for entry in slots if entry.outcome is Outcome.REJECTED)
    derived = verdict_of(admitted(1), totals=summed(ours), rows=[ZERO, ZERO])
    assert compare(entry, derived, spec=JUDGED)[0] is result


def test_the_documented_factor_is_the_one_used() -> None:
    assert (BORDERLINE_FACTOR, TOTALS_APART) == (1.25, 1.0)


# -- one row was measured: what the log says of it must be true, and of the others it says nothing


def partly(*rows: Figures, outcome: Outcome, rewards: tuple[float, ...] | None = (0.0, 1.0)) -> JudgedClaim:
    """An auditor's derivation of a group with these rows."""
    finding = judge_rows(dict(enumerate(rows)), limits=LIMITS)
    verdict = Verdict(
        outcome=outcome,
        reason=None if finding is None else finding.reason,
        finding=finding,
        figures=worst(rows),
        totals=HONEST_TOTALS,
        rewards=None if finding is not None else rewards,
        tokens=100,
    )
    return JudgedClaim(verdict=verdict, rows=dict(enumerate(map(row_of, rows))))


def test_a_row_that_is_right_agrees_though_only_it_was_measured() -> None:
    derived = partly(measured(), measured(token_margin=0.5), outcome=Outcome.ADMITTED)
    assert compare(admitted(1, spot=0), derived, spec=JUDGED)[0] is AuditResult.AGREE


def test_another_row_that_is_wrong_was_unseen_and_is_nobodys_lie() -> None:
    derived = partly(measured(), measured(token_margin=5.0), outcome=Outcome.REJECTED)
    result, detail = compare(admitted(1, spot=0), derived, spec=JUDGED)
    assert result is AuditResult.UNSEEN
    assert "row 0" in detail


def test_a_row_that_was_said_to_be_right_and_is_not_is_a_disagreement() -> None:
    derived = partly(measured(token_margin=5.0), measured(), outcome=Outcome.REJECTED)
    assert compare(admitted(1, spot=0), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_a_measured_row_next_to_its_limit_is_indeterminate() -> None:
    derived = partly(measured(token_margin=1.1), measured(), outcome=Outcome.REJECTED)
    entry = admitted(1, spot=0, figures=measured(token_margin=0.95))
    assert compare(entry, derived, spec=JUDGED)[0] is AuditResult.INDETERMINATE


def test_other_rewards_are_a_disagreement_whatever_was_measured() -> None:
    derived = partly(measured(), measured(), outcome=Outcome.ADMITTED, rewards=(1.0, 1.0))
    assert compare(admitted(1, spot=0), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_totals_of_more_rows_than_the_one_are_a_disagreement() -> None:
    derived = partly(measured(), measured(), outcome=Outcome.ADMITTED)
    entry = admitted(1, spot=0, totals=Totals(margin=Total(count=200, sum=0.2)))
    assert compare(entry, derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_a_row_that_does_not_exist_was_not_measured() -> None:
    derived = partly(measured(), measured(), outcome=Outcome.ADMITTED)
    assert compare(admitted(1, spot=7), derived, spec=JUDGED)[0] is AuditResult.DISAGREE


def test_a_check_without_a_model_was_made_of_every_row() -> None:
    derived = JudgedClaim(verdict=Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_SEED, tokens=100))
    assert compare(admitted(1, spot=0), derived, spec=JUDGED)[0] is AuditResult.DISAGREE
