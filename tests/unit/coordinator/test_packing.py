"""Sequence packing: a sample must weigh the same, and say the same, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

from coordinator.training.groups import Sample
from coordinator.training.grpo import read
from coordinator.training.packing import Scored, pack, sample_tokens, share
from node.tiny import make_model

SAMPLES = [
    Sample((1, 2, 3), (4, 5), (-1.0, -2.0)),
    Sample((6,), (7, 8, 9, 10), (-0.1, -0.2, -0.3, -0.4)),
    Sample((11, 12, 13, 14), (15,), (-0.5,)),
    # Two turns: the environment said 40, 41 after the second token.
    Sample((16, 17), (18, 19, 20), (-0.6, -0.7, -0.8), replies=((2, (40, 41)),)),
]


def scored(samples):
    return [Scored(sample, float(at), (at,) * len(sample.completion_ids)) for at, sample in enumerate(samples)]


@pytest.fixture(scope="module")
def model():
    return make_model(3)


def test_a_packed_sample_has_the_log_probabilities_that_it_has_alone(model):
    """Else a rollout's gradient would depend on its neighbours."""
    (together,) = pack(scored(SAMPLES), row_tokens=100)
    with torch.no_grad():
        packed = read(model, together, temperature=0.7)[1]
        alone = [read(model, pack(scored([sample]), row_tokens=1)[0], temperature=0.7)[1] for sample in SAMPLES]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_a_packed_sample_agrees_with_an_ordinary_forward_pass(model):
    """Which knows nothing of packing, of kept logits, or of turns."""
    sample = SAMPLES[3]
    sequence = torch.tensor([[16, 17, 18, 19, 40, 41, 20]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=sequence).logits[0].float() / 0.7, -1)
        found = read(model, pack(scored(SAMPLES), row_tokens=100)[0], temperature=0.7)[1][-3:]
    wanted = torch.stack([logprobs[1, 18], logprobs[2, 19], logprobs[5, 20]])
    assert sample_tokens(sample) == sequence.numel()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_gradients_of_packed_rows_are_those_of_the_samples(model):
    def gradients(rows):
        model.zero_grad()
        for row in rows:
            (read(model, row, temperature=1.0)[1] * row.advantage).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    together = gradients(pack(scored(SAMPLES), row_tokens=100))
    alone = gradients(pack(scored(SAMPLES), row_tokens=1))
    for left, right in zip(together, alone, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_what_was_drawn_is_predicted_and_nothing_else():
    (row,) = pack(scored(SAMPLES), row_tokens=100)
    assert row.targets.tolist() == [4, 5, 7, 8, 9, 10, 15, 18, 19, 20]
    assert row.behaviour.tolist() == pytest.approx([-1.0, -2.0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7, -0.8])
    assert row.advantage.tolist() == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3]
    assert row.staleness.tolist() == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3]
    assert row.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]


def test_samples_that_a_model_pads_to_the_longest_take_no_more_memory_than_two_full_rows():
    """Else one long completion among many short ones ends the trainer of a recurrent policy."""
    lengths = [2] * 30 + [100] + [2] * 60 + [300] + [2] * 5
    samples = [Sample((1,) * (length - 1), (5,), (-1.0,)) for length in lengths]

    def padded_tokens(rows):
        begins = [row.positions[0].eq(0).nonzero().flatten().tolist() for row in rows]
        return [int(row.positions.max() + 1) * len(each) for row, each in zip(rows, begins, strict=True)]

    rows = pack(scored(samples), row_tokens=256, padded=True)
    assert max(padded_tokens(rows)) <= 2 * 256 < max(padded_tokens(pack(scored(samples), row_tokens=256)))
    assert torch.equal(torch.cat([row.advantage for row in rows]), torch.arange(float(len(samples))))


def test_rows_are_full_and_in_order_and_a_long_sample_has_its_own():
    long = Sample(tuple(range(1, 31)), (5,), (-1.0,))
    rows = pack(scored([*SAMPLES, long, SAMPLES[0]]), row_tokens=10)
    assert [row.ids.shape[1] for row in rows] == [10, 5, 7, 31, 5]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_process_has_as_many_rows_and_each_row_is_worked_on_once(size):
    """A process with fewer would leave the others waiting for ever; a row twice would weigh double."""
    rows = pack(scored(SAMPLES), row_tokens=1)[:3]
    shares = [share(rows, rank=rank, size=size) for rank in range(size)]
    assert len({len(each) for each in shares}) == 1
    counted = [row.targets.tolist() for each in shares for row in each if row.weight.any()]
    assert sorted(counted) == sorted(row.targets.tolist() for row in rows)


def test_a_row_that_fills_up_adds_nothing(model):
    (row,) = pack(scored(SAMPLES), row_tokens=100)
    model.zero_grad()
    filler = row.filler()
    (read(model, filler, temperature=1.0)[1] * filler.weight).sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())
