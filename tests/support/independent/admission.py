"""Figures against limits, what many values show together, and a node's standing (section 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .messages import FIGURE_NAMES, STATISTICS

SHIFTS = (0.1, 1.0)
LIMIT_NAMES = {"margin_mean": "rollout_margin_mean"}
"""Limits that are named otherwise than their figure."""

REASONS = {
    "token_margin": "wrong_token",
    "margin_mean": "wrong_token",
    "margin": "wrong_token",
    "logprob_error": "wrong_logprob",
    "logprob": "wrong_logprob",
}
"""By figure or statistic; every other one is a proof_mismatch."""

FIGURE_ORDER = (
    "exponent_mismatches",
    "mantissa_mean",
    "mantissa_median",
    "token_margin",
    "margin_mean",
    "logprob_error",
    "sketch_distance",
    *(f"{name}_evidence" for name in STATISTICS),
)
"""In which figures are checked (7.2)."""


def close(a: float, b: float) -> bool:
    """Return whether two values differ by no more than logarithms do between machines (8.1, 6)."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def reason_of(figure: str) -> str:
    """Return the reason of a finding of this figure."""
    plain = figure.removesuffix("_evidence").removesuffix("_drift")
    return REASONS.get(figure, REASONS.get(plain, "proof_mismatch"))


def limit_of(figure: str, limits: dict[str, Any]) -> float:
    """Return the limit of a figure (7.2, 7.4)."""
    if figure.endswith("_evidence"):
        return -math.log(limits["false_rejections"])
    if figure.endswith("_drift"):
        return math.log(12 / limits["false_rejections"])
    if figure in ("int8_gain", "previous_gain"):
        return 0.5
    return float(limits[LIMIT_NAMES.get(figure, figure)])


def evidence(total: dict[str, Any], level: dict[str, Any] | None) -> float:
    """Return the evidence of a total, in nats (7.3)."""
    n, s = total["count"], total["sum"]
    if level is None or n == 0 or s <= n * level["mean"]:
        return 0.0
    b = level["largest"] - level["mean"]
    v = level["variance"] + n * level["shared_variance"]
    u = b * (s - n * level["mean"]) / (n * v)
    return n * v / b**2 * ((1 + u) * math.log1p(u) - u)


@dataclass
class Drift:
    """What a node's slots show together, of each statistic for both shifts (7.3)."""

    limits: dict[str, Any]
    numbers: dict[tuple[str, float], float] = field(default_factory=dict)

    def add(self, totals: dict[str, Any]) -> None:
        """Take the totals of the next slot."""
        most = 1.25 * limit_of("margin_drift", self.limits)
        for name in STATISTICS:
            level = self.limits["honest"][name]
            for shift in SHIFTS:
                before = max(self.numbers.get((name, shift), 0.0), 0.0)
                self.numbers[name, shift] = min(most, before + _gain(totals[name], level, shift))

    def of(self, name: str) -> float:
        """Return the drift of a statistic: the larger of its two numbers."""
        return max(self.numbers.get((name, shift), 0.0) for shift in SHIFTS)

    def findings(self) -> dict[str, float]:
        """Return the drifts over the limit, in the order in which they are judged."""
        over = {f"{name}_drift": self.of(name) for name in STATISTICS}
        return {figure: value for figure, value in over.items() if value > limit_of(figure, self.limits)}


def _gain(total: dict[str, Any], level: dict[str, Any] | None, shift: float) -> float:
    n, s = total["count"], total["sum"]
    if level is None or n == 0:
        return 0.0
    b = level["largest"] - level["mean"]
    v = level["variance"] + n * level["shared_variance"]
    u = shift * b / math.sqrt(v)
    return math.log1p(u) / b * (s - n * level["mean"]) - n * v / b**2 * (u - math.log1p(u))


def worst(figures: list[dict[str, float]]) -> dict[str, float]:
    """Return the worst of each figure over the rows."""
    return {name: max(row[name] for row in figures) for name in FIGURE_NAMES}


def first_finding(figures: list[dict[str, float]], limits: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first figure that is over its limit, over all rows from the lowest (7.2); None if none is."""
    for name in FIGURE_ORDER:
        for row, values in enumerate(figures):
            if values[name] > limit_of(name, limits):
                return {
                    "reason": reason_of(name),
                    "row": row,
                    "figure": name,
                    "value": values[name],
                    "limit": limit_of(name, limits),
                }
    return None


@dataclass
class Standing:
    """What a node's verdicts say of it (7.6)."""

    rules: dict[str, Any]
    verified: int = 0
    strikes: int = 0

    @property
    def banned(self) -> bool:
        """Whether it gets no more leases."""
        return self.strikes >= self.rules["ban_after"]

    @property
    def full_rate(self) -> float:
        """The probability with which its next slot is measured in full."""
        if self.verified < self.rules["probation"]:
            return 1.0
        return max(self.rules["full_rate_floor"], self.rules["probation"] / self.verified)

    def add(self, outcome: str, *, whole: bool) -> None:
        """Take the next verdict; `whole` where all rows were measured."""
        if outcome == "rejected":
            self.verified, self.strikes = 0, self.strikes + 1
        elif outcome == "admitted" and whole:
            self.verified += 1
            if self.verified == self.rules["probation"]:
                self.strikes = 0
