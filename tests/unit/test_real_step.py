"""What a step's speed is held against: operations that were needed, neither more nor fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.realsize import RUN_TOML
from benchmarks.sizing.policy import make_policy
from benchmarks.sizing.step import StepTask, batch, operations
from coordinator.training.grpo import train_step
from coordinator.training.optimizers import make_optimizer

VOCABULARY = 1024
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.addmm_")


@pytest.mark.service
def test_the_operations_of_a_step_are_those_of_its_products_and_of_attention():
    """torch counts the products that it runs; attention, which is little here, comes on top."""
    model = make_policy(layers=1, vocabulary=VOCABULARY)[0].float()
    task = StepTask(Path("unused"), RUN_TOML.read_text(), prompt=8, rounds=1, threads=1)
    groups = batch(task, VOCABULARY)
    optimizer = make_optimizer(model, task.spec.training)
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        train_step(model, optimizer, groups, spec=task.spec, step=0)
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for name, flops in counted.items() if name in PRODUCTS)
    assert 0 < sum(operations(groups, model, task)) - products < 0.05 * products


def test_every_group_of_the_batch_teaches_and_fits_the_run():
    task = StepTask(Path("unused"), RUN_TOML.read_text(), prompt=76, rounds=1, threads=1)
    groups = batch(task, VOCABULARY)
    sampling = task.spec.sampling
    assert all(group.has_signal and len(group.rollouts) == sampling.group_size for group in groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert max(len(rollout.completion_ids) for rollout in rollouts) <= sampling.max_new_tokens
    assert len({len(rollout.completion_ids) for rollout in rollouts}) > 4
