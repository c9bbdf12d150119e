"""Curves of training statistics by step, as values and as SVG paths.

A statistic that no step has is not drawn; a missing or non-finite value is a gap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CurveKind:
    """A statistic: its key in a step's stats, display name and meaning."""

    key: str
    name: str
    meaning: str


KINDS: Final = (
    CurveKind("reward", "Reward", "mean over the step's completions"),
    CurveKind("entropy", "Entropy", "nats a token; 0 where it is certain"),
    CurveKind("logprob_gap", "Log-probability gap", "to the policy that drew it, nats a token"),
    CurveKind("clip_fraction", "Clipped", "share of tokens beyond the clip range"),
    CurveKind("grad_norm", "Gradient norm", "before it is clipped, mean over updates"),
    CurveKind("staleness", "Staleness", "steps between drawing and training"),
)
KEYS: Final = frozenset(kind.key for kind in KINDS)


@dataclass(frozen=True, slots=True)
class Curve:
    """One statistic over the steps; `values` has None for gaps. The axis goes from `bottom`, 0 or below, to `top`.

    `path` is an SVG path in a box of 100 x 100 whose origin is the upper left corner.
    """

    kind: CurveKind
    values: tuple[float | None, ...]
    bottom: float
    top: float
    path: str

    @property
    def said(self) -> str:
        """A description for screen readers."""
        known = [value for value in self.values if value is not None]
        return f"{self.kind.name}: from {known[0]:.3g} to {known[-1]:.3g}, at most {max(known):.3g}."


def curve_stats(text: str | None) -> dict[str, float]:
    """Return the finite statistics among KINDS in a step's stats, a JSON object or None."""
    found = json.loads(text) if text else {}
    return {key: float(found[key]) for key in KEYS & found.keys() if _is_finite(found[key])}


def curves(stats: Sequence[Mapping[str, float]], *, but: frozenset[str] = frozenset()) -> list[Curve]:
    """Return the curves with any value, one value per element of `stats`, except the keys in `but`."""
    found = []
    for kind in (kind for kind in KINDS if kind.key not in but):
        values = tuple(value if _is_finite(value := each.get(kind.key)) else None for each in stats)
        if known := [value for value in values if value is not None]:
            top = round_up(max(known))
            bottom = -round_up(-min(known)) if min(known) < 0 else 0.0
            found.append(Curve(kind, values, bottom, top, line(values, bottom=bottom, top=top)))
    return found


def mean_stats(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each statistic over the steps that have it."""
    known = {key: [each[key] for each in stats if key in each] for key in sorted(KEYS)}
    return {key: math.fsum(values) / len(values) for key, values in known.items() if values}


def line(values: Sequence[float | None], *, bottom: float, top: float) -> str:
    """Return an SVG path through `values` in a box of 100 x 100, broken at None; an isolated value is a short dash."""
    each = 100 / max(1, len(values) - 1)
    parts: list[list[str]] = [[]]
    for at, value in enumerate(values):
        if value is None:
            parts.append([])
        else:
            parts[-1].append(f"{at * each:.2f} {100 * (top - value) / (top - bottom):.1f}")
    return "".join("M" + "L".join(part) + ("h0.8" if len(part) == 1 else "") for part in parts if part)


def round_up(value: float, *, least: float = 1e-6) -> float:
    """Round up to 1, 2, 2.5 or 5 times a power of ten, at least `least`, itself a power of ten."""
    size = least
    while size * 10 < value:
        size *= 10
    return next((step * size for step in (1, 2, 2.5, 5, 10) if step * size >= value), 10 * size)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
