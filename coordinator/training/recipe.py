"""The recipe: each choice of a run's `[training]` as one small function.

Group-relative advantages and the clipped objective are DeepSeekMath's GRPO (arXiv 2402.03300); the second, outer bound
on the ratio and the loss per token are INTELLECT-2's (arXiv 2505.07291); the objective that masks instead of clipping
is INTELLECT-3's (technical report, Prime Intellect 2025); advantages without the standard deviation are Dr. GRPO's
(arXiv 2503.20783).

Ratios are importance ratios: a token's probability now over that when sampled, possibly by a policy a few versions
older (`batch.max_async`). Shapes: N completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from node.protocol.run import TrainingSpec

STD_FLOOR = 1e-4
"""Keeps the advantages of a group with nearly equal rewards finite."""

MAX_LOG_RATIO = 20.0
"""Ratios above e**20 exceed every bound, and their exponential would give 0 * inf in the gradient."""


def group_advantages(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """Return each reward minus its group's mean, divided by the group's standard deviation (n - 1) if `normalize`."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deviations = [reward - mean for reward in rewards]
    if not normalize:
        return deviations
    std = math.sqrt(math.fsum(deviation**2 for deviation in deviations) / (len(rewards) - 1))
    return [deviation / (std + STD_FLOOR) for deviation in deviations]


def token_ratios(logp_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """Compute importance ratios [N] from natural log-probabilities."""
    return (logp_N - behaviour_N).clamp(max=MAX_LOG_RATIO).exp()


def clipped_objective(ratio_N: Tensor, advantage_N: Tensor, *, epsilon: float, delta: float) -> Tensor:
    """Compute min(min(ratio, delta) * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A) [N] (INTELLECT-2, two-sided
    clipping).

    Without delta a token with a negative advantage and a large ratio has an unbounded loss, and one such token can
    wreck a policy.
    """
    bounded_N = ratio_N.clamp(max=delta) * advantage_N
    clipped_N = ratio_N.clamp(1 - epsilon, 1 + epsilon) * advantage_N
    return torch.minimum(bounded_N, clipped_N)


def masked_objective(ratio_N: Tensor, advantage_N: Tensor, *, low: float, high: float) -> Tensor:
    """Compute ratio * A where low <= ratio <= high, else 0 [N] (INTELLECT-3, masked importance sampling)."""
    return torch.where((ratio_N >= low) & (ratio_N <= high), ratio_N * advantage_N, 0.0)


def kl_penalty(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimate KL(policy || reference) by exp(d) - d - 1, d = reference - logp [N] (DeepSeekMath, eq. 4)."""
    difference_N = (reference_N - logp_N).clamp(max=MAX_LOG_RATIO)
    return difference_N.exp() - difference_N - 1


def token_losses(
    ratio_N: Tensor, advantage_N: Tensor, *, training: TrainingSpec, kl_N: Tensor | None, entropy_N: Tensor
) -> Tensor:
    """Compute the loss of each token [N]; a step's loss is its mean over a minibatch."""
    if training.objective == "clipped":
        objective_N = clipped_objective(ratio_N, advantage_N, epsilon=training.clip_epsilon, delta=training.clip_delta)
    else:
        objective_N = masked_objective(ratio_N, advantage_N, low=training.mask_low, high=training.mask_high)
    loss_N = -objective_N
    if kl_N is not None:
        loss_N = loss_N + training.kl_coefficient * kl_N
    if training.entropy_coefficient:
        loss_N = loss_N - training.entropy_coefficient * entropy_N
    return loss_N


def held_back(ratio_N: Tensor, *, training: TrainingSpec) -> Tensor:
    """Return which ratios are beyond the objective's bounds [N], bool."""
    if training.objective == "clipped":
        return (ratio_N - 1).abs() > training.clip_epsilon
    return (ratio_N < training.mask_low) | (ratio_N > training.mask_high)


def learning_rate(training: TrainingSpec, step: int) -> float:
    """Return the rate of step `step` (from 0): linear over `warmup_steps`, then constant."""
    return training.learning_rate * min(1.0, (step + 1) / max(1, training.warmup_steps))
