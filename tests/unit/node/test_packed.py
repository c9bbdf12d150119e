"""Sequences that share a row: each must have the states that it has alone, whatever stands beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_cases import families
from torch import Tensor

from benchmarks.modelling.families import WINDOW_TOKENS, small_model
from node.policy import packed, packed_attention
from node.policy.models.tiny_llama import make_model
from node.policy.packed import common_beginning, packed_input, padded_input
from node.policy.packed_attention import can_share
from node.verification.batches import batches
from node.verification.spans import Span

PROMPT = [*range(3, 3 + 2 * WINDOW_TOKENS)]
# A long prompt's completions, of which one is no longer than another's beginning; a short prompt's; one alone.
SEQUENCES = [
    [*PROMPT, 40],
    [*PROMPT, 40, 41, 42],
    [*PROMPT, 40, 43],
    [*PROMPT, 50, *range(60, 60 + WINDOW_TOKENS)],
    [*PROMPT[:5], 90, *range(3, 3 + 3 * WINDOW_TOKENS)],
    [*PROMPT[:5], 90, 91],
    [7],
]


def states_of(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    shared = [0, *map(common_beginning, sequences, sequences[1:])]
    read = packed_input(sequences, shared=shared)
    assert read.ids.shape == (1, sum(map(len, sequences)) - sum(shared))
    with torch.inference_mode(), packed_attention.packed_attention(model):
        found = model.base_model(read.ids, use_cache=False, **read.arguments(torch.device("cpu"))).last_hidden_state[0]
    return [found[places] for places in read.places]


@pytest.mark.parametrize("family", families(others=pytest.mark.system))
def test_every_familys_sequences_have_the_states_that_they_have_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, caps and sinks included, in several parts, with queries for the ends of lines alone."""
    monkeypatch.setattr(packed, "PART_TOKENS", 5 * WINDOW_TOKENS)
    monkeypatch.setattr(packed_attention, "LEAST_PART", WINDOW_TOKENS)
    monkeypatch.setattr("node.policy.attention.SCORES", 4000)
    model: Any = small_model(family)
    if not can_share(model.config):
        pytest.skip("its layers read sequences into states")
    with torch.inference_mode():
        alone = [model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in SEQUENCES]
    for found, expected in zip(states_of(model, SEQUENCES), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_another_sequence_says_changes_no_bit_of_its_neighbours() -> None:
    """A verdict that somebody else's tokens move could be moved on purpose; not even a NaN passes over."""
    model: Any = make_model(3)
    before = states_of(model, SEQUENCES)
    changed = [[*ids] for ids in SEQUENCES]
    changed[2][-1], changed[3][-4:] = 99, [99] * 4
    model.base_model.embed_tokens.weight.data[99] = float("nan")
    after = states_of(model, changed)
    assert not after[2].isfinite().all()
    assert not after[3].isfinite().all()
    for number in (0, 1, 4, 5, 6):
        assert torch.equal(before[number], after[number])


def test_a_groups_prompt_is_in_a_batch_once_and_a_changed_one_beside_it() -> None:
    """Else a prompt is computed for each completion; one that was changed must not pass for the others'."""

    def span(context: list[int], tokens: list[int]) -> Span:
        return Span(row=0, seed=bytes(16), context_ids=context, position=0, token_ids=tokens, proofs=[], first_proof=0)

    other = [*PROMPT[:-1], 99]
    # Two groups' completions, mixed, and one segment that begins within a completion.
    spans = [span([1, 2], [5, 6]), *(span(PROMPT, [40 + at, 41, 42]) for at in range(3)), span([1, 2], [7, 8])]
    spans += [span(other, [40, 41]), span([*PROMPT, 40, 41], [60, 61])]
    (batch,) = batches(spans, make_model(3).config)
    own = [batch.input.ids.flatten()[places].tolist() for places in batch.input.places]
    assert [spans[number].input_ids for number in batch.numbers] == own
    prompts = len(PROMPT) + 1 + 2
    assert batch.input.ids.numel() == prompts + 1 + 1 + 3 * 2 + 1 + 1


def test_behind_a_lines_end_stands_nothing() -> None:
    """Padding must neither be taken for a sequence's tokens, nor change them."""
    read = padded_input([[5, 6, 7], [8]])
    assert read.ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert [read.ids.flatten()[places].tolist() for places in read.places] == [[5, 6, 7], [8]]
    assert read.arguments(torch.device("cpu")) == {}
