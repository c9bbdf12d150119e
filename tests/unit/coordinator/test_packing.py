"""Sequence packing: a sample must weigh the same, and say the same, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from family_cases import families
from packed_rows import row_backward, row_logprobs

from benchmarks.modelling.families import WINDOW_TOKENS, small_model
from coordinator.commands.trainer import trainer
from coordinator.training.groups import Sample, count_tokens
from coordinator.training.head import final_states
from coordinator.training.lora import recompute_activations
from coordinator.training.packing import ROW_TOKENS, Scored, _sequence, pack, rows_of_process
from coordinator.training.repeatable import set_training
from node.policy import packed_attention as attention
from node.policy.models.tiny_llama import make_model
from node.policy.packed_attention import packed_attention

SAMPLES = [
    Sample((1, 2, 3), (4, 5), (-1.0, -2.0)),
    Sample((6,), (7, 8, 9, 10), (-0.1, -0.2, -0.3, -0.4)),
    Sample((11, 12, 13, 14), (15,), (-0.5,)),
    # Two turns: the environment said 40, 41 after the second token.
    Sample((16, 17), (18, 19, 20), (-0.6, -0.7, -0.8), replies=((2, (40, 41)),)),
]
# Two groups of the same length, with a conversation among them, and one more sample of the first.
GROUPS = [
    *(Sample((1, 2, 3, 4), (5 + at,) * (1 + at), (-1.0,) * (1 + at)) for at in range(4)),
    *(Sample((1, 2, 3, 5), (5 + at, 60), (-1.0, -0.2), replies=((1, (40, 41 + at)),)) for at in range(3)),
    Sample((1, 2, 3, 4), (5, 6), (-1.0, -0.2)),
]
LONG = Sample((21, 22), tuple(range(23, 23 + 3 * WINDOW_TOKENS)), (-1.0,) * 3 * WINDOW_TOKENS)


def scored(samples):
    return [Scored(sample, float(at), (at,) * len(sample.completion_ids)) for at, sample in enumerate(samples)]


@pytest.fixture(scope="module")
def model():
    made = make_model(3)
    with packed_attention(made):
        yield made


@pytest.mark.parametrize("samples", [SAMPLES, GROUPS], ids=["others", "groups"])
def test_a_packed_sample_has_the_log_probabilities_that_it_has_alone(model, samples):
    """Else a rollout's gradient would depend on its neighbours."""
    (together,) = pack(scored(samples), row_tokens=100)
    with torch.no_grad():
        packed = row_logprobs(model, together, temperature=0.7)
        alone = [row_logprobs(model, pack(scored([sample]), row_tokens=1)[0], temperature=0.7) for sample in samples]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_a_packed_sample_agrees_with_an_ordinary_forward_pass(model):
    """Which knows nothing of packing, of kept logits, or of turns."""
    sample = SAMPLES[3]
    sequence = torch.tensor([[16, 17, 18, 19, 40, 41, 20]])
    with torch.no_grad():
        logprobs = torch.log_softmax(make_model(3)(input_ids=sequence).logits[0].float() / 0.7, -1)
        found = row_logprobs(model, pack(scored(SAMPLES), row_tokens=100)[0], temperature=0.7)[-3:]
    wanted = torch.stack([logprobs[1, 18], logprobs[2, 19], logprobs[5, 20]])
    assert count_tokens(sample) == sequence.numel()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", families(others=pytest.mark.system))
def test_every_family_trains_on_shared_prompts_as_transformers_does_on_whole_samples(family, monkeypatch):
    """Loss and every gradient, with each multiplier of a configuration, and without its dropout.

    A family that does not hand the layout on to its attention would mix samples; so would a second forward pass.
    Windows and capped scores go through in several parts, as of long samples.
    """
    monkeypatch.setattr(attention, "LEAST_PART", WINDOW_TOKENS)
    monkeypatch.setattr("node.policy.attention.SCORES", 4000)
    model = small_model(family)
    model.set_attn_implementation("eager")
    samples = [*GROUPS, *SAMPLES, LONG]

    def logprob(sequence):
        ids, drawn = zip(*_sequence(sequence), strict=True)
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        return sum(logprobs[at - 1, token] for at, token in enumerate(ids) if drawn[at])

    wanted = sum(at * logprob(sample) for at, sample in enumerate(samples))
    wanted.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    largest = max(gradient.abs().max() for gradient in expected.values())
    (row,) = pack(scored(samples), row_tokens=400)
    for recompute in (False, True):
        model.zero_grad()
        if recompute:
            recompute_activations(model)
        set_training(model)
        with packed_attention(model):
            found = (row_backward(model, row, row.advantage) * row.advantage).sum()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
        for name, parameter in model.named_parameters():
            # A bias of keys without positions has none: the softmax does not see it.
            rounding = 2e-5 * expected[name].abs().max() + 1e-7 * largest
            assert (parameter.grad - expected[name]).abs().max() < rounding, name


