"""calibration.png: distributions of honest work and of cheats, with the limits between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coordinator.calibration.fit import Group
from coordinator.calibration.result import CalibrationResult
from node.protocol.evidence import add, evidence, evidence_limit
from node.protocol.run import LimitsSpec

HONEST, CHEAT, LIMIT = "#2a6f97", "#c1553b", "#222222"
_ALONE = {
    "exponents": ("exponent_mismatches", "exponent_mismatches", "exponent mismatches of the worst chunk"),
    "mantissa": ("mantissa_mean", "mantissa_mean", "mean mantissa error of the worst chunk"),
    "sketch": ("sketch_distance", "sketch_distance", "typical sketch distance, in steps"),
    "margin": ("token_margin", "token_margin", "largest sampling margin"),
    "logprob": ("logprob_error", "logprob_error", "largest |logprob error|, in nats"),
}
"""Per statistic: the figure of one rollout, its limit, and a description."""

_HEAVY_TAILED = {"margin", "logprob"}
DPI = 110
MOST_TICKS = 8


def draw_chart(found: CalibrationResult, path: Path) -> None:
    """Write the chart: one row per statistic, rollouts on the left and groups on the right."""
    limits = found.spec.limits
    names = [name for name in _ALONE if getattr(limits.honest, name) is not None]
    height = 1.1 + 0.22 * len(found.measured)
    figure = Figure(figsize=(13.5, 1.2 + height * len(names)), dpi=DPI, layout="constrained")
    figure.suptitle(
        "Honest work (blue) and cheats (red): the line spans 5 to 95 %, the bar 25 to 75 %, the dot is the median, "
        "the tick the largest",
        fontsize=11,
    )
    axes: Any = figure.subplots(len(names), 2, squeeze=False, sharey="row")
    honest = {one.name for one in found.honest}
    for name, (left, right) in zip(names, axes, strict=True):
        one_figure, limit, words = _ALONE[name]
        alone = {
            who: [getattr(one.figures(limits), one_figure) for group in groups for one in group]
            for who, groups in found.measured.items()
        }
        edge = getattr(limits, limit)
        _draw(left, alone, limit=edge, honest=honest, linear_to=edge / 100 if name in _HEAVY_TAILED else edge)
        left.set_xlabel(f"of each rollout: {words}", fontsize=9)
        together = {who: _evidences(groups, name, limits) for who, groups in found.measured.items()}
        _draw(right, together, limit=evidence_limit(limits), honest=honest, linear_to=1.0)
        right.set_xlabel(f"of each group: evidence of {name}, in nats", fontsize=9)
    figure.savefig(path, format="png")


def _evidences(groups: Sequence[Group], name: str, limits: LimitsSpec) -> list[float]:
    level = getattr(limits.honest, name)
    return [evidence(getattr(add(one.totals(limits) for one in group), name), level) for group in groups]


def _draw(
    axes: Axes, values: Mapping[str, Sequence[float]], *, limit: float, honest: set[str], linear_to: float
) -> None:
    """Draw a quantile line per entry of `values`; the scale is logarithmic above `linear_to`."""
    for place, (who, each) in enumerate(values.items()):
        colour = HONEST if who in honest else CHEAT
        low, first, middle, third, high = _quantiles(each)
        axes.plot([low, high], [place, place], color=colour, linewidth=1.2, solid_capstyle="butt")
        axes.plot([first, third], [place, place], color=colour, linewidth=6, alpha=0.55, solid_capstyle="butt")
        axes.plot([middle], [place], "o", color=colour, markersize=4)
        axes.plot([max(each)], [place], "|", color=colour, markersize=9, markeredgewidth=1.4)
    axes.axvline(limit, color=LIMIT, linestyle="--", linewidth=1)
    axes.annotate(
        f"limit {limit:.3g}",
        (limit, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, 2),
        textcoords="offset points",
        fontsize=8,
        color=LIMIT,
    )
    axes.set_xscale("symlog", linthresh=linear_to)
    axes.set_xlim(left=0)
    axes.set_xticks([0.0, *_ticks(linear_to / 5, axes.get_xlim()[1])])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_yticks(range(len(values)), list(values), fontsize=8.5)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _ticks(lowest: float, highest: float) -> list[float]:
    """Round numbers between the two, few enough to be read."""
    decades = [10.0**power for power in range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)))]
    for digits in ((1, 2, 5), (1,)):
        ticks = [digit * decade for decade in decades for digit in digits if lowest <= digit * decade <= highest]
        if len(ticks) <= MOST_TICKS:
            break
    return ticks


def _quantiles(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """At 5, 25, 50, 75 and 95 %."""
    if len(values) == 1:
        return (values[0],) * 5
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return cuts[0], cuts[4], cuts[9], cuts[14], cuts[18]
