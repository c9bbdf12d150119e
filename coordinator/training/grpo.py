"""One GRPO training step: groups of verified rollouts in, updated weights and statistics out.

`coordinator.training.recipe` defines the objective; here it meets a model. Groups without signal are dropped as in
INTELLECT-2 (arXiv 2505.07291). Log-probabilities are of float32 logits / temperature throughout. Every process of a
world calls this with the same groups, works on its share of the rows, and ends with the same weights. Shapes: N drawn
tokens, n of a chunk of them, D hidden units.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coordinator.errors import StorageFault
from coordinator.metrics.curves import REWARD_OF
from coordinator.training import recipe
from coordinator.training.balance import ExpertLoad, counted_experts
from coordinator.training.groups import Group, Sample, count_tokens
from coordinator.training.head import final_states, head_backward, head_logprobs, output_head
from coordinator.training.lora import without_adapters
from coordinator.training.losses import CustomLoss, load_loss
from coordinator.training.optimizers import Optimizers
from coordinator.training.packing import ROW_TOKENS, PackedRow, Scored, pack, rows_of_process
from coordinator.training.repeatable import repeatable, set_training
from coordinator.training.world import SINGLE_PROCESS, World, full_tensor
from node.policy.experts import routers
from node.policy.models.base import RecurrentForCausalLM
from node.policy.packed_attention import packed_attention
from node.policy.routing import are_choices, replayed_choices
from node.protocol.run import RunSpec, TeacherSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Execution:
    """How a step is computed; results differ by rounding only.

    `row_tokens`: tokens of a packed row. `autocast`: dtype of matrix products, None for that of the weights.
    `recompute`: recompute activations in the backward pass (arXiv 1604.06174).
    """

    world: World = SINGLE_PROCESS
    row_tokens: int = ROW_TOKENS
    autocast: torch.dtype | None = None
    recompute: bool = False


def train_step(
    model: PreTrainedModel,
    optimizer: Optimizers,
    groups: Sequence[Group],
    *,
    spec: RunSpec,
    step: int,
    reference: PreTrainedModel | None = None,
    teacher: PreTrainedModel | None = None,
    execution: Execution = Execution(),
    before_update: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Train on `groups` in `training.minibatches` sequential updates; return statistics, means over tokens.

    `step` counts finished steps from 0, sets the learning rate, and is the version that staleness refers to.
    `reference` is the policy of the KL penalty, without its adapters: it may be `model`. `teacher` is that of
    `training.teacher`. Without it, groups without advantages are dropped; if none is left, the weights stay unchanged.
    `before_update` is called before weights or optimizer state change. A minibatch with a non-finite gradient is
    skipped and counted. Deterministic for a number of threads and processes, and a kind of GPU. Raises LossFault, and
    StorageFault for a group whose experts are not this model's.
    """
    training = spec.training
    check_experts(groups, model)
    optimizer.set_learning_rate(recipe.learning_rate(training, step))
    by_group = [score(group, spec=spec, step=step) for group in groups]
    scored, kept = [each for one in by_group for each in one], sum(1 for one in by_group if one)
    stats = Statistics()
    set_training(model)
    loss = load_loss(training)
    recurrent = isinstance(model, RecurrentForCausalLM)
    device = execution.world.device
    with repeatable(device), packed_attention(model, reference, teacher), counted_experts(model) as experts:
        updates = Updates(model, reference, teacher, spec, execution, stats, experts, before_update, loss)
        for samples in split(scored, training.minibatches):
            lengths = [len(each.sample.completion_ids) for each in samples]
            divisor = recipe.loss_divisor(lengths, training=training, most=spec.sampling.max_new_tokens)
            rows = pack(samples, row_tokens=execution.row_tokens, recurrent=recurrent)
            updates.update(optimizer, rows, divisor=divisor)
        means = stats.means(execution.world) | experts.means(execution.world)
    rewards = [reward for group in groups for reward in group.rewards]
    reward, apart = math.fsum(rewards) / max(1, len(rewards)), environment_rewards(groups, spec)
    return {
        **means,
        "reward": reward,
        **apart,
        "learning_rate": recipe.learning_rate(training, step),
        "groups_kept": float(kept),
        "groups_dropped": float(len(groups) - kept),
        "samples": float(len(scored)),
    }


