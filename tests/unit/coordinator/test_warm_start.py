"""The warm start: without it the demonstration's policy never succeeds, and so never learns."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from coordinator.training.warm_start import (
    GUESSING_STAGE,
    WORKED_STAGE,
    collate,
    demonstrate_addition,
    demonstrate_reversal,
    demonstration,
    warm_start,
)
from node.environments.arithmetic import Arithmetic
from node.environments.base import Problem
from node.environments.reverse import Reverse
from node.policy.models.tiny_llama import EOS, UNK, make_tokenizer
from node.protocol.run import SamplingSpec


def test_a_demonstration_shows_its_work():
    addition = Problem("", {"terms": (61, 48), "answer": "109"})
    reversal = Problem("", {"word": "gaeh", "answer": "heag"})
    assert demonstrate_addition(addition, noise=0, rng=Random(0)) == "<think>1+8+0=9,6+4+0=10</think>109"
    assert demonstrate_reversal(reversal, noise=0, rng=Random(0)) == "<think>h e a g</think>heag"
    carries = Problem("", {"terms": (57, 68), "answer": "125"})
    assert demonstrate_addition(carries, noise=0, rng=Random(0)) == "<think>7+8+0=15,5+6+1=12</think>125"


@pytest.mark.parametrize(
    ("source", "demonstrate", "noise", "right"),
    [
        (Arithmetic(), demonstrate_addition, 0.0, (1.0, 1.0)),
        (Reverse(), demonstrate_reversal, 0.0, (1.0, 1.0)),
        (Arithmetic(digits=5), demonstrate_addition, 0.0, (1.0, 1.0)),
        # Two columns are right with .8 squared, or by luck; three to five letters with (.88 + .12 / 8) to the power.
        (Arithmetic(), demonstrate_addition, WORKED_STAGE.addition_noise, (0.62, 0.68)),
        (Reverse(), demonstrate_reversal, WORKED_STAGE.reversal_noise, (0.62, 0.68)),
    ],
)
def test_demonstrations_are_as_often_right_as_their_noise_says(source, demonstrate, noise, right):
    """Without mistakes there would be nothing to learn by reward; with too many, no way to."""
    rng = Random(0)
    problems = [source.problem(index) for index in range(4000)]
    rewards = [source.reward(problem, demonstrate(problem, noise=noise, rng=rng)) for problem in problems]
    assert right[0] <= sum(rewards) / len(rewards) <= right[1]


def test_demonstrations_fit_the_tokenizer_and_the_demonstration_runs_length_limit():
    tokenizer, rng = make_tokenizer(), Random(1)
    for turn in range(300):
        prompt, completion = (
            tokenizer(text)["input_ids"] for text in demonstration(rng, (WORKED_STAGE, GUESSING_STAGE)[turn % 2])
        )
        assert UNK not in prompt + completion
        assert len(completion) + 1 <= SamplingSpec().max_new_tokens


def test_the_loss_is_on_completions_and_their_end_alone():
    tokenizer = make_tokenizer()
    ids, labels = collate(tokenizer, [("Q:1", "<think>2</think>3"), ("Q:", "4")])
    assert ids.shape == labels.shape == (2, 8)
    assert [row[row != -100].tolist() for row in labels] == [
        [*tokenizer("<think>2</think>3")["input_ids"], EOS],
        [*tokenizer("4")["input_ids"], EOS],
    ]
    assert torch.equal(ids[labels != -100], labels[labels != -100])
    assert tokenizer.decode(ids[1][:3]) == "Q:4"


def test_half_of_the_last_demonstrations_skip_the_work():
    """That is what reinforcement learning has to find out."""
    rng = Random(2)
    shown = [demonstration(rng, GUESSING_STAGE) for _ in range(2000)]
    guesses = [completion for _, completion in shown if completion.startswith("<think></think>")]
    assert 0.45 <= len(guesses) / len(shown) <= 0.55
    assert not any(demonstration(rng, WORKED_STAGE)[1].startswith("<think></think>") for _ in range(200))


def test_the_rate_rises_and_then_falls():
    rates = [WORKED_STAGE.schedule.rate(step) for step in range(WORKED_STAGE.steps)]
    assert rates[0] == pytest.approx(WORKED_STAGE.learning_rate / 20)
    assert max(rates) == rates[19] == pytest.approx(WORKED_STAGE.learning_rate, rel=0.01)
    assert rates[-1] == pytest.approx(WORKED_STAGE.learning_rate / 20, rel=0.01)


SHORT = (replace(WORKED_STAGE, steps=1), replace(GUESSING_STAGE, steps=1))


def test_the_same_seed_gives_the_same_bits_and_reports_every_step():
    """An operator who starts a run again must be able to publish the same first version."""
    seen = []
    weights = [
        list(warm_start(seed=seed, stages=SHORT, progress=lambda *args: seen.append(args))[0].parameters())
        for seed in (3, 3, 4)
    ]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])
    assert [(step, total) for step, total, _ in seen] == [(1, 2), (2, 2)] * 3
    assert seen[0] == seen[2]


def test_it_learns():
    losses = []
    model, _ = warm_start(
        stages=[replace(WORKED_STAGE, steps=12)], progress=lambda _step, _total, loss: losses.append(loss)
    )
    assert losses[0] > 4.0
    assert losses[-1] < losses[0] * 0.75
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@torch.no_grad()
def accuracy(model, tokenizer, source):
    torch.manual_seed(0)
    problems = [source.problem(10_000_000 + index) for index in range(256)]
    prompts = tokenizer(
        [problem.prompt for problem in problems], padding=True, padding_side="left", return_tensors="pt"
    )
    output = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        do_sample=True,
        top_k=0,
        max_new_tokens=48,
    )
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(source.reward(problem, text) for problem, text in zip(problems, texts, strict=True)) / len(problems)


@pytest.mark.nightly
def test_the_default_warm_start_leaves_something_to_gain_and_a_way_to_gain_it():
    """It succeeds often enough to learn from, and seldom enough that there is something to learn."""
    model, tokenizer = warm_start()
    rates = [accuracy(model, tokenizer, source) for source in (Arithmetic(), Reverse())]
    assert all(0.1 <= rate <= 0.45 for rate in rates), rates
