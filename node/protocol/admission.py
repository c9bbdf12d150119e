"""Judgement of measured figures (docs/protocol.md, section 7).

Pure, so that an auditor who measures the same figures reaches the same verdict; measuring is in `node.verification`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from msgspec import Meta
from msgspec.structs import astuple

from node.protocol.evidence import STATISTICS, Drift, Totals, drift_limit, drifts, evidence_limit, evidences
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec
from shardcast.wire import MAX_INTEGER, Count, Wire


class Outcome(StrEnum):
    ADMITTED = "admitted"
    REJECTED = "rejected"
    INDETERMINATE = "indeterminate"


NOT_FINITE = 1e308
"""Replaces NaN and infinity, above every limit."""

_LIMITS = {
    "exponent_mismatches": (Reason.PROOF_MISMATCH, "exponent_mismatches"),
    "mantissa_mean": (Reason.PROOF_MISMATCH, "mantissa_mean"),
    "mantissa_median": (Reason.PROOF_MISMATCH, "mantissa_median"),
    "sketch_distance": (Reason.PROOF_MISMATCH, "sketch_distance"),
    "token_margin": (Reason.WRONG_TOKEN, "token_margin"),
    "margin_mean": (Reason.WRONG_TOKEN, "rollout_margin_mean"),
    "logprob_error": (Reason.WRONG_LOGPROB, "logprob_error"),
}
EVIDENCE, DRIFT, GAIN = "_evidence", "_drift", "_gain"
"""How the figures of what many values show together end: of a rollout or a group, of a node's slots, and of a group
that is compared with other weights.
"""

SUSPECTS = ("int8", "previous")
GAIN_LIMIT = 0.5
"""Half of the way from the policy to other weights: honest work goes none of it, theirs all of it."""

GAIN_ERRORS = 4.75
"""Standard errors by which a gain may be too high: one in a million of a normal distribution's are above."""


class Figures(Wire, frozen=True):
    """What one prefill measured for one rollout; the worst chunk or token where several count.

    `exponent_mismatches`, `mantissa_mean` and `mantissa_median` are the largest over the rollout's chunks
    (TOPLOC, arXiv 2501.16007). `token_margin` is the largest amount, in noised and temperature-scaled logits, by
    which a submitted token lost against the forced one, `margin_mean` its mean over tokens. `logprob_error` is the
    largest |submitted - recomputed|, in nats. `sketch_distance` is typical of the rollout's tokens, in steps of the
    sketch. The others are what the rollout's values show together, in nats (`node.protocol.evidence`). A figure of
    a scheme or of a level that the run does not have is 0.0.
    """

    exponent_mismatches: float
    mantissa_mean: float
    mantissa_median: float
    token_margin: float
    margin_mean: float
    logprob_error: float
    sketch_distance: float = 0.0
    exponents_evidence: float = 0.0
    mantissa_evidence: float = 0.0
    sketch_evidence: float = 0.0
    far_evidence: float = 0.0
    margin_evidence: float = 0.0
    logprob_evidence: float = 0.0


class Finding(Wire, frozen=True):
    """A check that a rollout failed, or that the group did (`row` None): what was measured against which limit."""

    reason: Reason
    row: Annotated[int, Meta(ge=0, le=MAX_INTEGER)] | None
    figure: str
    value: float
    limit: float

    @property
    def sentence(self) -> str:
        """The finding as an English sentence."""
        if self.figure.endswith(DRIFT):
            whose = "The node's slots"
        else:
            whose = "All rows together" if self.row is None else f"Row {self.row}"
        return f"{whose}: {self.figure} is {self.value:.6g}, the limit is {self.limit:.6g}."


class Verdict(Wire, frozen=True):
    """The decision about one submission: what a verifier reaches, storage keeps and the log's entry repeats.

    `figures` are the worst of each figure over the rows that were measured, `totals` what these sum up to: both None
    where a check that needs no model refused. `spot` is the only row that was measured of a group that is admitted
    without the others. `rewards`, one for each row, only where it is admitted. `tokens` of all completions together.
    """

    outcome: Outcome
    reason: Reason | None = None
    finding: Finding | None = None
    detail: str = ""
    figures: Figures | None = None
    totals: Totals | None = None
    rewards: tuple[float, ...] | None = None
    tokens: Count = 0
    spot: Count | None = None


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ; if all are equal, all advantages are zero (section 8.1)."""
    return bool(rewards) and min(rewards) != max(rewards)


def worst(figures: Sequence[Figures]) -> Figures:
    """Return the largest of each figure over a group: what the log records as a verdict's evidence."""
    return Figures(**{name: max(finite(getattr(f, name)) for f in figures) for name in Figures.__struct_fields__})


def limit_of(figure: str, limits: LimitsSpec) -> tuple[Reason, float]:
    """Return the reason and the limit of a figure; raises KeyError for an unknown one."""
    if figure in _LIMITS:
        reason, limit = _LIMITS[figure]
        value: float = getattr(limits, limit)
        return reason, value
    name, mark, kind = figure.rpartition("_")
    if mark + kind == GAIN and name in SUSPECTS:
        return Reason.PROOF_MISMATCH, GAIN_LIMIT
    return STATISTICS[name], {EVIDENCE: evidence_limit, DRIFT: drift_limit}[mark + kind](limits)


@lru_cache(maxsize=16)
def _limits_of_figures(limits: LimitsSpec) -> list[tuple[Reason, float]]:
    return [limit_of(name, limits) for name in Figures.__struct_fields__]


def judge_rows(rows: Mapping[int, Figures], *, limits: LimitsSpec) -> Finding | None:
    """Return the first failed check in the order of section 7; None if every row, by its number, is within limits.

    A figure that is not finite fails its check: doubt never passes. Raises ValueError for no figures at all,
    because nothing measured is not the same as nothing wrong.
    """
    if not rows:
        raise ValueError("nothing was measured")
    each = [astuple(rows[row]) for row in sorted(rows)]
    figures = zip(Figures.__struct_fields__, _limits_of_figures(limits), zip(*each, strict=True), strict=True)
    for name, (reason, limit), values in figures:
        if math.isfinite(sum(values)) and max(values) <= limit:  # then each of them is
            continue
        for row in sorted(rows):
            value = finite(getattr(rows[row], name))
            if value > limit:
                return Finding(reason=reason, row=row, figure=name, value=value, limit=limit)
    return None


def judge_group(totals: Totals, *, limits: LimitsSpec) -> Finding | None:
    """Return a finding for the first statistic of a group over its limit, or None."""
    return _judge_values(evidences(totals, limits=limits), suffix=EVIDENCE, limits=limits)


def judge_drift(drift: Drift, *, limits: LimitsSpec) -> Finding | None:
    """Return a finding for the first statistic of a node's drift over its limit, or None."""
    return _judge_values(drifts(drift), suffix=DRIFT, limits=limits)


def judge_gain(suspect: str, gain: float, *, limits: LimitsSpec) -> Finding | None:
    """Return a finding if a group goes too far towards the weights `suspect` (section 7.4)."""
    return _judge_values([(suspect, gain)], suffix=GAIN, limits=limits)


def _judge_values(values: Iterable[tuple[str, float]], *, suffix: str, limits: LimitsSpec) -> Finding | None:
    for name, value in values:
        reason, limit = limit_of(name + suffix, limits)
        if finite(value) > limit:
            return Finding(reason=reason, row=None, figure=name + suffix, value=finite(value), limit=limit)
    return None


def finite(value: float) -> float:
    """Return `value`, or NOT_FINITE in place of NaN and the infinities, which JSON does not have."""
    return value if math.isfinite(value) else NOT_FINITE
