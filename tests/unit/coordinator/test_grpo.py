"""GRPO against numbers worked out by hand: a wrong sign or mean here trains the swarm's policy the wrong way."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coordinator.training.grpo import (
    STD_FLOOR,
    Group,
    Sample,
    collate,
    group_advantages,
    grpo_loss,
    learning_rate,
    make_optimizer,
    split,
    train_step,
)
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
    torch.set_num_threads(1)
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


def loss_of(ratios, advantages, mask=None, **bounds):
    logp = torch.tensor(ratios, dtype=torch.float64).log().sub(2.0).requires_grad_()
    mask_BT = torch.ones(logp.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    loss = grpo_loss(
        logp,
        torch.full_like(logp, -2.0),
        torch.tensor(advantages, dtype=torch.float64)[:, None],
        mask_BT,
        **{"epsilon": 0.2, "delta": 4.0, **bounds},
    )
    loss.backward()
    return loss.item(), logp.grad


@pytest.mark.parametrize(("ratio", "advantage", "objective", "slope"), TOKENS)
def test_two_sided_clipping(ratio, advantage, objective, slope):
    loss, gradient = loss_of([[ratio]], [advantage])
    assert loss == pytest.approx(-objective, rel=1e-12)
    assert gradient.item() == pytest.approx(-slope, rel=1e-12, abs=1e-15)


def test_the_loss_is_a_mean_over_tokens_and_not_over_completions():
    """A mean of means would make each token of a long wrong answer count less."""
    loss, gradient = loss_of([[1.1, 9.0, 9.0], [1.0, 0.9, 0.8]], [1.0, -1.0], [[True, False, False], [True] * 3])
    assert loss == pytest.approx(-(1.1 - 1.0 - 0.9 - 0.8) / 4, rel=1e-12)
    assert gradient[0, 1:].tolist() == [0.0, 0.0]


def test_one_token_that_became_very_likely_cannot_wreck_the_policy():
    """Without delta, a wrong answer whose probability rose since it was sampled has a loss without bound."""
    ratio = math.exp(300)
    loss, gradient = loss_of([[ratio, 1.0]], [-1.0])
    assert loss == pytest.approx((4.0 + 1.0) / 2)
    assert gradient.tolist() == [[0.0, 0.5]]
    unbounded, _ = loss_of([[100.0, 1.0]], [-1.0], delta=1e9)
    assert unbounded == pytest.approx(101 / 2)


def test_what_stands_at_a_masked_position_does_not_matter():
    """Padding and prompts have no behaviour log-probability; infinity times zero is NaN."""
    mask = [[True, False]]
    reference, _ = loss_of([[1.1, 1.0]], [1.0], mask)
    for junk in (0.0, math.inf, 1e300):
        loss, gradient = loss_of([[1.1, junk]], [1.0], mask)
        assert loss == reference
        assert gradient[0, 0].item() == pytest.approx(-1.1)


# Batches.


def test_a_padded_batch_has_the_loss_and_gradient_of_its_samples_alone(model):
    """Otherwise a rollout's weight would depend on the length of its neighbours."""
    scored = [
        (Sample(prompt, completion, tuple(-1.0 - 0.25 * at for at in range(len(completion)))), advantage)
        for prompt, completion, advantage in zip(PROMPTS, COMPLETIONS, (1.0, -0.5, 2.0), strict=False)
    ]

    def token_sum(samples):
        minibatch = collate(samples)
        logits = model(input_ids=minibatch.ids).logits[:, :-1]
        logp = torch.log_softmax(logits, -1).gather(-1, minibatch.ids[:, 1:, None]).squeeze(-1)
        loss = grpo_loss(logp, minibatch.behaviour, minibatch.advantage, minibatch.mask, epsilon=0.2, delta=4.0)
        return loss * minibatch.mask.sum(), minibatch.mask.sum()

    def gradients():
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    together, tokens = token_sum(scored)
    together.backward()
    padded = gradients()
    alone = [token_sum([each]) for each in scored]
    torch.stack([loss for loss, _ in alone]).sum().backward()
    assert tokens == sum(count for _, count in alone) == 3 + 2 + 5
    assert together.item() == pytest.approx(sum(loss.item() for loss, _ in alone), rel=1e-5)
    for left, right in zip(padded, gradients(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize(("samples", "parts"), [(128, [32] * 4), (10, [2, 3, 2, 3]), (3, [1, 1, 1]), (0, [])])
def test_minibatches_are_even_and_in_order(samples, parts):
    scored = [(Sample((1,), (at,), (-1.0,)), 1.0) for at in range(samples)]
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
    assert all(state["step"] == 1 for state in optimizer.state.values())


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
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
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
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