@pytest.mark.parametrize("samples", [SAMPLES, GROUPS], ids=["others", "groups"])
def test_gradients_of_packed_rows_are_those_of_the_samples(model, samples):
    def gradients(rows):
        model.zero_grad()
        for row in rows:
            row_backward(model, row, row.advantage)
        return [parameter.grad.clone() for parameter in model.parameters()]

    together = gradients(pack(scored(samples), row_tokens=100))
    alone = gradients([row for each in scored(samples) for row in pack([each], row_tokens=1)])
    for left, right in zip(together, alone, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_what_was_drawn_is_predicted_and_nothing_else():
    (row,) = pack(scored(SAMPLES), row_tokens=100)
    assert row.targets.tolist() == [4, 5, 7, 8, 9, 10, 15, 18, 19, 20]
    assert row.behaviour.tolist() == pytest.approx([-1.0, -2.0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7, -0.8])
    assert row.advantage.tolist() == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3]
    assert row.staleness.tolist() == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3]
    assert row.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]


def test_a_prompt_stands_once_in_a_row_for_the_samples_that_follow_each_other():
    """Eight samples of a long prompt would else cost eight prompts."""
    (row,) = pack(scored(GROUPS), row_tokens=100)
    assert row.ids[0].tolist() == [
        *(1, 2, 3, 4, 5, 6, 6, 7, 7, 7, 8, 8, 8, 8),
        *(1, 2, 3, 5, 5, 40, 41, 60, 6, 40, 42, 60, 7, 40, 43, 60),
        *(1, 2, 3, 4, 5, 6),
    ]
    assert row.positions[0, :14].tolist() == [0, 1, 2, 3, 4, 4, 5, 4, 5, 6, 4, 5, 6, 7]
    alone = sum(count_tokens(sample) for sample in GROUPS)
    assert row.ids.numel() == alone - 3 * 4 - 2 * 4
    assert [line.ids.shape[1] for line in pack(scored(GROUPS), row_tokens=100, recurrent=True)] == [alone]


def test_a_row_of_shared_prompts_is_not_read_by_a_model_that_would_not_heed_them():
    """It would take the samples for one sequence, and train on that."""
    (row,) = pack(scored(GROUPS), row_tokens=100)
    with pytest.raises(ValueError, match="ignores the row's layout"):
        final_states(make_model(3), row)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_row_gives_the_same_gradients_bit_for_bit_whatever_the_threads(threads):
    """A run that is resumed, or audited by training again, must find the same weights; shared prompts add gradients."""
    samples = [Sample(tuple(range(5, 65)), (70 + at,) * 8, (-1.0,) * 8) for at in range(8)]
    (row,) = pack(scored(samples), row_tokens=512)
    made, found = make_model(3), set()
    torch.set_num_threads(threads)
    for _ in range(10):
        made.zero_grad()
        with packed_attention(made):
            row_backward(made, row, row.advantage)
        found.add(tuple(parameter.grad.double().sum().item() for parameter in made.parameters()))
    assert len(found) == 1


def test_a_model_computes_as_before_when_its_training_step_is_over():
    made, ids = make_model(3), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = made(input_ids=ids).logits
        with pytest.raises(KeyError), packed_attention(made, None):
            raise KeyError
        assert torch.equal(made(input_ids=ids).logits, before)


@pytest.mark.parametrize(("recurrent", "times"), [(True, 2), (False, 4)])
def test_samples_that_are_padded_to_the_longest_take_no_more_memory_than_a_few_full_rows(recurrent, times):
    """Else one long completion among many short ones ends the trainer."""
    lengths = [2] * 30 + [100] + [2] * 60 + [300] + [2] * 5
    samples = [Sample((1 + at,), (5,) * (length - 1), (-1.0,) * (length - 1)) for at, length in enumerate(lengths)]
    rows = pack(scored(samples), row_tokens=256, recurrent=recurrent)
    assert [each for row in rows for each in row.advantage.unique_consecutive().tolist()] == list(range(len(samples)))
    counts = [row.advantage.unique().numel() for row in rows]
    longest = [int(row.positions.max()) + 1 for row in rows]
    assert 256 < max(count * most for count, most in zip(counts, longest, strict=True)) <= times * 256
    assert all(row.layout is None or row.layout.columns.numel() <= times * 256 for row in rows)


def test_rows_are_full_and_in_order_and_a_long_sample_has_its_own():
    long = Sample(tuple(range(1, 31)), (5,), (-1.0,))
    rows = pack(scored([*SAMPLES, long, SAMPLES[0]]), row_tokens=10)
    assert [row.ids.shape[1] for row in rows] == [10, 5, 7, 31, 5]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_process_has_as_many_rows_and_each_row_is_worked_on_once(size):
    """A process with fewer would leave the others waiting for ever; a row twice would weigh double."""
    rows = pack(scored(SAMPLES), row_tokens=1)[:3]
    shares = [rows_of_process(rows, rank=rank, size=size) for rank in range(size)]
    assert len({len(each) for each in shares}) == 1
    counted = [row.targets.tolist() for each in shares for row in each if row.weight.any()]
    assert sorted(counted) == sorted(row.targets.tolist() for row in rows)


def test_a_row_that_fills_up_adds_nothing(model):
    (row,) = pack(scored(SAMPLES), row_tokens=100)
    model.zero_grad()
    filler = row.filler()
    row_backward(model, filler, filler.weight)
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_the_command_line_packs_rows_as_the_trainer_does_by_itself():
    (option,) = [each for each in trainer.params if each.name == "row_tokens"]
    assert option.default == ROW_TOKENS
