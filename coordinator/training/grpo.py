"""GRPO: one step of reinforcement learning from groups of verified rollouts, read top to bottom.

Group-relative advantages and the clipped objective are DeepSeekMath's (arXiv 2402.03300); the second, outer
bound on the ratio, the loss per token and the dropping of groups without signal are as in INTELLECT-2
(arXiv 2505.07291). There is no KL term and no value model.

A rollout may come from a policy that is a few versions older than the one being trained (`max_async`): the
ratio is against the log-probabilities with which the tokens were sampled. Log-probabilities are of
`logits.float() / temperature` throughout. Shapes: B samples, T positions (predicting tokens 1..T), V ids.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from node.protocol.run import RunSpec, TrainingSpec

log = logging.getLogger(__name__)

STD_FLOOR = 1e-4
"""Keeps the advantages of a group with nearly equal rewards finite."""

MAX_LOG_RATIO = 20.0
"""A ratio above e**20 is far beyond every bound, and its exponential would make 0 * inf in the gradient."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion and the natural logarithms of the probabilities with which its tokens were sampled.

    `replies` are what an environment said in it: the completion tokens before it, and its own token ids. They are
    context, and nothing is learned of them.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    replies: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one problem by policy `version`, with one reward each."""

    version: int
    rewards: tuple[float, ...]
    rollouts: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """`ids` [B, T + 1], padded on the right; `mask` and `behaviour` [B, T], of tokens 1..T; `advantage` [B, 1]."""

    ids: Tensor
    mask: Tensor
    behaviour: Tensor
    advantage: Tensor


def group_advantages(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """How much better each reward is than its group's mean, in the group's standard deviations (n - 1) if asked."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deviations = [reward - mean for reward in rewards]
    if not normalize:
        return deviations
    std = math.sqrt(math.fsum(deviation**2 for deviation in deviations) / (len(rewards) - 1))
    return [deviation / (std + STD_FLOOR) for deviation in deviations]


def grpo_loss(
    logp_BT: Tensor, behaviour_BT: Tensor, advantage_B1: Tensor, mask_BT: Tensor, *, epsilon: float, delta: float
) -> Tensor:
    """The mean over tokens of -min(min(ratio, delta) * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A).

    Without delta a token with a negative advantage and a large ratio has an unbounded loss, and one such token
    can wreck a policy.
    """
    ratio_BT = token_ratios(logp_BT, behaviour_BT, mask_BT)
    bounded_BT = ratio_BT.clamp(max=delta) * advantage_B1
    clipped_BT = ratio_BT.clamp(1 - epsilon, 1 + epsilon) * advantage_B1
    objective_BT = torch.minimum(bounded_BT, clipped_BT)
    return -(objective_BT * mask_BT).sum() / mask_BT.sum()


