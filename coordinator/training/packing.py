"""Sequence packing: samples one behind the other in rows, instead of each in a padded row of its own.

A row's positions begin anew with each sample, by which transformers keeps samples from attending to each other; so a
packed row gives the log-probabilities of its samples alone (`tests/unit/coordinator/test_packing.py`). Only tokens that
the policy drew are predicted: the prompt and what an environment replied are context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from coordinator.training.groups import Sample

ROW_TOKENS = 512
"""The default: on two CPU cores rows of 512 were the fastest for the tiny policy, and attention grows with their
square."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample, its advantage, and how many versions older than the policy in training each of its tokens is."""

    sample: Sample
    advantage: float
    staleness: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """L tokens, of which N were drawn. `ids` and `positions` [1, L]; the others [N].

    `predicts` are the indexes in the row whose logits predict the drawn tokens `targets`; `behaviour` are the
    log-probabilities with which those were drawn. `weight` is 1, or 0
    in a row that only fills up.
    """

    ids: Tensor
    positions: Tensor
    predicts: Tensor
    targets: Tensor
    behaviour: Tensor
    advantage: Tensor
    staleness: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> Row:
        """The same on a device."""
        return self._changed(lambda tensor: tensor.to(device))

    def filler(self) -> Row:
        """A row that changes nothing: processes meet in every forward pass, so none may have fewer."""
        cut = self._changed(lambda tensor: tensor[..., :1])
        return replace(cut, predicts=torch.zeros_like(cut.predicts), weight=torch.zeros_like(cut.weight))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Row:
        return Row(**{each.name: change(getattr(self, each.name)) for each in fields(self)})


def pack(scored: Sequence[Scored], *, row_tokens: int, padded: bool = False) -> list[Row]:
    """Rows of at most `row_tokens` tokens, in the samples' order; a longer sample has one to itself.

    With `padded`, for a model that pads a row's samples to the longest (`node.models.base`), these together are at most
    twice `row_tokens` too: one long sample among many short ones would take the memory of as many long ones.
    """
    rows: list[list[Scored]] = []
    room = longest = 0
    for each in scored:
        length = sample_tokens(each.sample)
        longest = max(longest, length)
        if not rows or length > room or (padded and (len(rows[-1]) + 1) * longest > 2 * row_tokens):
            rows.append([])
            room, longest = row_tokens, length
        rows[-1].append(each)
        room -= length
    return [_row(samples) for samples in rows]


def share(rows: Sequence[Row], *, rank: int, size: int) -> list[Row]:
    """What process `rank` of `size` works on: as many rows as each other, of which some may only fill up."""
    filled = [*rows, *[rows[0].filler()] * (-len(rows) % size)]
    return filled[rank::size]


def sample_tokens(sample: Sample) -> int:
    """Tokens of a sample: its prompt, what was drawn, and what the environment replied."""
    replies = sum(len(ids) for _, ids in sample.replies)
    return len(sample.prompt_ids) + len(sample.completion_ids) + replies


def _sequence(sample: Sample) -> Iterator[tuple[int, bool]]:
    """Each token of a sample, and whether the policy drew it."""
    yield from ((token, False) for token in sample.prompt_ids)
    begun = 0
    for drawn_before, reply in sample.replies:
        yield from ((token, True) for token in sample.completion_ids[begun:drawn_before])
        yield from ((token, False) for token in reply)
        begun = drawn_before
    yield from ((token, True) for token in sample.completion_ids[begun:])


def _row(scored: Sequence[Scored]) -> Row:
    tokens = [list(_sequence(each.sample)) for each in scored]
    starts = accumulate((len(sequence) for sequence in tokens), initial=0)
    drawn = [
        start + index - 1
        for start, sequence in zip(starts, tokens, strict=False)
        for index, (_, is_drawn) in enumerate(sequence)
        if is_drawn
    ]
    ids = torch.tensor([token for sequence in tokens for token, _ in sequence])
    predicts = torch.tensor(drawn)
    return Row(
        ids=ids[None],
        positions=torch.cat([torch.arange(len(sequence)) for sequence in tokens])[None],
        predicts=predicts,
        targets=ids[predicts + 1],
        behaviour=torch.tensor([logprob for each in scored for logprob in each.sample.logprobs]),
        advantage=torch.tensor([each.advantage for each in scored for _ in each.sample.completion_ids]),
        staleness=torch.tensor([versions for each in scored for versions in each.staleness]),
        weight=torch.ones(len(predicts)),
    )
