"""Plain-language explanations of verdicts, from their log entries."""

from __future__ import annotations

from typing import Final

from coordinator.dashboard.formatting import name_of, number
from node.protocol.admission import DRIFT, Finding, Outcome
from node.protocol.messages import VerdictEntry
from node.protocol.run import RunSpec

GROUP_FIGURES: Final = {
    "exponent_mismatches": "largest number of exponent mismatches in a chunk",
    "mantissa_mean": "largest mean mantissa error of a chunk",
    "mantissa_median": "largest median mantissa error of a chunk",
    "token_margin": "largest margin of a token",
    "margin_mean": "mean margin of a completion",
    "logprob_error": "largest error of a log-probability",
    "sketch_distance": "typical distance from the sketches",
}
"""Descriptions of a group's figures."""


def headline(entry: VerdictEntry) -> str:
    """Summarise the decision in a few words."""
    again = "On a second look " if entry.recheck else ""
    verb = {
        Outcome.ADMITTED: "admitted",
        Outcome.REJECTED: "rejected",
        Outcome.INDETERMINATE: "not decided",
    }[entry.outcome]
    reason = f": {name_of(entry.reason)}" if entry.reason is not None else ""
    return f"{again}{verb}{reason}".capitalize() if not again else f"{again}{verb}{reason}"


def why(entry: VerdictEntry, spec: RunSpec) -> str:
    """Explain the verdict in plain words."""
    if entry.outcome is Outcome.ADMITTED:
        if entry.spot is not None:
            return (
                f"Every check that needs no model passed, and so did completion {entry.spot}, which the verifier "
                "measured. The standing of its node allows to leave the others for later."
            )
        return f"All {spec.sampling.group_size} completions were measured, and every figure is within its limit."
    words = "" if entry.reason is None else entry.reason.meaning
    if entry.finding is not None:
        return f"{words} {_finding_words(entry.finding)}"
    return words


def _finding_words(finding: Finding) -> str:
    whose = "All completions together" if finding.row is None else f"Completion {finding.row}"
    if finding.figure.endswith(DRIFT):
        whose = "The node's slots up to this one"
    what = GROUP_FIGURES.get(finding.figure, name_of(finding.figure))
    return f"{whose}: the {what} is {number(finding.value)}, and the limit is {number(finding.limit)}."
