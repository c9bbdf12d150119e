"""The report of a finished demonstration: one HTML file without scripts, fonts or anything to fetch.

Shapes are drawn in percentages of their box and stretch with it, while lines and text keep their size, so
that the page reads as well on a phone. Everything that came from outside is escaped by the template engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from coordinator.curves import curves
from coordinator.demo.summary import END_STEPS, NodeRow, StepRow, Summary
from node.protocol.run import RunSpec

COLOURS = 6
"""How many colours the chart of verdicts has; the first is for what was admitted."""
_ADMITTED = "admitted"
_APART = frozenset({"reward"})
"""It has a chart of its own."""
_PHASE_COLOURS = (5, 3, 2, 0, 4, 6)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stacked bar: `percent` of the bar's whole length."""

    label: str
    value: float
    percent: float
    colour: int


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a bar chart."""

    label: str
    segments: tuple[Segment, ...]
    note: str = ""

    @property
    def total(self) -> float:
        """The sum of its segments."""
        return sum(segment.value for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in per cent of the box, from its top left corner: one for each step, and a moving mean's line."""

    points: tuple[tuple[float, float, str], ...]
    mean: str
    labels: tuple[tuple[float, str], ...]


def render_report(summary: Summary, spec: RunSpec) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("coordinator.demo", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": duration, "number": number, "clock": timestamp, "megabytes": megabytes}
    rewards = [step.reward_mean for step in summary.steps]
    return environment.get_template("report.html.j2").render(
        summary=summary,
        spec=spec,
        first=statistics.fmean(rewards[:END_STEPS]) if rewards else None,
        last=statistics.fmean(rewards[-END_STEPS:]) if rewards else None,
        end_steps=END_STEPS,
        curve=reward_curve(summary.steps),
        training=curves([{**step.stats, "staleness": step.staleness_mean} for step in summary.steps], but=_APART),
        verdicts=verdict_bars(summary.nodes),
        legend=verdict_legend(summary.nodes),
        phases=phase_bar(summary.phases),
        cpu=cpu_bars(summary.cpu_seconds),
        broadcasts=broadcast_rows(summary),
    )


def reward_curve(steps: Sequence[StepRow]) -> Curve:
    """Mean reward of each step, on a scale from 0 to 1, and the mean of up to END_STEPS steps that end there."""
    rewards = [step.reward_mean for step in steps]
    across = [100 * (index + 0.5) / max(1, len(rewards)) for index in range(len(rewards))]
    means = [statistics.fmean(rewards[max(0, end - END_STEPS) : end]) for end in range(1, len(rewards) + 1)]
    every = max(1, len(rewards) // 6)
    return Curve(
        points=tuple(
            (round(x, 2), round(100 * (1 - reward), 2), f"step {step.step + 1}: {reward:.3f}")
            for x, reward, step in zip(across, rewards, steps, strict=True)
        ),
        mean=" ".join(f"{x:.2f},{100 * (1 - mean):.2f}" for x, mean in zip(across, means, strict=True)),
        labels=tuple(
            (round(x, 2), str(step.step + 1))
            for x, step in zip(across, steps, strict=True)
            if (step.step + 1) % every == 0 or step.step == 0
        ),
    )


def reasons_of(nodes: Sequence[NodeRow]) -> list[str]:
    """All reasons of rejections, the most frequent first."""
    counts: dict[str, int] = {}
    for node in nodes:
        for reason, count in node.reasons.items():
            counts[reason] = counts.get(reason, 0) + count
    return sorted(counts, key=lambda reason: (-counts[reason], reason))


def verdict_legend(nodes: Sequence[NodeRow]) -> list[tuple[str, int]]:
    """What each colour of the verdicts' chart stands for; the last colour is for all further reasons."""
    reasons = reasons_of(nodes)
    shown = [(reason, index) for index, reason in enumerate(reasons[: COLOURS - 2], start=1)]
    others = [("other reasons", COLOURS - 1)] if len(reasons) > COLOURS - 2 else []
    return [(_ADMITTED, 0), *shown, *others]


def verdict_bars(nodes: Sequence[NodeRow]) -> list[Bar]:
    """Submissions of each worker, by what became of them."""
    colours = dict(verdict_legend(nodes))
    longest = max((node.admitted + node.rejected for node in nodes), default=0)
    bars = []
    for node in nodes:
        parts = {_ADMITTED: node.admitted, **node.reasons}
        segments = tuple(
            Segment(name, count, _percent(count, longest), colours.get(name, COLOURS - 1))
            for name, count in parts.items()
            if count
        )
        label = node.name if node.kind == "honest" else f"hostile: {node.kind}"
        bars.append(Bar(label, segments, f"{node.admitted} admitted, {node.rejected} rejected"))
    return bars


def phase_bar(phases: Mapping[str, float]) -> Bar:
    """The whole time in one bar."""
    whole = sum(phases.values())
    segments = (
        Segment(name, seconds, _percent(seconds, whole), colour)
        for (name, seconds), colour in zip(phases.items(), _PHASE_COLOURS, strict=True)
    )
    return Bar("time", tuple(segments))


def cpu_bars(seconds: Mapping[str, float]) -> list[Bar]:
    """CPU time of each process, the busiest first."""
    longest = max(seconds.values(), default=0.0)
    return [
        Bar(name, (Segment("CPU", value, _percent(value, longest), 0),), duration(value))
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]


def broadcast_rows(summary: Summary) -> list[dict[str, Any]]:
    """For each relay: how many versions were timed, median and longest time in seconds, bytes fetched and in all."""
    times: dict[str, list[float]] = {}
    fetched = {row.relay: (row.fetched_bytes, row.result_bytes) for row in summary.fetched}
    for row in summary.broadcasts:
        for relay, seconds in row.seconds.items():
            times.setdefault(relay, []).append(seconds)
    return [
        {
            "relay": relay,
            "versions": len(found),
            "median": statistics.median(found),
            "longest": max(found),
            "fetched": fetched.get(relay, (0, 0)),
        }
        for relay, found in times.items()
    ]


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def megabytes(size_bytes: int) -> str:
    """A size for people."""
    return f"{size_bytes / 1e6:,.1f} MB"


def number(value: float) -> str:
    """A figure in as many digits as it is worth."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def timestamp(at: float) -> str:
    """A moment, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _percent(value: float, whole: float) -> float:
    return round(100 * value / whole, 3) if whole else 0.0
