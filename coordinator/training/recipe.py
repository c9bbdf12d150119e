"""The recipe: each choice of a run's `[training]` as one small function.

Group-relative advantages and the clipped objective are DeepSeekMath's GRPO (arXiv 2402.03300); the second, outer bound
on the ratio and the loss per token are INTELLECT-2's (arXiv 2505.07291); the objective that masks instead of clipping
is INTELLECT-3's (technical report, Prime Intellect 2025); advantages without the standard deviation are Dr. GRPO's
(arXiv 2503.20783), the higher upper bound and the penalty for overlong completions DAPO's (arXiv 2503.14476), ratios of
whole completions GSPO's (arXiv 2507.18071), and the bounded weight of every token CISPO's (arXiv 2506.13585).

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


def overlong_penalty(tokens: int, *, training: TrainingSpec, most: int) -> float:
    """Return what a completion of `tokens` of at most `most` loses of its reward: 0 up to the last `overlong_share` of
    `most`, from there linearly to 1 (DAPO, eq. 13).
    """
    free = most * (1 - (training.overlong_share or 0.0))
    return (tokens - free) / (most - free) if tokens > free else 0.0


def token_ratios(logp_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """Compute importance ratios [N] from natural log-probabilities."""
    return (logp_N - behaviour_N).clamp(max=MAX_LOG_RATIO).exp()


def sequence_log_ratios(logp_N: Tensor, behaviour_N: Tensor, completion_N: Tensor) -> Tensor:
    """Compute for each token the mean log ratio of its completion [N]: the logarithm of GSPO's ratio (eq. 7).

    `completion_N` numbers the completions from 0, in the order of their tokens.
    """
    lengths_S = torch.bincount(completion_N)
    means_S = torch.segment_reduce(logp_N.detach() - behaviour_N, "mean", lengths=lengths_S)
    return means_S.clamp(max=MAX_LOG_RATIO)[completion_N]


def sequence_ratios(logp_N: Tensor, log_ratio_N: Tensor) -> Tensor:
    """Compute exp(`log_ratio_N`) [N], with the gradient along each token's own log-probability (GSPO-token, eq. 14).

    The mean over a completion's tokens then has the gradient of the completion's ratio.
    """
    return (log_ratio_N + logp_N - logp_N.detach()).exp()


def clipped_objective(
    ratio_N: Tensor, advantage_N: Tensor, *, epsilon: float, delta: float, high: float | None = None
) -> Tensor:
    """Compute min(min(ratio, delta) * A, clip(ratio, 1 - epsilon, 1 + high) * A) [N] (INTELLECT-2, two-sided
    clipping); `high` is `epsilon` unless given (DAPO, clip higher).

    Without delta a token with a negative advantage and a large ratio has an unbounded loss, and one such token can
    wreck a policy.
    """
    bounded_N = ratio_N.clamp(max=delta) * advantage_N
    clipped_N = ratio_N.clamp(1 - epsilon, 1 + (epsilon if high is None else high)) * advantage_N
    return torch.minimum(bounded_N, clipped_N)


def masked_objective(ratio_N: Tensor, advantage_N: Tensor, *, low: float, high: float) -> Tensor:
    """Compute ratio * A where low <= ratio <= high, else 0 [N] (INTELLECT-3, masked importance sampling)."""
    return torch.where((ratio_N >= low) & (ratio_N <= high), ratio_N * advantage_N, 0.0)


def cispo_objective(ratio_N: Tensor, logp_N: Tensor, advantage_N: Tensor, *, delta: float) -> Tensor:
    """Compute min(ratio, delta) * A * log-probability [N], the weight without a gradient (CISPO, eq. 4)."""
    return ratio_N.detach().clamp(max=delta) * advantage_N * logp_N


def kl_penalty(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimate KL(policy || reference) by exp(d) - d - 1, d = reference - logp [N] (DeepSeekMath, eq. 4)."""
    difference_N = (reference_N - logp_N).clamp(max=MAX_LOG_RATIO)
    return difference_N.exp() - difference_N - 1


def distillation_loss(logp_N: Tensor, behaviour_N: Tensor, teacher_N: Tensor, *, delta: float) -> Tensor:
    """Estimate KL(policy || teacher) by min(ratio, delta) * (logp - teacher) [N], the difference without a gradient.

    The gradient is then that of the divergence of each token's distribution, from the one token that was drawn of it.
    """
    ratio_N = token_ratios(logp_N, behaviour_N).clamp(max=delta)
    return ratio_N * (logp_N.detach() - teacher_N)


def token_losses(
    logp_N: Tensor,
    ratio_N: Tensor,
    advantage_N: Tensor,
    *,
    training: TrainingSpec,
    kl_N: Tensor | None,
    entropy_N: Tensor,
) -> Tensor:
    """Compute the loss of each token [N]; `training.aggregation` says what becomes of them."""
    if training.objective == "clipped":
        objective_N = clipped_objective(
            ratio_N,
            advantage_N,
            epsilon=training.clip_epsilon,
            delta=training.clip_delta,
            high=training.clip_epsilon_high or training.clip_epsilon,
        )
    elif training.objective == "masked":
        objective_N = masked_objective(ratio_N, advantage_N, low=training.mask_low, high=training.mask_high)
    else:
        objective_N = cispo_objective(ratio_N, logp_N, advantage_N, delta=training.clip_delta)
    loss_N = -objective_N
    if kl_N is not None:
        loss_N = loss_N + training.kl_coefficient * kl_N
    return with_entropy(loss_N, entropy_N, training=training)


def with_entropy(loss_N: Tensor, entropy_N: Tensor, *, training: TrainingSpec) -> Tensor:
    """Return the loss of each token [N] less the reward for its distribution's entropy."""
    return loss_N - training.entropy_coefficient * entropy_N if training.entropy_coefficient else loss_N


def held_back(ratio_N: Tensor, *, training: TrainingSpec) -> Tensor:
    """Return which ratios are beyond the objective's bounds [N], bool."""
    if training.objective == "clipped":
        high = training.clip_epsilon_high or training.clip_epsilon
        return (ratio_N < 1 - training.clip_epsilon) | (ratio_N > 1 + high)
    if training.objective == "masked":
        return (ratio_N < training.mask_low) | (ratio_N > training.mask_high)
    return ratio_N > training.clip_delta


def completion_weight(tokens: int, *, training: TrainingSpec) -> float:
    """Return the weight of each token of a completion of `tokens` in a minibatch's loss, before `loss_divisor`."""
    return 1 / tokens if training.aggregation == "completions" else 1.0


def loss_divisor(lengths: Sequence[int], *, training: TrainingSpec, most: int) -> float:
    """Return what the weighted sum of a minibatch's token losses is divided by.

    `lengths` are its completions' tokens, `most` what a completion may have: the constant of "length" (Dr. GRPO).
    """
    if training.aggregation == "completions":
        return len(lengths)
    return len(lengths) * most if training.aggregation == "length" else sum(lengths)


def learning_rate(training: TrainingSpec, step: int) -> float:
    """Return the rate of step `step` (from 0): linear over `warmup_steps`, then constant."""
    return training.learning_rate * min(1.0, (step + 1) / max(1, training.warmup_steps))
