"""The plots of the run's page, as data for uPlot and as static SVG paths for clients without JavaScript."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.dashboard.figures import RunPage
from coordinator.dashboard.formatting import minute, name_of, number, seconds
from coordinator.dashboard.history import Step
from coordinator.metrics.curves import KINDS, Curve, CurveKind, curves, environment_kinds, mean_stats, round_up
from coordinator.storage.tallies import DAY, MINUTE, Tally
from node.protocol.admission import Outcome

MOST_POINTS: Final = 300
MOST_REASONS: Final = 5
TRAINED: Final = tuple(kind for kind in KINDS if kind.key != "reward")
"""Training curves that share a section: the reward has a plot of its own."""

LEAST_PART: Final = 20.0
"""Seconds after which the current bucket gets a rate."""

Values = list[float | None]


@dataclass(frozen=True, slots=True)
class Picture:
    """A static plot: `bars` and `lines` as (class, SVG path) in a box of 100 x 100, and the labels of its axes.

    `said` is its description for screen readers.
    """

    bars: tuple[tuple[str, str], ...]
    lines: tuple[tuple[str, str], ...]
    up: tuple[str, ...]
    along: tuple[str, ...]
    said: str


@dataclass(frozen=True, slots=True)
class Plots:
    """All plots; `data` is the script's input, `training` has a picture for each of TRAINED and
    each environment."""

    data: dict[str, Any]
    reward: Picture | None
    training: tuple[tuple[CurveKind, Picture | None], ...]
    verdicts: Picture | None
    tokens: Picture | None
    wait: Picture | None


def plots_of(figures: RunPage) -> Plots:
    """Compute the plots; those without a value are None."""
    rewards = _rewards(figures.steps)
    kinds = (*environment_kinds(figures.environments), *TRAINED)
    trained = curves([mean_stats([step.stats for step in part]) for part in _parts(figures.steps)], kinds=kinds)
    starts, verdicts = _verdicts(figures)
    rates, slots, means, longest = _rates(figures, starts)
    data = {
        "reward": rewards,
        "training": {curve.kind.key: [_significant(value) for value in curve.values] for curve in trained},
        "over": {"width": figures.width, "start": starts, "verdicts": verdicts},
        "rate": {"tokens": rates, "slots": slots},
        "wait": {"mean": means, "longest": longest},
    }
    along = _along(starts, figures.width)
    return Plots(
        data=data,
        reward=_reward_picture(rewards),
        training=_training_pictures(kinds, trained, rewards["step"]),
        verdicts=_bars(verdicts, along) if starts else None,
        tokens=picture_of(rates, along, said="tokens a minute", shown=number),
        wait=picture_of(means, along, said="time from arrival to verdict", shown=seconds, other=longest),
    )


def _rewards(steps: Sequence[Step]) -> dict[str, list[float]]:
    """Return the reward by step, averaged over neighbours to at most MOST_POINTS points."""
    parts = _parts(steps)
    return {
        "step": [part[-1].step + 1 for part in parts],
        "mean": [_rounded(sum(step.reward for step in part) / len(part)) for part in parts],
        "spread": [_rounded(sum(step.spread for step in part) / len(part)) for part in parts],
        "low": [_rounded(min(step.low for step in part)) for part in parts],
        "high": [_rounded(max(step.high for step in part)) for part in parts],
    }


def _parts(steps: Sequence[Step]) -> list[Sequence[Step]]:
    """Group neighbours into at most MOST_POINTS parts."""
    stride = max(1, -(-len(steps) // MOST_POINTS))
    return [steps[start : start + stride] for start in range(0, len(steps), stride)]


def _rounded(value: float) -> float:
    return round(value, 4)


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _verdicts(figures: RunPage) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the starts of all buckets, empty ones included, and each kind of verdict's counts."""
    if not figures.buckets:
        return [], []
    width = figures.width
    first, last = figures.buckets[0].start, int(figures.now) // width * width
    starts = list(range(first, max(first, last) + 1, width))
    named = {reason for reason, _ in figures.reasons[:MOST_REASONS]}
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(starts))
    for tally in figures.buckets:
        at = (tally.start - first) // width
        if 0 <= at < len(starts):
            counts[_kind(tally, named)][at] += tally.verdicts
    order = ["admitted", *(reason.value for reason, _ in figures.reasons[:MOST_REASONS]), "other", "undecided"]
    return starts, [
        {"key": key, "name": "other reasons" if key == "other" else name_of(key), "count": counts[key]}
        for key in order
        if key in counts
    ]


def _kind(tally: Tally, named: set[Any]) -> str:
    if tally.outcome is Outcome.ADMITTED:
        return "admitted"
    if tally.outcome is Outcome.INDETERMINATE or tally.reason is None:
        return "undecided"
    return tally.reason.value if tally.reason in named else "other"


def _rates(figures: RunPage, starts: Sequence[int]) -> tuple[Values, Values, Values, Values]:
    """Return tokens and slots a minute, mean and longest wait by bucket; None where unknown."""
    slots, tokens, waits, longest = ([0.0] * len(starts) for _ in range(4))
    for tally in figures.buckets:
        at = (tally.start - starts[0]) // figures.width
        if 0 <= at < len(starts):
            slots[at] += tally.verdicts
            tokens[at] += tally.tokens
            waits[at] += tally.wait_seconds
            longest[at] = max(longest[at], tally.longest_wait)
    minutes = [figures.width / MINUTE] * len(starts)
    if starts:
        passed = figures.now - starts[-1]
        minutes[-1] = 0.0 if passed < LEAST_PART else min(figures.width, passed) / MINUTE
    means = [round(wait / count, 3) if count else None for wait, count in zip(waits, slots, strict=True)]
    most = [round(value, 3) if count else None for value, count in zip(longest, slots, strict=True)]
    return _divided(tokens, minutes), _divided(slots, minutes), means, most


