"""Rewards by step as an SVG picture for the documentation, light or dark as its reader's page is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from coordinator.metrics.curves import line

PANEL, GAP, LEFT, TOP, HEIGHT, BOTTOM = 360, 64, 44, 40, 200, 52
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
STYLE = """
    text { fill: #1f2328; font: 12.5px system-ui, sans-serif; } .small { fill: #57606a; font-size: 11.5px; }
    .title { font-size: 14px; font-weight: 600; } .grid { stroke: #d8dee4; stroke-width: 1; }
    path { fill: none; vector-effect: non-scaling-stroke; stroke: #0969da; }
    .seed { opacity: 0.35; } .mean { stroke-width: 2.2; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; } .small { fill: #9198a1; } .grid { stroke: #30363d; } path { stroke: #58a6ff; }
    }
"""


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a panel for each dataset of `rows`: `rewards` by step of each seed, thin, and their mean.

    The line below it has the means of `before` and `after`, the rewards on held-out rows.
    """
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    width = LEFT + len(names) * PANEL + (len(names) - 1) * GAP + 16
    panels = [
        _panel(name, [row for row in rows if row["dataset"] == name], x=LEFT + at * (PANEL + GAP))
        for at, name in enumerate(names)
    ]
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + BOTTOM}" role="img">'
        f"<title>Mean reward of each training step</title><style>{STYLE}</style>{''.join(panels)}</svg>\n",
        encoding="utf-8",
    )


def _panel(name: str, rows: Sequence[Mapping[str, Any]], *, x: int) -> str:
    curves = [row["rewards"] for row in rows]
    means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
    grid = "".join(
        f'<line class="grid" x1="{x}" x2="{x + PANEL}" y1="{_height(tick)}" y2="{_height(tick)}"/>'
        f'<text class="small" x="{x - 6}" y="{_height(tick) + 4}" text-anchor="end">{tick:g}</text>'
        for tick in TICKS
    )
    box = f'transform="translate({x} {TOP}) scale({PANEL / 100} {HEIGHT / 100})"'
    seeds = "".join(f'<path class="seed" {box} d="{line(values, bottom=0, top=1)}"/>' for values in curves)
    before, after = (statistics.fmean(row[when] for row in rows) for when in ("before", "after"))
    said = f"held-out rows: {before:.2f} before, {after:.2f} after {len(means)} steps; {len(rows)} seeds"
    below = TOP + HEIGHT
    return (
        f'<text class="title" x="{x}" y="{TOP - 16}">{escape(name)}</text>{grid}{seeds}'
        f'<path class="mean" {box} d="{line(means, bottom=0, top=1)}"/>'
        f'<text class="small" x="{x}" y="{below + 18}">step 1</text>'
        f'<text class="small" x="{x + PANEL}" y="{below + 18}" text-anchor="end">step {len(means)}</text>'
        f'<text x="{x}" y="{below + 40}">{escape(said)}</text>'
    )


def _height(reward: float) -> float:
    return TOP + HEIGHT * (1 - reward)
