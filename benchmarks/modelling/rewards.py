"""Reward gain of training: mean rewards of the demonstration's tasks before and after, for each family.

The warm start of `model.initial`, then 30 steps of 32 groups of 8 by the demonstration's recipe in one process, on
policies two steps old, as in a swarm. Before is the mean of the first five steps, after that of the last five.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.learning.loop import LearningTask, learn, spec_of
from benchmarks.report import say
from benchmarks.warm_start import save_warmed_up
from coordinator.lab.processes.layout import family_run_toml
from node.protocol.run import parse_run_toml

FAMILIES = ("eagle", "finch", "goldfinch", "frame-action")
STEPS, PROMPTS, LAG, ENDS = 30, 32, 2, 5


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Measure rewards before and after, and the gain."""
    found: dict[str, float] = {}
    for family in FAMILIES:
        before, after = gained(family, options)
        key = family.replace("-", "_")
        found |= {
            f"reward_before_{key}": round(before, 4),
            f"reward_after_{key}": round(after, 4),
            f"reward_gain_{key}": round(after - before, 4),
        }
        say(f"{family}: {before:.3f} to {after:.3f}")
    return found


def gained(family: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the mean reward of the first five steps, and of the last five."""
    run = parse_run_toml(family_run_toml(family))
    rules, steps = run.training, options.steps or STEPS
    task = LearningTask(seed=options.seed, steps=steps, prompts=PROMPTS, environments=run.environments)
    spec = spec_of(
        task,
        max_new_tokens=run.sampling.max_new_tokens,
        learning_rate=rules.learning_rate,
        beta1=rules.beta1,
        beta2=rules.beta2,
        weight_decay=rules.weight_decay,
        warmup_steps=rules.warmup_steps,
        minibatches=rules.minibatches,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "first.safetensors"
        save_warmed_up(path, options.warm_start, family=family, seed=options.seed)
        rewards = learn(path, task, spec, lag=LAG).rewards
    return statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:])