def check_experts(groups: Sequence[Group], model: PreTrainedModel) -> None:
    """Raise StorageFault for a group with experts that are none of this model's, before anything is computed."""
    found = routers(model)
    for group in groups:
        for sample, met in zip(group.rollouts, group.experts, strict=False):  # of no completion, or of each
            if met and not are_choices(met, found, tokens=count_tokens(sample) - 1):
                raise StorageFault(f"a group of policy {group.version} names experts that are not this model's")


def environment_rewards(groups: Sequence[Group], spec: RunSpec) -> dict[str, float]:
    """Return the mean reward of each environment's completions, by REWARD_OF and its name, where the run has several.

    Environments of one name, with other arguments, are one. One of which no group came has no mean.
    """
    if len({one.name for one in spec.environments}) == 1:
        return {}
    earned: dict[str, list[float]] = {}
    for group in groups:
        if group.environment is not None:
            earned.setdefault(REWARD_OF + spec.environments[group.environment].name, []).extend(group.rewards)
    return {key: math.fsum(rewards) / len(rewards) for key, rewards in sorted(earned.items()) if rewards}


def score(group: Group, *, spec: RunSpec, step: int) -> list[Scored]:
    """Return the group's samples with their advantages; none if all are zero and no teacher has something to say."""
    training = spec.training
    lengths = [len(sample.completion_ids) for sample in group.rollouts]
    rewards = [
        reward - recipe.overlong_penalty(tokens, training=training, most=most_tokens(sample, group, spec))
        for reward, sample, tokens in zip(group.rewards, group.rollouts, lengths, strict=True)
    ]
    advantages = recipe.group_advantages(rewards, normalize=training.normalize_advantage)
    if not any(advantages) and not training.teacher:
        return []
    return [
        Scored(
            sample,
            advantage,
            staleness(sample, leased=group.version, step=step),
            recipe.completion_weight(tokens, training=training),
            experts,
        )
        for sample, advantage, tokens, experts in zip(
            group.rollouts, advantages, lengths, group.experts or [b""] * len(lengths), strict=True
        )
    ]


def most_tokens(sample: Sample, group: Group, spec: RunSpec) -> int:
    """Return the most tokens that this completion of `group` could have had.

    The ends of its thoughts lower it in a run of one turn. In others they cannot be told from replies here.
    """
    sampling = spec.sampling if group.environment is None else spec.sampling_in(group.environment)
    ends = sum(len(ids) for _, ids in sample.replies) if sampling.max_turns == 1 else 0
    return sampling.max_new_tokens - ends


def staleness(sample: Sample, *, leased: int, step: int) -> tuple[int, ...]:
    """Return how many versions before `step` each token's policy was."""
    segments = sample.segments or ((leased, len(sample.completion_ids)),)
    return tuple(step - version for version, tokens in segments for _ in range(tokens))