def _divided(values: Sequence[float], minutes: Sequence[float]) -> Values:
    return [round(value / part, 2) if part else None for value, part in zip(values, minutes, strict=True)]


def _along(starts: Sequence[int], width: int) -> tuple[str, ...]:
    if not starts:
        return ()
    chosen = sorted({0, len(starts) // 2, len(starts) - 1})
    return tuple(minute(starts[at], days=width >= DAY or len(starts) * width > 2 * DAY) for at in chosen)


# -- pictures


def _reward_picture(rewards: dict[str, list[float]]) -> Picture | None:
    means, spreads, steps = rewards["mean"], rewards["spread"], rewards["step"]
    if not means:
        return None
    upper = [min(1.0, mean + spread) for mean, spread in zip(means, spreads, strict=True)]
    lower = [max(0.0, mean - spread) for mean, spread in zip(means, spreads, strict=True)]
    band = _path(upper, 1.0) + _path(lower, 1.0, back=True) + "Z"
    return Picture(
        bars=(("band", band),),
        lines=(("mark", _path(means, 1.0)),),
        up=("1", "0.5", "0"),
        along=_along_steps(steps),
        said=f"Mean reward of {len(means)} points: from {means[0]:.2f} to {means[-1]:.2f}.",
    )


def _along_steps(steps: Sequence[float]) -> tuple[str, ...]:
    shown = sorted({0, len(steps) // 2, len(steps) - 1})
    return tuple(f"step {steps[at]:g}" if at == 0 else f"{steps[at]:g}" for at in shown)


def _training_pictures(
    kinds: Sequence[CurveKind], drawn: Sequence[Curve], steps: Sequence[float]
) -> tuple[tuple[CurveKind, Picture | None], ...]:
    """Return a plot or None for each of `kinds`: a statistic may come with a later step."""
    found = {curve.kind: curve for curve in drawn}
    return tuple((kind, _curve_picture(found.get(kind), steps)) for kind in kinds)


def _curve_picture(curve: Curve | None, steps: Sequence[float]) -> Picture | None:
    if curve is None:
        return None
    middle = (curve.top + curve.bottom) / 2
    words = tuple(f"{value:.3g}" for value in (curve.top, middle, curve.bottom))
    return Picture((), (("mark", curve.path),), words, _along_steps(steps), curve.said)


def _bars(verdicts: Sequence[dict[str, Any]], along: tuple[str, ...]) -> Picture:
    totals = [sum(column) for column in zip(*(one["count"] for one in verdicts), strict=True)]
    top = round_up(max(totals), least=1e-3)
    each = 100 / len(totals)
    below = [0] * len(totals)
    bars = []
    for place, one in enumerate(verdicts):
        path = []
        for at, count in enumerate(one["count"]):
            if count:
                x, high, low = at * each, 100 - 100 * (below[at] + count) / top, 100 - 100 * below[at] / top
                path.append(f"M{x:.2f} {low:.1f}V{high:.1f}H{x + 0.85 * each:.2f}V{low:.1f}Z")
                below[at] += count
        bars.append((_colour(one["key"], place), "".join(path)))
    said = ", ".join(f"{sum(one['count']):,} {one['name']}" for one in verdicts)
    return Picture(tuple(bars), (), (number(top), number(top / 2), "0"), along, f"Verdicts: {said}.")


def _colour(key: str, place: int) -> str:
    """Return the CSS class of a kind of verdict; run.js uses the same colours."""
    return {"admitted": "k0", "other": "k5", "undecided": "k7"}.get(key) or ("k1", "k2", "k3", "k4", "k6")[place - 1]


def picture_of(
    values: Sequence[float | None],
    along: tuple[str, ...],
    *,
    said: str,
    shown: Any,
    other: Sequence[float | None] | None = None,
) -> Picture | None:
    known = [value for value in (*values, *(other or ())) if value is not None]
    if not known:
        return None
    top = round_up(max(known), least=1e-3)
    newest = next(value for value in reversed(values) if value is not None)
    lines = [("mark", _path(values, top))]
    if other is not None:
        lines.append(("faint", _path(other, top)))
    words = (shown(top), shown(top / 2), "0")
    return Picture((), tuple(lines), words, along, f"{said.capitalize()}; the newest is {shown(newest)}.")


def _path(values: Sequence[float | None], top: float, *, back: bool = False) -> str:
    """Return an SVG path from left to right, or with `back` one that continues another path to the left."""
    each = 100 / max(1, len(values) - 1)
    points = [(at * each, 100 - 100 * value / top) for at, value in enumerate(values) if value is not None]
    if len(points) == 1 and not back:
        points = [(0.0, points[0][1]), (100.0, points[0][1])]
    text = "L".join(f"{x:.2f} {y:.1f}" for x, y in (reversed(points) if back else points))
    return f"{'L' if back else 'M'}{text}" if points else ""
