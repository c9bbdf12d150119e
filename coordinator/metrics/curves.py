"""Curves of training statistics by step, as values and as SVG paths.

A statistic that no step has is not drawn; a missing or non-finite value is a gap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
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
    CurveKind("busiest_expert", "Busiest expert", "share of tokens that meet it, mean over layers"),
    CurveKind("expert_entropy", "Balance of experts", "1 where all are chosen as often, 0 where it is always one"),
)
KEYS: Final = frozenset(kind.key for kind in KINDS)
REWARD_OF: Final = "reward/"
"""Begins the key of the mean reward of one environment, of which a step has one for each in a run of several."""

MOST_ENVIRONMENTS: Final = 16
"""Environments with a curve of their own; a run may have more."""


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


def environment_kinds(names: Iterable[str]) -> tuple[CurveKind, ...]:
    """Return the statistic of each environment of a run, of the first MOST_ENVIRONMENTS; none where there is one."""
    different = list(dict.fromkeys(names))
    if len(different) == 1:
        return ()
    return tuple(CurveKind(REWARD_OF + name, name, "mean reward of its completions") for name in different)[
        :MOST_ENVIRONMENTS
    ]


def curve_stats(text: str | None) -> dict[str, float]:
    """Return the finite statistics among KINDS, and environments' rewards, in a step's stats, JSON or None.

    Of a step that trained nothing only the rewards: its other statistics are means over no tokens.
    """
    found = json.loads(text) if text else {}
    if is_idle(text):
        found = {key: value for key, value in found.items() if key == "reward" or key.startswith(REWARD_OF)}
    return {key: float(value) for key, value in found.items() if _is_curve(key) and _is_finite(value)}


def is_idle(text: str | None) -> bool:
    """Return whether a step's stats, JSON or None, say that it had nothing to train on."""
    return bool(json.loads(text).get("tokens") == 0) if text else False


def curves(stats: Sequence[Mapping[str, float]], *, kinds: Iterable[CurveKind] = KINDS) -> list[Curve]:
    """Return those curves of `kinds` that have any value, one value per element of `stats`."""
    found = []
    for kind in kinds:
        values = tuple(value if _is_finite(value := each.get(kind.key)) else None for each in stats)
        if known := [value for value in values if value is not None]:
            top = round_up(max(known))
            bottom = -round_up(-min(known)) if min(known) < 0 else 0.0
            found.append(Curve(kind, values, bottom, top, line(values, bottom=bottom, top=top)))
    return found


def mean_stats(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each statistic over the steps that have it."""
    known: dict[str, list[float]] = {}
    for each in stats:
        for key, value in each.items():
            if _is_curve(key):
                known.setdefault(key, []).append(value)
    return {key: math.fsum(values) / len(values) for key, values in known.items()}


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


def _is_curve(key: str) -> bool:
    return key in KEYS or key.startswith(REWARD_OF)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
