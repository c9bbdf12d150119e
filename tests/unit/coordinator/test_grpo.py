"""GRPO against numbers worked out by hand: a wrong sign or mean here trains the swarm's policy the wrong way."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.modelling.families import small_model, telling_fields
from coordinator.errors import StorageFault
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution, environment_rewards, score, split, train_step
from coordinator.training.head import head_backward
from coordinator.training.optimizers import Optimizers, make_optimizer
from coordinator.training.packing import Scored
from coordinator.training.recipe import (
    STD_FLOOR,
    clipped_objective,
    group_advantages,
    held_back,
    kl_penalty,
    learning_rate,
    masked_objective,
    token_losses,
    token_ratios,
)
from coordinator.training.step_line import MOST_TOLD, step_line
from node.policy.experts import routers
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec, TrainingSpec


def run_spec(*, temperature: float = 1.0, **training) -> RunSpec:
    return RunSpec(
        name="test",
        environments=(EnvironmentSpec(name="arithmetic"),),
        sampling=SamplingSpec(temperature=temperature),
        training=TrainingSpec(**{"minibatches": 1, "warmup_steps": 0, **training}),
    )


@pytest.fixture
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


PROMPTS = ((3, 4, 5), (6, 7), (8, 9, 10, 11, 12))
COMPLETIONS = ((13, 14, 1), (15, 1), (16, 17, 18, 19, 1), (20,))


@torch.no_grad()
def on_policy(model, prompt, completion, *, temperature=1.0) -> Sample:
    """The sample with the model's own log-probabilities, from one unpadded forward pass."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    return Sample(prompt, completion, tuple(logprobs[range(len(completion)), list(completion)].tolist()))


def batch(model, *, temperature=1.0, version=0) -> list[Group]:
    return [
        Group(
            version=version,
            rewards=(1.0, 0.0, 0.0, 0.5),
            rollouts=tuple(on_policy(model, prompt, each, temperature=temperature) for each in COMPLETIONS),
        )
        for prompt in PROMPTS
    ]


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Advantages.


def test_a_forward_pass_in_autocast_keeps_no_copy_of_every_layers_weights(model) -> None:
    """Such copies are of gathered weights: two bytes of each parameter on each GPU, however many share the model."""
    seen: list[bool] = []
    model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    spec, execution = run_spec(), Execution(autocast=torch.bfloat16, recompute=True)
    train_step(model, make_optimizer(model, spec.training), batch(model), spec=spec, step=0, execution=execution)
    assert seen[-1] is False


def test_advantages_are_distances_from_the_groups_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize=False) == [0.5, -0.5, -0.5, 0.5]
    std = 0.5773502691896257  # of 1, 0, 0, 1 with n - 1
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize=True) == pytest.approx(
        [0.5 / (std + 1e-4), -0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0.5 / (std + 1e-4)], rel=1e-12
    )
    # 2, 4, 4, 4, 5, 5, 7, 9 has mean 5 and squared deviations of 32.
    std = math.sqrt(32 / 7)
    assert group_advantages([2, 4, 4, 4, 5, 5, 7, 9], normalize=True)[-1] == pytest.approx(4 / (std + STD_FLOOR))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_have_exactly_no_advantage(reward, normalize):
    """Rounding in the mean must not become an advantage of a full standard deviation."""
    assert group_advantages([reward] * 7, normalize=normalize) == [0.0] * 7


# The loss.

TOKENS = [  # ratio, advantage, objective, d objective / d log-probability
    (1.0, 1.0, 1.0, 1.0),
    (1.1, 1.0, 1.1, 1.1),
    (1.5, 1.0, 1.2, 0.0),  # clipped at 1 + epsilon
    (0.5, 1.0, 0.5, 0.5),  # below the range, but the pessimistic side
    (10.0, 1.0, 1.2, 0.0),
    (1.1, -1.0, -1.1, -1.1),
    (0.5, -1.0, -0.8, 0.0),  # clipped at 1 - epsilon
    (3.0, -1.0, -3.0, -3.0),  # one-sided clipping lets this through
    (10.0, -1.0, -4.0, 0.0),  # bounded by delta
    (10.0, -2.0, -8.0, 0.0),
]


def objective_of(ratios, advantages, objective=clipped_objective, **bounds):
    """Each token's objective, and its slope along the log-probability."""
    logp = torch.tensor(ratios, dtype=torch.float64).log().sub(2.0).requires_grad_()
    ratio = token_ratios(logp, torch.full_like(logp, -2.0))
    found = objective(ratio, torch.tensor(advantages, dtype=torch.float64), **bounds)
    found.sum().backward()
    return found.tolist(), logp.grad.tolist()


