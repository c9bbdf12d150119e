"""How training goes, step by step: the statistics that are worth a curve, and their lines, for any page.

A step says what its trainer knew. A statistic that no step has is not drawn, and one that a step lacks, or that is not
finite, is a gap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CurveKind:
    """A statistic by its key, what people call it, and what it says."""

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
        """For who cannot see it."""
        known = [value for value in self.values if value is not None]
        return f"{self.kind.name}: from {known[0]:.3g} to {known[-1]:.3g}, at most {max(known):.3g}."


def kept_stats(text: str | None) -> dict[str, float]:
    """Of a step's statistics as the database has them, JSON or nothing, those of KINDS that are finite numbers."""
    found = json.loads(text) if text else {}
    return {key: float(found[key]) for key in KEYS & found.keys() if _is_finite(found[key])}


def curves(stats: Sequence[Mapping[str, float]], *, but: frozenset[str] = frozenset()) -> list[Curve]:
    """The curves that there is something to draw of, one value for each element of `stats`; without those of `but`."""
    drawn = (_curve(kind, [_value(each.get(kind.key)) for each in stats]) for kind in KINDS if kind.key not in but)
    return [curve for curve in drawn if curve is not None]


def _curve(kind: CurveKind, values: Sequence[float | None]) -> Curve | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    top = round_up(max(known))
    bottom = -round_up(-min(known)) if min(known) < 0 else 0.0
    return Curve(kind, tuple(values), bottom, top, line(values, bottom=bottom, top=top))


def mean_stats(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each statistic over the steps that have it."""
    known = {key: [each[key] for each in stats if key in each] for key in sorted(KEYS)}
    return {key: math.fsum(values) / len(values) for key, values in known.items() if values}


def line(values: Sequence[float | None], *, bottom: float, top: float) -> str:
    """An SVG path through `values` from left to right, broken where there is none; a lone one is a short dash."""
    each = 100 / max(1, len(values) - 1)
    parts: list[list[str]] = [[]]
    for at, value in enumerate(values):
        if value is None:
            parts.append([])
        else:
            parts[-1].append(f"{at * each:.2f} {100 * (top - value) / (top - bottom):.1f}")
    return "".join("M" + "L".join(part) + ("h0.8" if len(part) == 1 else "") for part in parts if part)


def round_up(value: float, *, least: float = 1e-6) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten; at least `least`, a power of ten itself."""
    size = least
    while size * 10 < value:
        size *= 10
    return next((step * size for step in (1, 2, 2.5, 5, 10) if step * size >= value), 10 * size)


def _value(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
