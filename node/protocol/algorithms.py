"""Algorithms by name: what `training.algorithm` in a run.toml stands for (docs/training.md).

A name is a set of the run's own switches and nothing else, so a signed run states the switches alone: who reads it
needs no table of names. A key that run.toml sets itself holds over the algorithm's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

UNBOUNDED: Final = 1e9
"""A `clip_delta` that no ratio reaches."""

_GRPO: Final[Mapping[str, Any]] = {
    "objective": "clipped",
    "ratio": "token",
    "clip_epsilon": 0.2,
    "clip_delta": UNBOUNDED,
    "aggregation": "completions",
    "normalize_advantage": True,
    "kl_coefficient": 0.0,
}
ALGORITHMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "grpo": {**_GRPO, "kl_coefficient": 0.04},
    "dr-grpo": {**_GRPO, "aggregation": "length", "normalize_advantage": False},
    "dapo": {**_GRPO, "clip_epsilon_high": 0.28, "aggregation": "tokens", "overlong_share": 0.2},
    "gspo": {**_GRPO, "ratio": "sequence", "clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4},
    "cispo": {**_GRPO, "objective": "cispo", "clip_delta": 5.0, "aggregation": "tokens"},
    "intellect-2": {**_GRPO, "clip_delta": 4.0, "aggregation": "tokens"},
    "intellect-3": {**_GRPO, "objective": "masked", "aggregation": "tokens"},
}
"""`[training]` of each algorithm; docs/training.md names the papers."""
_ONLY_SIGNAL: Final = frozenset({"dapo"})
"""Algorithms whose steps take no groups with equal rewards (`batch.only_signal`)."""


def with_algorithm(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed run.toml with its `training.algorithm` replaced by what it stands for.

    Raises ValueError where there is no such algorithm.
    """
    training = run.get("training")
    if not isinstance(training, dict) or "algorithm" not in training:
        return dict(run)
    name = training["algorithm"]
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ValueError(f"training.algorithm is one of {', '.join(ALGORITHMS)}, not {name!r}")
    given = {key: value for key, value in training.items() if key != "algorithm"}
    changed = {**run, "training": {**ALGORITHMS[name], **given}}
    batch = run.get("batch", {})
    if name in _ONLY_SIGNAL and isinstance(batch, dict):
        changed["batch"] = {"only_signal": True, **batch}
    return changed