def token_ratios(logp_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Probability now over probability when sampled [B, T]; 1 where the mask is off."""
    return (logp_BT - behaviour_BT).masked_fill(~mask_BT, 0.0).clamp(max=MAX_LOG_RATIO).exp()


def make_optimizer(model: PreTrainedModel, training: TrainingSpec) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) with the run's settings."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
    )


def learning_rate(training: TrainingSpec, step: int) -> float:
    """The rate of step `step` (from 0): linear over `warmup_steps`, then constant."""
    return training.learning_rate * min(1.0, (step + 1) / max(1, training.warmup_steps))


def train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, groups: Sequence[Group], *, spec: RunSpec, step: int
) -> dict[str, float]:
    """Train on `groups` in `training.minibatches` sequential updates; returns statistics, means over tokens.

    `step` counts finished steps from 0 and sets the learning rate alone. Groups whose rewards are all equal
    teach nothing and are dropped; where that leaves none, the weights stay as they are. A minibatch whose
    gradient is not finite is skipped and counted. Same input, same bits, for a fixed number of threads.
    """
    training = spec.training
    for parameters in optimizer.param_groups:
        parameters["lr"] = learning_rate(training, step)
    scored = [pair for group in groups for pair in score(group, normalize=training.normalize_advantage)]
    kept = sum(1 for group in groups if min(group.rewards) != max(group.rewards))
    stats = Statistics()
    model.train()
    for samples in split(scored, training.minibatches):
        update(model, optimizer, collate(samples, device=model.device), spec=spec, stats=stats)
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        **stats.means(),
        "reward": math.fsum(rewards) / max(1, len(rewards)),
        "learning_rate": learning_rate(training, step),
        "groups_kept": float(kept),
        "groups_dropped": float(len(groups) - kept),
        "samples": float(len(scored)),
    }


def score(group: Group, *, normalize: bool) -> list[tuple[Sample, float]]:
    """The group's samples with their advantages; none where every advantage is zero."""
    advantages = group_advantages(group.rewards, normalize=normalize)
    return list(zip(group.rollouts, advantages, strict=True)) if any(advantages) else []


def split(scored: Sequence[tuple[Sample, float]], minibatches: int) -> list[Sequence[tuple[Sample, float]]]:
    """At most `minibatches` runs of consecutive samples whose lengths differ by at most one."""
    count = min(minibatches, len(scored))
    bounds = [len(scored) * part // count for part in range(count + 1)] if count else [0]
    return [scored[start:end] for start, end in pairwise(bounds)]


def collate(scored: Sequence[tuple[Sample, float]], *, device: torch.device | str = "cpu") -> Minibatch:
    """Tensors of `scored`. Padding is on the right, where causal attention never looks at it."""
    width = max(len(sample.prompt_ids) + len(sample.completion_ids) for sample, _ in scored)
    ids_BL = torch.zeros(len(scored), width, dtype=torch.long)
    mask_BL = torch.zeros(len(scored), width, dtype=torch.bool)
    behaviour_BL = torch.zeros(len(scored), width)
    for row, (sample, _) in enumerate(scored):
        start, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.completion_ids)
        ids_BL[row, :end] = torch.tensor(sample.prompt_ids + sample.completion_ids)
        mask_BL[row, start:end] = True
        behaviour_BL[row, start:end] = torch.tensor(sample.logprobs)
    advantage_B1 = torch.tensor([[advantage] for _, advantage in scored])
    return Minibatch(
        ids_BL.to(device), mask_BL[:, 1:].to(device), behaviour_BL[:, 1:].to(device), advantage_B1.to(device)
    )


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Minibatch, *, spec: RunSpec, stats: Statistics
) -> None:
    """One forward pass, one backward pass, one optimizer step."""
    training = spec.training
    logits_BLV = model(input_ids=batch.ids, use_cache=False).logits
    logprobs_BTV = torch.log_softmax(logits_BLV[:, :-1].float() / spec.sampling.temperature, dim=-1)
    logp_BT = logprobs_BTV.gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
    loss = grpo_loss(
        logp_BT,
        batch.behaviour,
        batch.advantage,
        batch.mask,
        epsilon=training.clip_epsilon,
        delta=training.clip_delta,
    )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip).item()
    if not math.isfinite(grad_norm):
        log.warning("skipped a minibatch of %d samples: its gradient is not finite", len(batch.ids))
        stats.skipped += 1
        return
    optimizer.step()
    stats.add(batch, logprobs_BTV.detach(), logp_BT.detach(), loss.item(), grad_norm, epsilon=training.clip_epsilon)


@dataclass(slots=True)
class Statistics:
    """Sums over the tokens of a step's minibatches."""

    tokens: int = 0
    updates: int = 0
    skipped: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    gap: float = 0.0
    grad_norm: float = 0.0
    ratio_max: float = 0.0

    def add(
        self, batch: Minibatch, logprobs_BTV: Tensor, logp_BT: Tensor, loss: float, grad_norm: float, *, epsilon: float
    ) -> None:
        """Count one minibatch's tokens; the prompt and the padding are not among them."""
        ratio_N = token_ratios(logp_BT, batch.behaviour, batch.mask)[batch.mask]
        logprobs_NV = logprobs_BTV[batch.mask]
        self.tokens += ratio_N.numel()
        self.updates += 1
        self.loss += loss * ratio_N.numel()
        self.entropy += torch.special.entr(logprobs_NV.exp()).sum().item()
        self.clipped += ((ratio_N - 1).abs() > epsilon).sum().item()
        self.gap += (logp_BT - batch.behaviour)[batch.mask].abs().sum().item()
        self.grad_norm += grad_norm
        self.ratio_max = max(self.ratio_max, ratio_N.max().item())

    def means(self) -> dict[str, float]:
        """Loss, entropy (nats), share of ratios beyond epsilon and |log-probability change|; 0 without tokens."""
        tokens = max(1, self.tokens)
        return {
            "loss": self.loss / tokens,
            "entropy": self.entropy / tokens,
            "clip_fraction": self.clipped / tokens,
            "logprob_gap": self.gap / tokens,
            "ratio_max": self.ratio_max,
            "grad_norm": self.grad_norm / max(1, self.updates),
            "tokens": float(self.tokens),
            "minibatches_skipped": float(self.skipped),
        }
