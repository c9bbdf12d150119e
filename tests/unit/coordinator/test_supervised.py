"""Supervised learning over packed rows is that over padded ones."""

from __future__ import annotations

import pytest
import torch

from coordinator.training.groups import Sample
from coordinator.training.grpo import Execution
from coordinator.training.optimizers import make_optimizer
from coordinator.training.packing import Scored, pack
from coordinator.training.supervised import CosineSchedule, packed_backward, packed_loss, supervise
from coordinator.training.warm_start import collate
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import EOS, make_tokenizer
from node.protocol.run import TrainingSpec

PAIRS = [("Q:1+1", "2"), ("Q:rev abc", "<think>c b a</think>cba"), ("Q:1+1", "<think></think>3"), ("Q", "longer" * 6)]


def rows_of(row_tokens: int, *, recurrent: bool):
    tokenizer = make_tokenizer()
    scored = []
    for prompt, completion in PAIRS:
        ids = (*tokenizer(completion)["input_ids"], EOS)
        sample = Sample(tuple(tokenizer(prompt)["input_ids"]), ids, (0.0,) * len(ids))
        scored.append(Scored(sample, 1.0, (0,) * len(ids)))
    return pack(scored, row_tokens=row_tokens, recurrent=recurrent)


@pytest.mark.parametrize("family", ["tiny", "finch"])
def test_packed_rows_have_the_loss_and_gradient_of_padded_ones(family):
    model, padded = MAKERS[family](0), MAKERS[family](0)
    rows = rows_of(32, recurrent=family == "finch")
    assert len(rows) > 1
    loss = packed_backward(model, rows, execution=Execution())
    ids, labels = collate(make_tokenizer(), PAIRS)
    logits = padded(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for left, right in zip(model.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-3, atol=1e-6)
    measured = packed_loss(model, iter([rows[:1], rows[1:]]), execution=Execution())
    assert measured == pytest.approx(loss, abs=1e-5)
    assert not model.training


def test_a_step_whose_gradient_is_not_finite_changes_nothing():
    """One broken row would otherwise end in a model that is not a number, hours later."""
    model = MAKERS["tiny"](0)
    before = [parameter.clone() for parameter in model.parameters()]

    def backward(step):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf if step == 0 else 1e-3)
        return 1.0

    optimizer = make_optimizer(model, TrainingSpec())
    steps = supervise(model, optimizer, CosineSchedule(1e-3, 2, 0), backward, gradient_clip=1.0)
    next(steps)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    next(steps)
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_the_rate_rises_to_its_peak_and_falls_to_its_end():
    schedule = CosineSchedule(1.0, steps=1000, warmup_steps=100, final=0.1)
    assert schedule.rate(0) == pytest.approx(0.01, rel=1e-3)
    assert schedule.rate(999) == pytest.approx(0.1, rel=1e-3)
    assert CosineSchedule(1.0, steps=10, warmup_steps=0).rate(0) == 1.0
