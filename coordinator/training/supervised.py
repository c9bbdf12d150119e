"""Supervised learning: the loop of `swarmproof sft` and of the tiny policies' warm start.

A caller says where a step's gradient comes from; rate, clipping and update are the loop's. `packed_backward` is the
gradient of the mean cross-entropy over packed rows, on all processes of a world and without the logits of all tokens at
once. Shapes: N predicted tokens, n of a chunk of them, D hidden units.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coordinator.training.grpo import Execution
from coordinator.training.head import final_states, head_backward, head_logprobs, output_head
from coordinator.training.optimizers import Optimizers
from coordinator.training.packing import PackedRow, rows_of_process
from coordinator.training.repeatable import repeatable, set_training
from coordinator.training.world import free_gathered, full_tensor
from node.policy.packed_attention import packed_attention

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CosineSchedule:
    """Learning rates of `steps` steps: linear over `warmup_steps`, under a cosine that falls to `final` of `peak`."""

    peak: float
    steps: int
    warmup_steps: int
    final: float = 0.05

    def rate(self, step: int) -> float:
        """Return the rate of step `step` (from 0)."""
        cosine = (1 + math.cos(math.pi * step / self.steps)) / 2
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.peak * rise * (self.final + (1 - self.final) * cosine)


@dataclass(frozen=True, slots=True)
class SupervisedStep:
    """What finished step `step` (from 1) says of itself; `loss` is in nats per token, from before the update."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float


def supervise(
    model: PreTrainedModel,
    optimizer: Optimizers,
    schedule: CosineSchedule,
    backward: Callable[[int], float],
    *,
    gradient_clip: float,
    first: int = 0,
) -> Iterator[SupervisedStep]:
    """Train from step `first` to the schedule's end, and yield after each update.

    `backward` takes a step's number, accumulates the gradient of its mean loss, and returns that loss. A step whose
    gradient is not finite changes nothing. Every process of a world must exhaust it.
    """
    for step in range(first, schedule.steps):
        rate = schedule.rate(step)
        set_training(model)
        optimizer.set_learning_rate(rate)
        optimizer.zero_grad()
        loss = backward(step)
        clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clip)
        grad_norm = full_tensor(clipped).item()
        if math.isfinite(grad_norm):
            optimizer.step()
        else:
            log.warning("step %d skipped: its gradient is not finite", step)
        yield SupervisedStep(step + 1, loss, rate, grad_norm)


def packed_backward(model: PreTrainedModel, rows: Sequence[PackedRow], *, execution: Execution) -> float:
    """Accumulate the gradient of the mean loss over all predicted tokens of `rows`; return that loss.

    Every process of the world calls it with the same rows, and works on its share of them.
    """
    tokens, world = sum(len(row.targets) for row in rows), execution.world
    total = torch.zeros(1, dtype=torch.float64)
    with repeatable(world.device), packed_attention(model):
        for row in _own_rows(rows, execution):
            weight_N = row.weight / tokens

            def loss(part: slice, logp_n: Tensor, _: Tensor, weight_N: Tensor = weight_N) -> Tensor:
                return -(logp_n * weight_N[part]).sum()

            states_ND = _states(model, row, execution)
            logp_N, _ = head_backward(states_ND, output_head(model), row.targets, temperature=1.0, loss=loss)
            total -= (logp_N * row.weight).double().sum().cpu()
    return world.total(total).item() / tokens


def packed_loss(model: PreTrainedModel, batches: Iterator[Sequence[PackedRow]], *, execution: Execution) -> float:
    """Return the mean loss over all predicted tokens of some batches of rows; called as `packed_backward`."""
    tokens, total = 0, torch.zeros(1, dtype=torch.float64)
    model.train(mode=False)
    with torch.no_grad(), packed_attention(model):
        for rows in batches:
            tokens += sum(len(row.targets) for row in rows)
            for row in _own_rows(rows, execution):
                states_ND = _states(model, row, execution)
                logp_N = head_logprobs(states_ND, output_head(model), row.targets, temperature=1.0)
                total -= (logp_N * row.weight).double().sum().cpu()
        free_gathered(model)
    return execution.world.total(total).item() / tokens


def _own_rows(rows: Sequence[PackedRow], execution: Execution) -> Iterator[PackedRow]:
    """Yield this process's share of `rows`, on its device."""
    world = execution.world
    return (row.to(world.device) for row in rows_of_process(rows, rank=world.rank, size=world.size))


def _states(model: PreTrainedModel, row: PackedRow, execution: Execution) -> Tensor:
    """Compute the states [N, D] that predict a row's tokens."""
    dtype = execution.autocast
    # The cache would keep copies of all layers' gathered weights for a second use, which never comes.
    with torch.autocast(execution.world.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
        return final_states(model, row)
