"""Comparison of logged and derived verdicts, with tolerances for rounding between machines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from node.audit.contradictions import is_finding
from node.audit.report import AuditResult
from node.protocol.admission import DRIFT, EVIDENCE, GAIN, Figures, Finding, Outcome, Verdict, limit_of
from node.protocol.evidence import STATISTICS, Totals, evidences
from node.protocol.messages import VerdictEntry
from node.protocol.run import LimitsSpec, RunSpec
from node.verification.deviations import RowMeasured
from node.verification.judge import JudgedClaim, find_excess

BORDERLINE_FACTOR: Final = 1.25
"""A figure within this factor of its limit may be over it on one machine and not on another."""

TOTALS_APART: Final = 1.0
"""Maximum difference between machines of a group's mean, in standard deviations of one value."""

FAR_TOKENS_APART: Final = 2.0
"""Maximum difference between machines of the number of far tokens, of which a few decide."""

FAR_FACTOR: Final = 4.0
"""`BORDERLINE_FACTOR` of far tokens' evidence, where one token is many nats."""


def is_borderline(entry: VerdictEntry, derived: Verdict, *, limits: LimitsSpec) -> bool:
    """Return whether rounding alone explains that only one of two measurements is over limits.

    True if some figures are over in only one, and each of these is near its limit in both.
    """
    ours, theirs = _figures(derived.figures, derived.totals, limits), _figures(entry.figures, entry.totals, limits)
    disputed = [
        (key[1], ours[key], theirs[key], limit)
        for key in ours.keys() & theirs.keys()
        for _, limit in [limit_of(key[1], limits)]
        if (ours[key] > limit) != (theirs[key] > limit)
    ]
    return bool(disputed) and all(_near(figure, limit, *pair) for figure, *pair, limit in disputed)


def _figures(figures: Figures | None, totals: Totals | None, limits: LimitsSpec) -> dict[tuple[str, str], float]:
    """Return the worst row figures and the group's evidences, by scope and name; {} if nothing was measured."""
    if figures is None or totals is None:
        return {}
    rows = {("row", name): getattr(figures, name) for name in Figures.__struct_fields__}
    return rows | {("group", name + EVIDENCE): nats for name, nats in evidences(totals, limits=limits)}


def _near(figure: str, limit: float, *values: float) -> bool:
    factor = FAR_FACTOR if figure == f"far{EVIDENCE}" else BORDERLINE_FACTOR
    return all(limit / factor <= value <= limit * factor for value in values)


def compare(entry: VerdictEntry, judgement: JudgedClaim, *, spec: RunSpec) -> tuple[AuditResult, str]:
    """Compare a logged verdict with a derived one with all rows measured; return the result and a reason."""
    derived = judgement.verdict
    if derived.outcome is Outcome.INDETERMINATE:
        return AuditResult.UNAVAILABLE, f"This machine could not verify it: {derived.detail}"
    result, detail = _compare_decisions(entry, judgement, spec=spec)
    if result is AuditResult.DISAGREE:
        return result, detail
    if entry.tokens != derived.tokens:
        return AuditResult.DISAGREE, f"It has {derived.tokens} tokens, the log says {entry.tokens}."
    if entry.outcome is not Outcome.ADMITTED or derived.outcome is not Outcome.ADMITTED:
        return result, detail
    if not derived.rewards:
        ungraded = "Its rewards cannot be derived: their answers are the operator's."
        return AuditResult.UNGRADED if result is AuditResult.AGREE else result, f"{detail} {ungraded}".strip()
    return (result, detail) if entry.rewards == derived.rewards else (AuditResult.DISAGREE, "The rewards are others.")


def _compare_decisions(entry: VerdictEntry, judgement: JudgedClaim, *, spec: RunSpec) -> tuple[AuditResult, str]:
    if judgement.rows:
        if entry.finding is not None:
            return _compare_finding(entry.finding, entry, judgement, spec=spec)
        if entry.spot is not None:
            return _compare_spot(entry.spot, entry, judgement, limits=spec.limits)
    return _compare_outcomes(entry, judgement.verdict, spec=spec)


def _compare_outcomes(entry: VerdictEntry, derived: Verdict, *, spec: RunSpec) -> tuple[AuditResult, str]:
    if (entry.outcome, entry.reason) != (derived.outcome, derived.reason):
        admitted = entry.outcome is Outcome.ADMITTED
        if admitted and is_borderline(entry, derived, limits=spec.limits):
            return (
                AuditResult.INDETERMINATE,
                f"Derived {_said(derived)}, but so close to a limit that rounding decides.",
            )
        return AuditResult.DISAGREE, f"Derived {_said(derived)}. {derived.detail}"
    if (entry.finding is None) != (derived.finding is None):
        return AuditResult.DISAGREE, f"Derived {_said(derived)}, but only one of the two names the row."
    if entry.totals is not None and derived.totals is not None:
        return _compare_totals(entry.totals, derived.totals, limits=spec.limits)
    return AuditResult.AGREE, ""


