"""Sequence packing: samples one behind the other in rows, instead of each in a padded row of its own.

Samples of one group begin with the same prompt, which stands in a row once: what a layer computes of a token depends on
the tokens before it alone. Which tokens a sample attends to is the row's `Layout`; so a row gives the log-probabilities
that its samples have alone (`tests/unit/coordinator/test_packing.py`). Recurrent policies know no layout: they begin a
sample wherever positions begin anew, and each has its own prompt. Only tokens that the policy drew are predicted: the
prompt and what an environment replied are context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from coordinator.training.groups import Sample

ROW_TOKENS = 512
"""The default, `coordinator.options` has it too: longer rows were faster by less than a tenth for the tiny policy on a
CPU core, and most of a row may be drawn tokens, whose logits take memory."""
WIDEST, WIDEST_RECURRENT = 4, 2
"""A row's samples, each with its prompt and padded to the longest, have at most so many times the row's tokens."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample, its advantage, and how many versions older than the policy in training each of its tokens is."""

    sample: Sample
    advantage: float
    staleness: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where S samples of at most W tokens stand in a row of L.

    `columns` [S, W] are the row's columns of each sample's tokens, its prompt's among them, and 0 behind its end;
    `places` [L] say where in `columns`, flattened, each column of the row is found: once, if more samples share it.
    """

    columns: Tensor
    places: Tensor

    def to(self, device: torch.device) -> Layout:
        """The same on a device."""
        return Layout(self.columns.to(device), self.places.to(device))


@dataclass(frozen=True, slots=True)
class Row:
    """L tokens, of which N were drawn. `ids` and `positions` [1, L]; the others [N].

    `predicts` are the indexes in the row whose logits predict the drawn tokens `targets`; `behaviour` are the
    log-probabilities with which those were drawn. `weight` is 1, or 0
    in a row that only fills up. A recurrent policy's rows have no layout.
    """

    layout: Layout | None
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
        return self._changed(lambda tensor: tensor.to(device), self.layout and self.layout.to(device))

    def filler(self) -> Row:
        """A row that changes nothing: processes meet in every forward pass, so none may have fewer."""
        first = torch.zeros(1, dtype=torch.int64)
        cut = self._changed(lambda tensor: tensor[..., :1], self.layout and Layout(first[None], first))
        return replace(cut, predicts=torch.zeros_like(cut.predicts), weight=torch.zeros_like(cut.weight))

    def _changed(self, change: Callable[[Tensor], Tensor], layout: Layout | None) -> Row:
        tensors = {each.name: change(getattr(self, each.name)) for each in fields(self) if each.name != "layout"}
        return Row(layout=layout, **tensors)


def pack(scored: Sequence[Scored], *, row_tokens: int, recurrent: bool = False) -> list[Row]:
    """Rows of at most `row_tokens` tokens, in the samples' order; a longer sample has one to itself.

    A model pads a row's samples to the longest, at least in its attention: one long sample among many short ones would
    take the memory of as many long ones, so these begin a row before they do.
    """
    widest = row_tokens * (WIDEST_RECURRENT if recurrent else WIDEST)
    rows: list[list[Scored]] = []
    room = longest = 0
    for each in scored:
        length = sample_tokens(each.sample)
        longest = max(longest, length)
        has_prompt = bool(rows) and not recurrent and rows[-1][-1].sample.prompt_ids == each.sample.prompt_ids
        added = length - len(each.sample.prompt_ids) if has_prompt else length
        if not rows or added > room or (len(rows[-1]) + 1) * longest > widest:
            rows.append([])
            room, longest, added = row_tokens, length, length
        rows[-1].append(each)
        room -= added
    return [_row(samples, shares_prompts=not recurrent) for samples in rows]


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


def _row(scored: Sequence[Scored], *, shares_prompts: bool) -> Row:
    ids: list[int] = []
    positions: list[int] = []
    columns: list[list[int]] = []
    predicts: list[int] = []
    prompt: tuple[int, ...] | None = None
    for each in scored:
        sequence = list(_sequence(each.sample))
        shared = len(each.sample.prompt_ids) if shares_prompts and each.sample.prompt_ids == prompt else 0
        own = range(len(ids), len(ids) + len(sequence) - shared)
        columns.append([*columns[-1][:shared], *own] if shared else [*own])
        predicts += [columns[-1][at - 1] for at, (_, is_drawn) in enumerate(sequence) if is_drawn]
        ids += [token for token, _ in sequence[shared:]]
        positions += range(shared, len(sequence))
        prompt = each.sample.prompt_ids
    return Row(
        layout=_layout(columns, len(ids)) if shares_prompts else None,
        ids=torch.tensor(ids)[None],
        positions=torch.tensor(positions)[None],
        predicts=torch.tensor(predicts),
        targets=torch.tensor([token for each in scored for token in each.sample.completion_ids]),
        behaviour=torch.tensor([logprob for each in scored for logprob in each.sample.logprobs]),
        advantage=torch.tensor([each.advantage for each in scored for _ in each.sample.completion_ids]),
        staleness=torch.tensor([versions for each in scored for versions in each.staleness]),
        weight=torch.ones(len(predicts)),
    )


def _layout(columns: Sequence[Sequence[int]], length: int) -> Layout:
    width = max(map(len, columns))
    places = torch.zeros(length, dtype=torch.int64)
    padded = torch.zeros(len(columns), width, dtype=torch.int64)
    for line, own in enumerate(columns):
        padded[line, : len(own)] = own_columns = torch.tensor(own)
        places[own_columns] = torch.arange(line * width, line * width + len(own))
    return Layout(padded, places)
