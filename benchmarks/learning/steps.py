"""Policies of consecutive training steps, and ones between them: what a stale worker serves."""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path

import torch

from benchmarks.learning.loop import grouped
from benchmarks.report import say
from benchmarks.warm_start import warmed_up
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.workers import make_workers
from coordinator.training.grpo import train_step
from coordinator.training.optimizers import make_optimizer
from node.policy.file import load_policy, save_policy
from node.protocol.run import RunSpec

GROUPS_PER_STEP = 32
SMALLER = {"stale_lr_1e5": 0.1, "stale_lr_1e6": 0.01}
"""Shares of the last training step, for smaller learning rates."""


async def train(spec: RunSpec, folder: Path, *, seed: int, steps: int, warm: float) -> list[Path]:
    """Train in a short run: the torch engine draws, `train_step` trains.

    Return the files of the last policy, of the one before, and of those from which one step at each learning rate of
    `SMALLER` would have led to the last one.
    """
    model, tokenizer = warmed_up(warm, seed=seed)
    optimizer = make_optimizer(model, spec.training)
    paths = [folder / f"step{step}.safetensors" for step in range(steps + 1)]
    (worker, *_) = make_workers(["torch"], threads=1)
    before = copy.deepcopy(model)
    for step, path in enumerate(paths):
        save_policy(copy.deepcopy(model).to(getattr(torch, spec.model.dtype)), tokenizer, path)
        if step == steps:
            break
        slots = SyntheticSlots(spec, load_policy(path, dtype=torch.float32))
        numbers = slots.allocate(GROUPS_PER_STEP)
        async with worker.running(spec, path) as engine:
            drawn = [await engine.generate(slots.requests(slot)) for slot in numbers]
        groups = grouped(
            list(chain.from_iterable(drawn)),
            spec.sampling.group_size,
            version=step,
            reward=lambda at, rollout: slots.reward(numbers[at], rollout),  # noqa: B023  (called at once)
        )
        before = copy.deepcopy(model)
        model.train()
        stats = train_step(model, optimizer, groups, spec=spec, step=step)
        model.train(mode=False)
        say(f"training step {step}: reward {stats['reward']:.2f}")
    nearer = [folder / f"{key}.safetensors" for key in SMALLER]
    for path, share in zip(nearer, SMALLER.values(), strict=True):
        between = copy.deepcopy(model)
        with torch.no_grad():
            for weight, old in zip(between.parameters(), before.parameters(), strict=True):
                weight.lerp_(old, share)
        save_policy(between.to(getattr(torch, spec.model.dtype)), tokenizer, path)
    return [paths[-1], paths[-2], *nearer]
