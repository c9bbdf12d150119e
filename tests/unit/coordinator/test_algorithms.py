"""Algorithms by name: an operator who asks for DAPO must get the loss that everybody else means by it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from coordinator.training import recipe
from node.protocol.algorithms import ALGORITHMS
from node.protocol.run import RunSpec, TrainingSpec, parse_run_toml
from shardcast.errors import Malformed

TRL = json.loads((Path(__file__).parents[2] / "vectors" / "training" / "trl.json").read_text())


def run(*training: str, batch: str = "") -> RunSpec:
    lines = ('name = "a"', "[[environments]]", 'name = "arithmetic"', "[training]", *training, "[batch]", batch)
    return parse_run_toml("\n".join(lines))


def flat(name: str) -> torch.Tensor:
    return torch.tensor([value for line in TRL[name] for value in line])


def loss_of(training: TrainingSpec) -> tuple[float, torch.Tensor]:
    """The loss of TRL's tensors by our recipe, and its gradient along the log-probabilities [N]."""
    lengths = [len(line) for line in TRL["now"]]
    completion = torch.tensor([at for at, length in enumerate(lengths) for _ in range(length)])
    advantage = torch.tensor(TRL["advantages"])[completion]
    weight = torch.tensor([recipe.completion_weight(length, training=training) for length in lengths])[completion]
    logp, behaviour = flat("now").requires_grad_(), flat("sampled")
    if training.ratio == "sequence":
        ratio = recipe.sequence_ratios(logp, recipe.sequence_log_ratios(logp, behaviour, completion))
    else:
        ratio = recipe.token_ratios(logp, behaviour)
    kl = recipe.kl_penalty(logp, flat("reference")) if training.kl_coefficient else None
    losses = recipe.token_losses(logp, ratio, advantage, training=training, kl_N=kl, entropy_N=torch.zeros_like(logp))
    loss = (losses * weight).sum() / recipe.loss_divisor(lengths, training=training, most=TRL["most"])
    return loss.item(), torch.autograd.grad(loss, logp)[0]


@pytest.mark.parametrize("name", TRL["losses"])
def test_a_named_algorithm_is_the_loss_that_trl_computes_under_that_name(name):
    loss, gradient = loss_of(run(f'algorithm = "{name}"').training)
    wanted = torch.tensor([value for line in TRL["losses"][name]["gradient"] for value in line])
    assert loss == pytest.approx(TRL["losses"][name]["loss"], abs=1e-6)
    assert (gradient - wanted).abs().max() < 1e-6


def test_each_algorithm_of_trl_and_ours_differs_from_the_others():
    """Otherwise a comparison with tensors that reach no bound would prove nothing."""
    losses = [loss_of(run(f'algorithm = "{name}"').training)[0] for name in ALGORITHMS]
    assert len({round(loss, 5) for loss in losses}) == len(ALGORITHMS)
    assert set(TRL["losses"]) == set(ALGORITHMS) - {"intellect-3"}  # TRL masks nothing


def test_a_key_of_run_toml_holds_over_the_algorithms():
    training = run('algorithm = "dapo"', "clip_epsilon_high = 0.5").training
    assert (training.clip_epsilon_high, training.overlong_share) == (0.5, 0.2)


def test_dapo_takes_groups_with_signal_alone_unless_run_toml_says_otherwise():
    assert run('algorithm = "dapo"').batch.only_signal
    assert not run('algorithm = "dapo"', batch="only_signal = false").batch.only_signal
    assert not run('algorithm = "gspo"').batch.only_signal


@pytest.mark.parametrize("name", ['"ppo"', "3", '["dapo"]', "{}"])
def test_an_algorithm_that_there_is_not_is_named_with_those_that_there_are(name):
    with pytest.raises(Malformed, match=r"training\.algorithm is one of grpo, dr-grpo, dapo, gspo, cispo"):
        run(f"algorithm = {name}")


def test_overlong_completions_lose_up_to_a_whole_reward():
    training = TrainingSpec(overlong_share=0.2)
    lost = [recipe.overlong_penalty(tokens, training=training, most=100) for tokens in (1, 80, 85, 90, 100)]
    assert lost == pytest.approx([0.0, 0.0, 0.25, 0.5, 1.0])
    assert recipe.overlong_penalty(100, training=TrainingSpec(), most=100) == 0.0


def test_a_completions_ratio_is_the_geometric_mean_of_its_tokens():
    """And moves with each of them: without a gradient through every token, GSPO would train on nothing."""
    logp, behaviour = torch.tensor([-1.0, -2.0, -0.5]).requires_grad_(), torch.tensor([-1.5, -1.0, -0.5])
    completion = torch.tensor([0, 0, 1])
    ratio = recipe.sequence_ratios(logp, recipe.sequence_log_ratios(logp, behaviour, completion))
    mean = math.exp(-0.25)
    assert ratio.tolist() == pytest.approx([mean, mean, 1.0])
    (slope,) = torch.autograd.grad((ratio * torch.tensor([0.5, 0.5, 1.0])).sum(), logp)
    assert slope.tolist() == pytest.approx([mean / 2, mean / 2, 1.0])
