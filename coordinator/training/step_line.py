"""A training step in one line of the trainer's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coordinator.metrics.curves import REWARD_OF

MOST_TOLD: Final = 8
"""Environments whose rewards the line has; the statistics have all."""


def step_line(version: int, stats: Mapping[str, float], *, before: float | None) -> str:
    """Describe the step that made policy `version`; `before` is the reward of the step before it, None if unknown."""
    reward = stats["reward"]
    change = "" if before is None else f" ({reward - before:+.3f})"
    kept, unused = int(stats["groups_kept"]), int(stats["groups_dropped"])
    said = [f"step {version}: reward {reward:.3f}{change}{_by_environment(stats)}"]
    if stats["tokens"]:
        said.append(f"loss {stats['loss']:.4g}")
    else:
        said.append("nothing to train on, the policy stays as it was")
    said.append(f"{unused} of {kept + unused} groups unused" + (" (one reward throughout)" if unused else ""))
    return ", ".join((*said, f"{stats['train_seconds']:.1f} s"))


def _by_environment(stats: Mapping[str, float]) -> str:
    """Return the rewards of the first environments, "" where the run has one."""
    keys = sorted(key for key in stats if key.startswith(REWARD_OF))
    first = [f"{key.removeprefix(REWARD_OF)} {stats[key]:.3f}" for key in keys[:MOST_TOLD]]
    if len(keys) > MOST_TOLD:
        first.append(f"{len(keys) - MOST_TOLD} more")
    return f" ({', '.join(first)})" if first else ""