def _compare_spot(
    spot: int, entry: VerdictEntry, judgement: JudgedClaim, *, limits: LimitsSpec
) -> tuple[AuditResult, str]:
    """Compare the measured row, then judge the others."""
    derived, row = judgement.verdict, judgement.rows.get(spot)
    if row is None or entry.figures is None or entry.totals is None:
        return AuditResult.DISAGREE, "What was measured was not logged, or the row does not exist."
    if find_excess({spot: row}, limits=limits) is not None:
        alone = Verdict(outcome=Outcome.REJECTED, figures=row.figures, totals=row.totals)
        if is_borderline(entry, alone, limits=limits):
            return AuditResult.INDETERMINATE, f"Row {spot} is so close to a limit that rounding decides."
        return AuditResult.DISAGREE, f"Row {spot} was said to be right. Derived {_said(derived)}. {derived.detail}"
    result, detail = _compare_totals(entry.totals, row.totals, limits=limits)
    if result is AuditResult.AGREE and derived.outcome is Outcome.REJECTED:
        return AuditResult.UNSEEN, f"Only row {spot} was measured, and is right. {derived.detail}"
    return result, detail


def _compare_finding(
    finding: Finding, entry: VerdictEntry, judgement: JudgedClaim, *, spec: RunSpec
) -> tuple[AuditResult, str]:
    """Compare a rejection's finding with this machine's measurement; any row over its limit may be named."""
    if (entry.outcome, entry.reason) != (Outcome.REJECTED, finding.reason) or not is_finding(finding, spec=spec):
        return AuditResult.DISAGREE, "What the log says was found is nothing that leads to its verdict."
    derived, rows = judgement.verdict, judgement.rows
    if derived.totals is None or entry.totals is None:
        return AuditResult.DISAGREE, "What was measured was not logged."
    if finding.figure.endswith(DRIFT):
        # That the node's slots add up to it follows from the log alone; here, whether this slot's share is true.
        if entry.spot is not None and entry.spot not in rows:
            return AuditResult.DISAGREE, "The row that was measured does not exist."
        totals = derived.totals if entry.spot is None else rows[entry.spot].totals
        return _compare_totals(entry.totals, totals, limits=spec.limits)
    if finding.figure.endswith(GAIN):
        return _compare_gain(finding, derived)
    return _compare_excess(finding, rows, derived.totals, limits=spec.limits)


def _compare_gain(finding: Finding, derived: Verdict) -> tuple[AuditResult, str]:
    """Compare a second look's gain; on this machine the group may be over another limit instead."""
    if derived.outcome is Outcome.REJECTED:
        return AuditResult.AGREE, ""
    detail = f"No {finding.figure} over {finding.limit:g} was derived, the log says {finding.value:.6g}"
    if finding.value <= finding.limit * BORDERLINE_FACTOR:
        return AuditResult.INDETERMINATE, f"{detail}, but so close to it that rounding decides."
    return AuditResult.DISAGREE, f"{detail}."


def _compare_excess(
    finding: Finding, rows: Mapping[int, RowMeasured], totals: Totals, *, limits: LimitsSpec
) -> tuple[AuditResult, str]:
    if finding.row is None:
        whose = "All rows together"
        value = dict(evidences(totals, limits=limits))[finding.figure.removesuffix(EVIDENCE)]
    else:
        whose = f"Row {finding.row}"
        value = getattr(rows[finding.row].figures, finding.figure)
    if value > finding.limit:
        return AuditResult.AGREE, ""
    detail = f"{whose}: derived a {finding.figure} of {value:.6g}, the limit is {finding.limit:.6g}"
    if _near(finding.figure, finding.limit, value, finding.value):
        return AuditResult.INDETERMINATE, f"{detail}, but so close to it that rounding decides."
    return AuditResult.DISAGREE, f"{detail}."


def _compare_totals(theirs: Totals, ours: Totals, *, limits: LimitsSpec) -> tuple[AuditResult, str]:
    """Compare a group's totals within the rounding tolerances.

    Drift is computed from these sums, so inflated ones could expel honest nodes.
    """
    for name in STATISTICS:
        level, own, logged = getattr(limits.honest, name), getattr(ours, name), getattr(theirs, name)
        if own.count != logged.count:
            return AuditResult.DISAGREE, f"{name}: {own.count} values were summed up, the log says {logged.count}."
        if level is None or own.count == 0:
            if logged.sum:
                return AuditResult.DISAGREE, f"{name}: the log has a sum of nothing."
            continue
        apart = abs(own.sum - logged.sum) / own.count / math.sqrt(level.variance)
        detail = f"{name}: the mean is {apart:.2g} standard deviations from what the log says"
        few = name == "far" and abs(own.sum - logged.sum) <= FAR_TOKENS_APART
        if apart > TOTALS_APART and not few:
            return AuditResult.DISAGREE, f"{detail}."
        if apart > TOTALS_APART / 4:
            return AuditResult.INDETERMINATE, f"{detail}, which rounding may explain."
    return AuditResult.AGREE, ""


def _said(verdict: Verdict) -> str:
    return verdict.outcome if verdict.reason is None else f"{verdict.outcome} as {verdict.reason}"
