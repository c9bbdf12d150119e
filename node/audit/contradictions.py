"""Whether a logged verdict contradicts itself (docs/protocol.md, section 8.1, rule 5)."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from node.protocol.admission import DRIFT, EVIDENCE, GAIN, Figures, Finding, Outcome, judge_group, judge_rows, limit_of
from node.protocol.evidence import STATISTICS, Total, Totals
from node.protocol.messages import VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec, RunSpec

SAME: Final = 1e-9
"""Relative tolerance between two machines' logarithms, generous."""


def contradiction(entry: VerdictEntry, *, spec: RunSpec) -> str | None:
    """Describe how a verdict contradicts itself; None if it does not."""
    drifted = entry.finding is not None and entry.finding.figure.endswith(DRIFT)
    enough = not entry.recheck and (entry.outcome is Outcome.ADMITTED or drifted)
    if entry.spot is not None and (not enough or entry.spot >= spec.sampling.group_size):
        return f"Only row {entry.spot} was measured, which is not enough for this verdict."
    if entry.outcome is Outcome.ADMITTED:
        return _admission_contradiction(entry, spec=spec)
    if entry.reason is None or entry.rewards is not None:
        return "Not admitted, but without a reason or with rewards."
    if (entry.reason is Reason.VERIFIER_FAILED) != (entry.outcome is Outcome.INDETERMINATE):
        return f"Outcome {entry.outcome} for the reason {entry.reason}."
    if (entry.figures, entry.totals, entry.finding) != (None, None, None):
        return _finding_contradiction(entry, spec=spec)
    return None


def _finding_contradiction(entry: VerdictEntry, *, spec: RunSpec) -> str | None:
    """Describe how a finding contradicts figures or totals; None if it does not."""
    figures, totals, finding = entry.figures, entry.totals, entry.finding
    if figures is None or totals is None or finding is None:
        return "Figures or totals without a finding, or a finding without them."
    if finding.reason is not entry.reason or not is_finding(finding, spec=spec):
        return f"Rejected as {entry.reason}, which its finding does not show."
    if finding.row is not None and getattr(figures, finding.figure) < finding.value:
        return f"Its {finding.figure} of {finding.value:g} is more than the worst of its figures."
    if finding.row is None and finding.figure.endswith(EVIDENCE):
        together = judge_group(totals, limits=spec.limits)
        if together is None or not same_finding(together, finding):
            return f"Its {finding.figure} of {finding.value:g} is not what its totals show."
    return None


def is_possible(totals: Totals, *, limits: LimitsSpec) -> bool:
    """Return whether each sum is at most its count times the level's largest value."""
    for name in STATISTICS:
        level, seen = getattr(limits.honest, name), getattr(totals, name)
        if level is None:
            if seen != Total():
                return False
        elif seen.sum > seen.count * level.largest + SAME * max(1.0, seen.count * abs(level.largest)):
            return False
    return True


def is_finding(finding: Finding, *, spec: RunSpec) -> bool:
    """Return whether a finding is well-formed: valid row, figure, reason and limit, with the value above it."""
    if finding.row is None:
        if not finding.figure.endswith((EVIDENCE, DRIFT, GAIN)):
            return False
    elif finding.figure not in Figures.__struct_fields__ or not 0 <= finding.row < spec.sampling.group_size:
        return False
    try:
        reason, limit = limit_of(finding.figure, spec.limits)
    except KeyError:
        return False
    return (finding.reason, finding.limit) == (reason, limit) and finding.value > limit


def same_finding(ours: Finding, theirs: Finding) -> bool:
    """Return whether two findings are equal up to `SAME` in their value."""
    return msgspec.structs.replace(ours, value=theirs.value) == theirs and math.isclose(
        ours.value, theirs.value, rel_tol=SAME
    )


def _admission_contradiction(entry: VerdictEntry, *, spec: RunSpec) -> str | None:
    if entry.reason is not None or entry.finding is not None or entry.figures is None or entry.rewards is None:
        return "Admitted with a reason or a finding, or without figures or rewards."
    if entry.totals is None:
        return "Admitted without totals."
    finding = judge_rows({0: entry.figures}, limits=spec.limits) or judge_group(entry.totals, limits=spec.limits)
    if finding is not None:
        return f"Admitted, but its {finding.figure} of {finding.value:g} is over the limit of {finding.limit:g}."
    if len(entry.rewards) != spec.sampling.group_size or not all(0 <= reward <= 1 for reward in entry.rewards):
        return "Its rewards are not one for each row, from 0 to 1."
    return None
