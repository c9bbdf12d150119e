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


def span(context: list[int], tokens: list[int]) -> Span:
    return Span(row=0, seed=bytes(16), context_ids=context, position=0, token_ids=tokens, proofs=[], first_proof=0)


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

    other = [*PROMPT[:-1], 99]
    # Two groups' completions, mixed, and one segment that begins within a completion.
    spans = [span([1, 2], [5, 6]), *(span(PROMPT, [40 + at, 41, 42]) for at in range(3)), span([1, 2], [7, 8])]
    spans += [span(other, [40, 41]), span([*PROMPT, 40, 41], [60, 61])]
    (batch,) = batches(spans, make_model(3).config)
    own = [batch.input.ids.flatten()[places].tolist() for places in batch.input.places]
    assert [spans[number].input_ids for number in batch.numbers] == own
    prompts = len(PROMPT) + 1 + 2
    assert batch.input.ids.numel() == prompts + 1 + 1 + 3 * 2 + 1 + 1


def states_of_spans(model: Any, spans: list[Span], kept: packed.KeptKeys) -> tuple[list[Tensor], int]:
    """Return the states that each span's tokens are predicted from, and how many tokens were computed."""
    (batch,) = batches(spans, model.config, kept=kept)
    with torch.inference_mode(), packed_attention.packed_attention(model):
        given = batch.input.arguments(torch.device("cpu"))
        states = batch.predicting(model.base_model(batch.input.ids, use_cache=False, **given).last_hidden_state)
    found = dict(zip(batch.numbers, states, strict=True))
    return [found[number] for number in range(len(spans))], batch.input.ids.numel()


@pytest.mark.parametrize("family", families(others=pytest.mark.system))
def test_every_familys_spans_have_the_states_that_they_have_alone_behind_kept_contexts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's first row, then its others, beside a segment, a prompt that another begins with, and a short one."""
    monkeypatch.setattr(packed_attention, "LEAST_PART", WINDOW_TOKENS)
    model: Any = small_model(family)
    if not can_share(model.config):
        pytest.skip("its layers read sequences into states")
    group = [span(PROMPT, [40 + at, 41, 42]) for at in range(3)]
    segment, beginning, short = span([*PROMPT, 41, 41], [60, 61]), span(PROMPT[:4], [*PROMPT[4:], 7]), span([7], [8, 9])
    kept, counts = packed.KeptKeys(), []
    for spans in ([group[0], segment, short], group[1:], [beginning], [*group, segment, beginning, short]):
        found, count = states_of_spans(model, spans, kept)
        counts.append(count)
        for own, states in zip(spans, found, strict=True):
            with torch.inference_mode():
                alone = model.base_model(torch.tensor([own.input_ids]), use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(states, alone[len(own.context_ids) - 1 :], rtol=1e-5, atol=1e-5)
    # A context's last token is computed again, and what no kept context covers: `beginning` needs states of its own.
    assert counts[:3] == [len(PROMPT) + 2 + 3 + 2, 1 + 2 * 2, len(PROMPT)]


def test_what_the_first_row_says_changes_no_bit_of_the_others() -> None:
    """They only share what they begin with, which is computed beside that row."""
    model: Any = make_model(3)
    others = [span(PROMPT, [40 + at, 41, 42]) for at in range(3)]

    def states_behind(tokens: list[int]) -> list[Tensor]:
        kept = packed.KeptKeys()
        states_of_spans(model, [span(PROMPT, tokens)], kept)
        return states_of_spans(model, others, kept)[0]

    for one, other in zip(states_behind([50, 51, 52]), states_behind([99, 98, 97]), strict=True):
        assert torch.equal(one, other)


def test_contexts_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a verifier's memory would grow with what strangers are asked."""
    monkeypatch.setattr(packed, "KEPT_TOKENS", 10)
    kept = packed.KeptKeys()
    assert kept.keep([*range(8)]) == range(8)
    assert kept.keep([*range(8)]) is None
    assert kept.keep([*range(3)]) is None
    assert kept.keep([9, 9]) == range(8, 10)
    assert kept.longest([*range(20)], most=20) == range(8)
    assert kept.longest([*range(20)], most=7) == range(0)


def test_behind_a_lines_end_stands_nothing() -> None:
    """Padding must neither be taken for a sequence's tokens, nor change them."""
    read = padded_input([[5, 6, 7], [8]])
    assert read.ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert [read.ids.flatten()[places].tolist() for places in read.places] == [[5, 6, 7], [8]]
    assert read.arguments(torch.device("cpu")) == {}