def split(scored: Sequence[Scored], minibatches: int) -> list[Sequence[Scored]]:
    """Split into at most `minibatches` runs of consecutive samples whose lengths differ by at most one."""
    count = min(minibatches, len(scored))
    bounds = [len(scored) * part // count for part in range(count + 1)] if count else [0]
    return [scored[start:end] for start, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Updates:
    """The updates of one step."""

    model: PreTrainedModel
    reference: PreTrainedModel | None
    teacher: PreTrainedModel | None
    spec: RunSpec
    execution: Execution
    stats: Statistics
    experts: ExpertLoad
    before_update: Callable[[], object]
    loss: CustomLoss | None

    def update(self, optimizer: Optimizers, rows: Sequence[PackedRow], *, divisor: float) -> None:
        """Run forward and backward passes over a minibatch, row by row, then one optimizer step.

        `divisor` is what the weighted sum of its tokens' losses is divided by.
        """
        world = self.execution.world
        optimizer.zero_grad()
        own_rows = rows_of_process(rows, rank=world.rank, size=world.size)
        sums = [self._backward(row.to(world.device), divisor=divisor) for row in own_rows]
        clipped = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.training.gradient_clip)
        grad_norm = full_tensor(clipped).item()
        if not math.isfinite(grad_norm):
            tokens = sum(len(row.targets) for row in rows)
            log.warning("minibatch of %d tokens skipped: its gradient is not finite", tokens)
            self.stats.skipped += 1
            return
        self.before_update()
        optimizer.step()
        self.stats.updates += 1
        self.stats.grad_norm += grad_norm
        for each in sums:
            self.stats.add(each)

    def _backward(self, row: PackedRow, *, divisor: float) -> RowSums:
        """Accumulate a row's part of the gradient of the minibatch's loss."""
        self.experts.is_counting = bool(row.weight.any())  # a filler row is there for the other processes alone
        # Around both passes, as recomputed activations have to meet the same experts.
        if row.experts is None:
            return self._forward_and_backward(row, divisor=divisor)
        with replayed_choices(self.model, row.experts.choices, row.experts.is_known):
            return self._forward_and_backward(row, divisor=divisor)

    def _forward_and_backward(self, row: PackedRow, *, divisor: float) -> RowSums:
        training, temperature = self.spec.training, self.spec.sampling.temperature
        states_ND, reference_N, teacher_N = self._forward(row)
        log_ratio_N, own = self._of_completions(states_ND, row, reference_N, divisor=divisor)

        def ratios(part: slice, logp_n: Tensor) -> Tensor:
            if log_ratio_N is None:
                return recipe.token_ratios(logp_n, row.behaviour[part])
            return recipe.sequence_ratios(logp_n, log_ratio_N[part])

        def objectives(part: slice, logp_n: Tensor, entropy_n: Tensor) -> Tensor:
            if own is not None:
                return recipe.with_entropy(own[0][part], entropy_n, training=training)
            kl_n = None if reference_N is None else recipe.kl_penalty(logp_n, reference_N[part])
            ratio_n, advantage_n = ratios(part, logp_n), row.advantage[part]
            return recipe.token_losses(logp_n, ratio_n, advantage_n, training=training, kl_N=kl_n, entropy_N=entropy_n)

        def losses(part: slice, logp_n: Tensor, entropy_n: Tensor) -> Tensor:
            loss_n = objectives(part, logp_n, entropy_n)
            if teacher_N is None or not isinstance(training.teacher, TeacherSpec):
                return loss_n
            nearing_n = recipe.distillation_loss(
                logp_n, row.behaviour[part], teacher_N[part], delta=training.clip_delta
            )
            return loss_n + training.teacher.coefficient * nearing_n

        def weighted(part: slice, logp_n: Tensor, entropy_n: Tensor) -> Tensor:
            total = (losses(part, logp_n, entropy_n) * row.weight[part]).sum() / divisor
            return total if own is None else total + (own[1][part] * logp_n).sum()

        head = output_head(self.model)
        logp_N, entropy_N = head_backward(states_ND, head, row.targets, temperature=temperature, loss=weighted)
        every = slice(None)
        held_N = recipe.held_back(ratios(every, logp_N), training=training)
        loss_N = losses(every, logp_N, entropy_N)
        return RowSums.of(row, logp_N, loss_N, entropy_N, held_N=held_N, reference_N=reference_N, teacher_N=teacher_N)

    def _of_completions(
        self, states_ND: Tensor, row: PackedRow, reference_N: Tensor | None, *, divisor: float
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """Compute the log ratios of whole completions [N], and the custom loss's values and slopes, where needed.

        They take a further product of the head, without gradients.
        """
        training, log_ratio_N = self.spec.training, None
        if training.ratio != "sequence" and self.loss is None:
            return None, None
        temperature = self.spec.sampling.temperature
        logp_N = head_logprobs(states_ND, output_head(self.model), row.targets, temperature=temperature)
        if training.ratio == "sequence":
            log_ratio_N = recipe.sequence_log_ratios(logp_N, row.behaviour, row.completion)
        if self.loss is None:
            return log_ratio_N, None
        return log_ratio_N, self.loss.by_token(logp_N, row, reference_N, training=training, divisor=divisor)

    def _forward(self, row: PackedRow) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute a row's final states [N, D], and the reference's and the teacher's log-probabilities [N] if any."""
        world, dtype = self.execution.world, self.execution.autocast
        # The cache would keep copies of all layers' gathered weights for a second use, which never comes.
        with torch.autocast(world.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            states_ND = final_states(self.model, row)
            return states_ND, self._frozen_logprobs(self.reference, row), self._frozen_logprobs(self.teacher, row)

    def _frozen_logprobs(self, model: PreTrainedModel | None, row: PackedRow) -> Tensor | None:
        """Compute the log-probabilities [N] of a row's tokens by a model, without adapters or gradients."""
        if model is None:
            return None
        with torch.no_grad(), without_adapters(model):
            states_ND = final_states(model, row)
        temperature = self.spec.sampling.temperature
        return head_logprobs(states_ND, output_head(model), row.targets, temperature=temperature)


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums over a row's drawn tokens, in the order of `NAMES`, and the extremes of its ratios and staleness."""

    values: Tensor
    extremes: Tensor

    NAMES = (
        "tokens",
        "loss",
        "entropy",
        "clip_fraction",
        "logprob_gap",
        "mismatch_kl",
        "ratio_mean",
        "kl",
        "teacher_kl",
        "staleness_mean",
    )
    EXTREMES = ("ratio_max", "ratio_min", "staleness_max")

    @staticmethod
    def of(
        row: PackedRow,
        logp_N: Tensor,
        loss_N: Tensor,
        entropy_N: Tensor,
        *,
        held_N: Tensor,
        reference_N: Tensor | None,
        teacher_N: Tensor | None,
    ) -> RowSums:
        """Sum up a row; zeros for a filler row."""
        if not row.weight.any():
            return RowSums(torch.zeros(len(RowSums.NAMES), dtype=torch.float64), torch.full((3,), -torch.inf).double())
        # Clamped, since a ratio beyond e**20 would dominate the mean.
        log_ratio_N = (logp_N - row.behaviour).clamp(-recipe.MAX_LOG_RATIO, recipe.MAX_LOG_RATIO)
        ratio_N = log_ratio_N.exp()
        per_token = (
            torch.ones_like(ratio_N),
            loss_N,
            entropy_N,
            held_N,
            log_ratio_N.abs(),
            ratio_N - log_ratio_N - 1,
            ratio_N,
            torch.zeros_like(ratio_N) if reference_N is None else recipe.kl_penalty(logp_N, reference_N),
            torch.zeros_like(ratio_N) if teacher_N is None else ratio_N * (logp_N - teacher_N),
            row.staleness,
        )
        sums = torch.stack([values.double().sum() for values in per_token])
        extremes = torch.stack([ratio_N.max().double(), -ratio_N.min().double(), row.staleness.max().double()])
        return RowSums(sums.cpu(), extremes.cpu())


class Statistics:
    """A step's sums over its minibatches and this process's rows."""

    def __init__(self) -> None:
        self.updates = 0
        self.skipped = 0
        self.grad_norm = 0.0
        self._values = torch.zeros(len(RowSums.NAMES), dtype=torch.float64)
        self._extremes = torch.full((len(RowSums.EXTREMES),), -torch.inf, dtype=torch.float64)

    def add(self, sums: RowSums) -> None:
        """Add one row's drawn tokens."""
        self._values += sums.values
        self._extremes = torch.maximum(self._extremes, sums.extremes)

    def means(self, world: World) -> dict[str, float]:
        """Return means over the tokens of all processes, 0 without tokens; in nats, versions, or unitless.

        `clip_fraction` is the share of ratios beyond the objective's bounds, `logprob_gap` the mean |log ratio|,
        `mismatch_kl` the mean of ratio - log ratio - 1, an estimate of KL(sampled from || policy now), `teacher_kl`
        that of ratio * (log-probability - the teacher's), an estimate of KL(policy now || teacher).
        """
        tokens, *sums = world.total(self._values).tolist()
        ratio_max, ratio_min, staleness_max = world.largest(self._extremes).tolist() if tokens else (0.0, 0.0, 0.0)
        return {
            **{name: value / max(1.0, tokens) for name, value in zip(RowSums.NAMES[1:], sums, strict=True)},
            "ratio_max": ratio_max,
            "ratio_min": -ratio_min,
            "staleness_max": staleness_max,
            "grad_norm": self.grad_norm / max(1, self.updates),
            "tokens": tokens,
            "minibatches_skipped": float(self.skipped),
        }
