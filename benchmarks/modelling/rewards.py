"""What training gains: mean rewards of the demonstration's tasks before and after, of each family.

The warm start of `model.initial`, then 30 steps of 32 groups of 8 by the demonstration's recipe in one process, on
policies two steps old, as in a swarm. Before is the mean of the first five steps, after that of the last five.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.learning.loop import Task, ends, learn, spec_of
from coordinator.lab.processes.layout import family_run_toml
from coordinator.training.warm_start import warm_start
from node.policy.file import save_policy
from node.protocol.run import parse_run_toml

FAMILIES = ("eagle", "finch", "goldfinch", "frame-action")
STEPS, PROMPTS, LAG = 30, 32, 2


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Rewards before and after, and the gain."""
    found: dict[str, float] = {}
    for family in FAMILIES:
        before, after = gained(family, seed=options.seed)
        key = family.replace("-", "_")
        found |= {
            f"reward_before_{key}": round(before, 4),
            f"reward_after_{key}": round(after, 4),
            f"reward_gain_{key}": round(after - before, 4),
        }
        print(f"{family}: {before:.3f} to {after:.3f}", file=sys.stderr, flush=True)
    return found


def gained(family: str, *, seed: int) -> tuple[float, float]:
    """The mean reward of the first five steps, and of the last five."""
    run = parse_run_toml(family_run_toml(family))
    rules, task = run.training, Task(seed=seed, steps=STEPS, prompts=PROMPTS, environments=run.environments)
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
        save_policy(*warm_start(family, seed=seed), path)
        return ends(learn(path, task, spec, lag=LAG).rewards)