@pytest.mark.parametrize(("ratio", "advantage", "objective", "slope"), TOKENS)
def test_two_sided_clipping(ratio, advantage, objective, slope):
    found, gradient = objective_of([ratio], [advantage], epsilon=0.2, delta=4.0)
    assert found == pytest.approx([objective], rel=1e-12)
    assert gradient == pytest.approx([slope], rel=1e-12, abs=1e-15)


def test_one_token_that_became_very_likely_cannot_wreck_the_policy():
    """Without delta, a wrong answer whose probability rose since it was sampled has a loss without bound."""
    found, gradient = objective_of([math.exp(300), 1.0], [-1.0, -1.0], epsilon=0.2, delta=4.0)
    assert found == pytest.approx([-4.0, -1.0])
    assert gradient == [0.0, -1.0]
    unbounded, _ = objective_of([100.0], [-1.0], epsilon=0.2, delta=1e9)
    assert unbounded == pytest.approx([-100.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"),
    [
        (1.0, 2.0, 2.0),
        (0.501, -1.0, -0.501),
        (4.99, 1.0, 4.99),
        (0.49, 1.0, 0.0),
        (5.01, -1.0, 0.0),
        (math.exp(300), -1, 0.0),
    ],
)
def test_tokens_whose_ratio_leaves_the_range_are_masked(ratio, advantage, objective):
    """INTELLECT-3's range. The slope along the log-probability of ratio * A is ratio * A itself."""
    found, gradient = objective_of([ratio], [advantage], masked_objective, low=0.5, high=5.0)
    assert found == pytest.approx([objective], rel=1e-12)
    assert gradient == pytest.approx([objective], rel=1e-12)


def test_the_penalty_is_zero_at_the_reference_and_else_positive():
    """exp(d) - d - 1 for d = log 2 and -log 2, by hand: 2 - 0.6931 - 1 and 0.5 + 0.6931 - 1."""
    logp = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    reference = logp + torch.tensor([0.0, math.log(2), -math.log(2)], dtype=torch.float64)
    assert kl_penalty(logp, reference).tolist() == pytest.approx([0.0, 0.3068528194, 0.1931471806])


def test_the_terms_of_the_loss_add_up_and_those_that_are_off_have_no_part():
    ratio, advantage = torch.tensor([1.1, 0.7]), torch.tensor([1.0, -1.0])
    kl, entropy = torch.tensor([0.5, 0.25]), torch.tensor([2.0, 1.0])
    plain = token_losses(ratio.log(), ratio, advantage, training=TrainingSpec(), kl_N=None, entropy_N=entropy)
    assert plain.tolist() == pytest.approx([-1.1, 0.8])
    both = TrainingSpec(objective="masked", kl_coefficient=0.1, entropy_coefficient=0.01)
    found = token_losses(ratio.log(), ratio, advantage, training=both, kl_N=kl, entropy_N=entropy)
    assert found.tolist() == pytest.approx([-1.1 + 0.05 - 0.02, 0.7 + 0.025 - 0.01])


def test_what_counts_as_held_back():
    ratio = torch.tensor([0.4, 0.79, 0.9, 1.21, 6.0])
    assert held_back(ratio, training=TrainingSpec()).tolist() == [True, True, False, True, True]
    assert held_back(ratio, training=TrainingSpec(objective="masked")).tolist() == [True, False, False, False, True]


# Steps in numbers.


def test_a_step_agrees_with_plain_arithmetic(model):
    """The whole of a step's loss from the logits, in Python floats."""
    temperature, groups, total, tokens = 0.7, [], 0.0, 0
    for prompt in PROMPTS[:2]:
        rewards, samples = (1.0, 0.0, 0.25), []
        for completion, advantage in zip(COMPLETIONS, (1.0 - 1.25 / 3, -1.25 / 3, 0.25 - 1.25 / 3), strict=False):
            behaviour = tuple(-0.5 - 0.75 * at for at in range(len(completion)))
            samples.append(Sample(prompt, completion, behaviour))
            for at, token in enumerate(completion):
                sequence = torch.tensor([[*prompt, *completion[:at]]])
                logits = [value / temperature for value in model(input_ids=sequence).logits[0, -1].tolist()]
                top = max(logits)
                logp = logits[token] - top - math.log(math.fsum(math.exp(value - top) for value in logits))
                ratio = math.exp(logp - behaviour[at])
                total += min(min(ratio, 4.0) * advantage, min(max(ratio, 0.8), 1.2) * advantage)
                tokens += 1
        groups.append(Group(version=3, rewards=rewards, rollouts=tuple(samples)))
    spec = run_spec(temperature=temperature, normalize_advantage=False)
    stats = train_step(model, make_optimizer(model, spec.training), groups, spec=spec, step=0)
    assert stats["loss"] == pytest.approx(-total / tokens, rel=1e-4)
    assert stats["tokens"] == tokens == 2 * (3 + 2 + 5)


@pytest.mark.parametrize("aggregation", ["completions", "length"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_packed_step_by_whole_completions_has_the_gradient_of_separate_ones(model, monkeypatch, ratio, aggregation):
    """Rows that cut a group apart, and chunks that cut a completion apart, must not change its ratio or its weight."""
    monkeypatch.setattr(head_backward, "__kwdefaults__", {"chunk_bytes": 3 * 4 * 32})  # 3 tokens of 32 ids
    spec = run_spec(ratio=ratio, aggregation=aggregation, normalize_advantage=False, gradient_clip=1e9)
    spec = msgspec.structs.replace(spec, sampling=SamplingSpec(max_new_tokens=10))
    groups, plain, losses = [], copy.deepcopy(model), []
    for prompt in PROMPTS[:2]:
        samples = [Sample(prompt, each, tuple(-3.2 - 0.1 * at for at in range(len(each)))) for each in COMPLETIONS]
        groups.append(Group(version=0, rewards=(1.0, 0.0, 0.0, 0.5), rollouts=tuple(samples)))
        for sample, advantage in zip(samples, (0.625, -0.375, -0.375, 0.125), strict=True):
            length = len(sample.completion_ids)
            logits = plain(input_ids=torch.tensor([prompt + sample.completion_ids])).logits[0, len(prompt) - 1 : -1]
            logp = torch.log_softmax(logits, -1)[range(length), list(sample.completion_ids)]
            log_ratio = logp - torch.tensor(sample.logprobs)
            ratios = (log_ratio.mean().expand(length) if ratio == "sequence" else log_ratio).exp()
            objective = torch.minimum(ratios.clamp(max=4.0) * advantage, ratios.clamp(0.8, 1.2) * advantage)
            losses.append(-objective.sum() / (length if aggregation == "completions" else 10))
    (sum(losses) / len(losses)).backward()
    wanted = [parameter.grad for parameter in plain.parameters()]
    optimizer = make_optimizer(model, spec.training)
    train_step(model, optimizer, groups, spec=spec, step=0, execution=Execution(row_tokens=12))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


def test_a_completion_is_overlong_by_its_environments_own_limit():
    """By the run's, an environment with a lower limit would never lose anything."""
    environments = EnvironmentSpec(name="arithmetic", max_new_tokens=4), EnvironmentSpec(name="reverse")
    spec = run_spec(overlong_share=0.5, normalize_advantage=False)
    spec = msgspec.structs.replace(spec, environments=environments, sampling=SamplingSpec(max_new_tokens=40))
    rollouts = tuple(Sample((1,), (7,) * tokens, (-1.0,) * tokens) for tokens in (2, 4))
    own, other = (Group(0, (1.0, 1.0), rollouts, environment=at) for at in (0, 1))
    assert [one.advantage for one in score(own, spec=spec, step=0)] == [0.5, -0.5]
    assert score(other, spec=spec, step=0) == []


def test_a_completion_that_the_end_of_its_thought_left_less_room_is_overlong_all_the_same():
    """Cut off at 6 of 8 tokens, it would keep most of its reward: a thought without an end would pay."""
    spec = run_spec(overlong_share=0.5, normalize_advantage=False)
    ends, rewards = ((2, (8, 9)),), (1.0, 1.0)
    cut_off = Sample((1,), (7,) * 6, (-1.0,) * 6, replies=ends)
    group = Group(0, rewards, (Sample((1,), (7,), (-1.0,)), cut_off))
    single = msgspec.structs.replace(spec, sampling=SamplingSpec(max_new_tokens=8))
    assert [one.advantage for one in score(group, spec=single, step=0)] == [0.5, -0.5]
    several = msgspec.structs.replace(spec, sampling=SamplingSpec(max_new_tokens=8, max_turns=2))
    assert [one.advantage for one in score(group, spec=several, step=0)] == [0.25, -0.25]  # it may be a reply


@pytest.mark.parametrize(("samples", "parts"), [(128, [32] * 4), (10, [2, 3, 2, 3]), (3, [1, 1, 1]), (0, [])])
def test_minibatches_are_even_and_in_order(samples, parts):
    scored = [Scored(Sample((1,), (at,), (-1.0,)), 1.0, (0,)) for at in range(samples)]
    found = split(scored, 4)
    assert [len(part) for part in found] == parts
    assert [pair for part in found for pair in part] == scored


# Steps.


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_fresh_rollouts_have_a_ratio_of_one(model, temperature):
    """A forgotten temperature, or a shift by one position, shows as a gap at once."""
    spec = run_spec(temperature=temperature)
    optimizer = make_optimizer(model, spec.training)
    stats = train_step(model, optimizer, batch(model, temperature=temperature), spec=spec, step=0)
    assert stats["logprob_gap"] < 1e-5
    assert stats["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert stats["clip_fraction"] == 0.0
    assert stats["tokens"] == 3 * (3 + 2 + 5 + 1)
    assert stats["reward"] == pytest.approx(1.5 / 4)
    assert 0.0 < stats["entropy"] < math.log(32)
    stale = train_step(model, optimizer, batch(model, temperature=temperature * 1.5), spec=spec, step=1)
    assert stale["logprob_gap"] > 0.05


def test_training_makes_the_rewarded_completion_likelier_and_the_others_less(model):
    spec = run_spec(learning_rate=3e-3, minibatches=2)
    optimizer = make_optimizer(model, spec.training)
    before = batch(model)
    for step in range(8):
        train_step(model, optimizer, batch(model), spec=spec, step=step)
    for old, new in zip(before, batch(model), strict=True):
        change = [
            math.fsum(b.logprobs) - math.fsum(a.logprobs) for a, b in zip(old.rollouts, new.rollouts, strict=True)
        ]
        assert change[0] > 0.5
        assert max(change[1], change[2]) < -0.5


def test_a_batch_without_signal_is_a_step_that_changes_nothing(model):
    """A worker's constant answers, all wrong alike, must move neither weights nor moments."""
    spec = run_spec(weight_decay=0.1)
    optimizer = make_optimizer(model, spec.training)
    train_step(model, optimizer, batch(model), spec=spec, step=0)
    before = weights(model)
    groups = [Group(0, (each,) * 4, group.rollouts) for each, group in zip((0.0, 1.0, 0.1), batch(model), strict=True)]
    stats = train_step(model, optimizer, groups, spec=spec, step=1)
    assert same(before, weights(model))
    assert (stats["groups_kept"], stats["groups_dropped"], stats["tokens"], stats["loss"]) == (0, 3, 0, 0)
    assert all(state["step"] == 1 for state in optimizer.parts[0].state.values())


def test_each_environments_reward_is_the_mean_of_its_own_completions(model):
    """Else the one of two tasks that collapses hides behind the other's gain."""
    names = ("arithmetic", "reverse", "reverse", "code")
    spec = msgspec.structs.replace(run_spec(), environments=tuple(EnvironmentSpec(name=name) for name in names))
    rewards = {0: (1.0, 0.0, 0.0, 0.0), 1: (1.0, 1.0, 1.0, 0.0), 2: (0.0, 0.0, 1.0, 0.0)}
    groups = [
        Group(0, rewards[at], group.rollouts, environment=at) for at, group in enumerate(batch(model)) if at in rewards
    ]
    stats = train_step(model, make_optimizer(model, spec.training), groups, spec=spec, step=0)
    apart = {key: value for key, value in stats.items() if key.startswith("reward/")}
    assert apart == {"reward/arithmetic": 0.25, "reward/reverse": 0.5}, "of one name are one, and none has no mean"
    line = step_line(1, stats | {"train_seconds": 2.0}, before=0.4)
    assert line.startswith("step 1: reward 0.417 (+0.017) (arithmetic 0.250, reverse 0.500), loss ")
    assert line.endswith("0 of 3 groups unused, 2.0 s")
    silent = stats | {"tokens": 0.0, "groups_kept": 0.0, "groups_dropped": 3.0, "train_seconds": 0.1}
    assert "nothing to train on" in step_line(2, silent, before=None)
    assert "3 of 3 groups unused (one reward throughout)" in step_line(2, silent, before=None)


def test_a_run_of_one_environment_has_one_reward_and_the_log_not_a_hundred(model):
    one = [Group(0, (1.0, 0.0), (), environment=0)]
    assert environment_rewards(one, run_spec()) == {}
    many = msgspec.structs.replace(
        run_spec(), environments=tuple(EnvironmentSpec(name=f"e{at:03}") for at in range(100))
    )
    found = environment_rewards([Group(0, (at / 100,), (), environment=at) for at in range(100)], many)
    assert len(found) == 100
    figures = dict.fromkeys(("reward", "loss", "tokens", "groups_kept", "groups_dropped", "train_seconds"), 1.0)
    line = step_line(1, figures | found, before=None)
    assert line.count("e0") == MOST_TOLD
    assert f"{100 - MOST_TOLD} more)" in line


def test_groups_without_signal_do_not_dilute_the_others(model):
    spec = run_spec()
    groups = batch(model)
    dull = Group(0, (1.0,) * 4, groups[0].rollouts)
    initial = weights(model)
    stats = train_step(model, make_optimizer(model, spec.training), [*groups, dull], spec=spec, step=0)
    diluted = weights(model)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), initial, strict=True):
            parameter.copy_(value)
    train_step(model, make_optimizer(model, spec.training), groups, spec=spec, step=0)
    assert (stats["groups_kept"], stats["groups_dropped"]) == (3, 1)
    assert same(diluted, weights(model))
    assert not same(initial, weights(model))


def test_the_same_rollouts_give_the_same_bits(model):
    """An auditor who repeats a step must get the published weights."""
    spec = run_spec(minibatches=4)
    initial, groups, results = weights(model), batch(model), []
    for _ in range(2):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), initial, strict=True):
                parameter.copy_(value)
        optimizer = make_optimizer(model, spec.training)
        stats = [train_step(model, optimizer, groups, spec=spec, step=step) for step in range(2)]
        results.append((stats, weights(model)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_the_gradient_is_clipped_to_its_norm(model):
    spec = run_spec(gradient_clip=0.01, learning_rate=1.0)
    optimizer = Optimizers([torch.optim.SGD(model.parameters(), lr=1.0)])
    before = weights(model)
    stats = train_step(model, optimizer, batch(model), spec=spec, step=0)
    moved = math.sqrt(sum((a - b).pow(2).sum().item() for a, b in zip(before, weights(model), strict=True)))
    assert stats["grad_norm"] > 0.1
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_that_is_not_finite_is_not_applied(model, caplog):
    """One overflow must not publish a policy of NaN to every worker."""
    spec = run_spec()
    groups = batch(model)
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    before = weights(model)
    stats = train_step(model, make_optimizer(model, spec.training), groups, spec=spec, step=0)
    assert stats["minibatches_skipped"] == 1
    assert all(math.isfinite(value) for value in stats.values())
    assert same(before, weights(model))
    assert "not finite" in caplog.text


def test_the_learning_rate_rises_over_the_warm_up_and_then_stays(model):
    training = TrainingSpec(learning_rate=2e-4, warmup_steps=4)
    rates = [learning_rate(training, step) for step in range(6)]
    assert rates == pytest.approx([5e-5, 1e-4, 1.5e-4, 2e-4, 2e-4, 2e-4])
    assert learning_rate(TrainingSpec(learning_rate=1e-3, warmup_steps=0), 0) == 1e-3
    spec = run_spec(warmup_steps=4)
    optimizer = make_optimizer(model, spec.training)
    train_step(model, optimizer, batch(model), spec=spec, step=1)
    assert optimizer.parts[0].param_groups[0]["lr"] == pytest.approx(1e-4)


def test_the_penalty_holds_a_policy_near_its_reference(model):
    """And is not there, in the loss or in the statistics, where its coefficient is 0."""
    reference = copy.deepcopy(model).requires_grad_(False)
    moved = []
    for coefficient in (0.0, 5.0):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
                parameter.copy_(value)
        spec = run_spec(learning_rate=3e-3, kl_coefficient=coefficient)
        optimizer = make_optimizer(model, spec.training)
        groups = batch(model)
        for step in range(6):
            stats = train_step(model, optimizer, groups, spec=spec, step=step, reference=reference)
        moved.append(stats["kl"])
    assert 0 < moved[1] < moved[0] / 2


def test_staleness_is_counted_for_each_token(model):
    """A completion that two policies drew is as old as its parts: 3 tokens of version 5, 2 of version 6, at step 7."""
    samples = tuple(Sample((1, 2), tuple(range(3, 3 + 5)), (-3.0,) * 5, segments=((5, 3), (6, 2))) for _ in range(2))
    spec = run_spec()
    stats = train_step(model, make_optimizer(model, spec.training), [Group(5, (0.0, 1.0), samples)], spec=spec, step=7)
    assert stats["staleness_mean"] == pytest.approx((3 * 2 + 2 * 1) / 5)
    assert stats["staleness_max"] == 2


def test_the_mismatch_between_the_policies_is_estimated(model):
    """Of ratios 1/2 and 2: r - log r - 1 is 0.1931 and 0.3069; both are beyond 1 +- 0.2, one is beyond [0.5, 5]."""
    found = batch(model)[0]
    shift = (math.log(2), -math.log(2))
    samples = tuple(
        replace(
            sample,
            completion_ids=sample.completion_ids[:2],
            logprobs=tuple(logprob + by for logprob, by in zip(sample.logprobs[:2], shift, strict=True)),
        )
        for sample in found.rollouts
        if len(sample.completion_ids) >= 2
    )
    group = Group(0, tuple(float(at) for at in range(len(samples))), samples)
    spec = run_spec()
    stats = train_step(model, make_optimizer(model, spec.training), [group], spec=spec, step=0)
    assert stats["mismatch_kl"] == pytest.approx((0.1931471806 + 0.3068528194) / 2, rel=1e-3)
    assert (stats["ratio_min"], stats["ratio_max"]) == pytest.approx((0.5, 2.0), rel=1e-3)
    assert stats["ratio_mean"] == pytest.approx(1.25, rel=1e-3)
    assert stats["clip_fraction"] == 1.0


@pytest.mark.parametrize("family", ["llama", "phi3", "seed_oss"])  # of scores, by modules, by functions
def test_a_configuration_with_dropout_trains_like_one_without(family):
    """Rollouts are drawn without dropout: with it every ratio would be off, and no restart would repeat a step."""
    trained = []
    for dropout in (0.0, 0.5):
        fields = telling_fields(family, layers=2)
        dropped = {name: dropout for name in fields if "dropout" in name or "pdrop" in name}
        model = small_model(family, **{"initializer_range": 0.3} | dropped)
        spec = run_spec(minibatches=2)
        train_step(model, make_optimizer(model, spec.training), batch(model), spec=spec, step=0)
        trained.append(weights(model))
    assert same(*trained)


def test_experts_that_the_model_does_not_have_end_a_step_before_it_begins():
    """On a GPU an index beyond a layer's experts ends the process, and says nothing of which group."""
    model = small_model("mixtral")
    spec, samples = run_spec(), (Sample((1, 2), (7,), (-1.0,)), Sample((1, 2), (8,), (-1.0,)))
    width, most = sum(each.top_k for each in routers(model)), min(each.num_experts for each in routers(model))
    for met in (bytes([most]) * (2 * width), bytes(2 * width - 2)):
        group = Group(0, (1.0, 0.0), samples, experts=(b"", met))
        with pytest.raises(StorageFault, match="experts that are not this model's"):
            train_step(model, make_optimizer(model, spec.training), [group], spec=spec, step=0)
    group = Group(0, (1.0, 0.0), samples, experts=(b"", bytes([most - 1]) * (2 * width)))
    assert train_step(model, make_optimizer(model, spec.training), [group], spec=spec, step=0)["samples"] == 2


def test_a_step_says_how_evenly_its_tokens_meet_the_experts():
    """A router that collapses shows in no loss; of a policy without experts there is nothing to say."""
    model = small_model("mixtral")
    shares = []
    for _ in range(2):
        spec = run_spec(learning_rate=0.0)
        stats = train_step(model, make_optimizer(model, spec.training), batch(model), spec=spec, step=0)
        shares.append((stats["busiest_expert"], stats["expert_entropy"]))
        for router in routers(model):
            with torch.no_grad():
                router.weight.zero_()  # equal scores, of which the same two are always the largest
    assert shares[1] == pytest.approx((1.0, math.log(2) / math.log(4)))
    assert 0.5 <= shares[0][0] < 1.0
    assert shares[1][1] < shares[0][1] <= 1.0
    plain = small_model("llama")
    stats = train_step(plain, make_optimizer(plain, spec.training), batch(plain), spec=spec, step=0)
    assert not any("expert" in name for name in stats)
