"""Sequence packing: several samples per row, instead of a padded row each.

Samples of one group share a prompt, which stands in a row once (`node.policy.packed`), and a row gives the
log-probabilities its samples have alone (`tests/unit/coordinator/test_packing.py`). In a recurrent policy's rows a
sample begins wherever positions restart, with its own prompt. Only tokens drawn by the policy are predicted; prompt and
replies are context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import torch
from torch import Tensor

from coordinator.training.groups import Sample, count_tokens
from node.policy.packed import PackedLayout, pack_ids

ROW_TOKENS = 512
"""Default, also in `coordinator.commands.options`: longer rows were less than a tenth faster for the tiny policy on a
CPU core, and activations take memory.
"""
MAX_WIDTH, MAX_WIDTH_RECURRENT = 4, 2
"""Bound on a row's samples padded to the longest, as a multiple of the row's tokens."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample, its advantage, each token's staleness in versions, and its tokens' weight in the loss.

    `experts` are those that its tokens but the last met where its log-probabilities are from (`Group`).
    """

    sample: Sample
    advantage: float
    staleness: tuple[int, ...]
    weight: float = 1.0
    experts: bytes = b""


@dataclass(frozen=True, slots=True)
class PackedChoices:
    """The experts that a row's tokens met where their log-probabilities are from: `choices` uint8 [L, bytes] for those
    of `is_known` [L], as `node.policy.routing.replayed_choices` takes them.
    """

    choices: Tensor
    is_known: Tensor

    def to(self, device: torch.device) -> PackedChoices:
        """Move to a device."""
        return PackedChoices(self.choices.to(device), self.is_known.to(device))


@dataclass(frozen=True, slots=True)
class PackedRow:
    """L tokens, of which N were drawn. `ids` and `positions` [1, L]; the others [N].

    `predicts` are the row indices whose final states predict the drawn tokens `targets`; `behaviour` are the
    log-probabilities they were drawn with. `completion` numbers the row's samples from 0, `weight` is their tokens' in
    the loss, 0 in a filler row. A recurrent policy's rows have no layout. `experts` is None where none are known.
    """

    layout: PackedLayout | None
    experts: PackedChoices | None
    ids: Tensor
    positions: Tensor
    predicts: Tensor
    targets: Tensor
    behaviour: Tensor
    advantage: Tensor
    staleness: Tensor
    completion: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> PackedRow:
        """Move to a device."""
        moved = self._map_tensors(lambda tensor: tensor.to(device), self.layout and self.layout.to(device))
        return replace(moved, experts=self.experts and self.experts.to(device))

    def filler(self) -> PackedRow:
        """Return a filler row without effect: all processes need equally many forward passes."""
        first = torch.zeros(1, dtype=torch.int64)
        cut = self._map_tensors(lambda tensor: tensor[..., :1], self.layout and PackedLayout(first[None], first))
        return replace(cut, predicts=torch.zeros_like(cut.predicts), weight=torch.zeros_like(cut.weight))

    def _map_tensors(self, change: Callable[[Tensor], Tensor], layout: PackedLayout | None) -> PackedRow:
        others = ("layout", "experts")
        tensors = {each.name: change(getattr(self, each.name)) for each in fields(self) if each.name not in others}
        return PackedRow(layout=layout, experts=None, **tensors)


def pack(scored: Sequence[Scored], *, row_tokens: int, recurrent: bool = False) -> list[PackedRow]:
    """Pack samples in order into rows of at most `row_tokens` tokens; a longer sample has its own row.

    A model pads a row's samples to the longest, at least in attention: one long sample among many short ones would take
    the memory of as many long ones, so a new row begins before that.
    """
    widest = row_tokens * (MAX_WIDTH_RECURRENT if recurrent else MAX_WIDTH)
    rows: list[list[Scored]] = []
    tokens_left = longest = 0
    for each in scored:
        length = count_tokens(each.sample)
        longest = max(longest, length)
        has_prompt = bool(rows) and not recurrent and rows[-1][-1].sample.prompt_ids == each.sample.prompt_ids
        added = length - len(each.sample.prompt_ids) if has_prompt else length
        if not rows or added > tokens_left or (len(rows[-1]) + 1) * longest > widest:
            rows.append([])
            tokens_left, longest, added = row_tokens, length, length
        rows[-1].append(each)
        tokens_left -= added
    return [_row(samples, shares_prompts=not recurrent) for samples in rows]


def rows_of_process(rows: Sequence[PackedRow], *, rank: int, size: int) -> list[PackedRow]:
    """Return the rows of process `rank` of `size`, padded with fillers to equal numbers."""
    filled = [*rows, *[rows[0].filler()] * (-len(rows) % size)]
    return filled[rank::size]


def _sequence(sample: Sample) -> Iterator[tuple[int, bool]]:
    """Yield each token of a sample, and whether the policy drew it."""
    yield from ((token, False) for token in sample.prompt_ids)
    begun = 0
    for drawn_before, reply in sample.replies:
        yield from ((token, True) for token in sample.completion_ids[begun:drawn_before])
        yield from ((token, False) for token in reply)
        begun = drawn_before
    yield from ((token, True) for token in sample.completion_ids[begun:])


def _row(scored: Sequence[Scored], *, shares_prompts: bool) -> PackedRow:
    sequences = [list(_sequence(each.sample)) for each in scored]
    prompts = [each.sample.prompt_ids for each in scored]
    has_last = [shares_prompts and prompt == last for prompt, last in zip(prompts, [None, *prompts], strict=False)]
    shared = [len(prompt) if has_it else 0 for prompt, has_it in zip(prompts, has_last, strict=True)]
    row = pack_ids([[token for token, _ in sequence] for sequence in sequences], shared=shared)
    drawn = (
        [own[at - 1] for at, (_, is_drawn) in enumerate(sequence) if is_drawn]
        for sequence, own in zip(sequences, row.columns, strict=True)
    )
    return PackedRow(
        layout=PackedLayout.of(row.columns, length=len(row.ids)) if shares_prompts else None,
        experts=_choices(scored, row.columns, len(row.ids)),
        ids=torch.tensor(row.ids)[None],
        positions=torch.tensor(row.positions)[None],
        predicts=torch.tensor([*chain.from_iterable(drawn)]),
        targets=torch.tensor([token for each in scored for token in each.sample.completion_ids]),
        behaviour=torch.tensor([logprob for each in scored for logprob in each.sample.logprobs]),
        advantage=torch.tensor([each.advantage for each in scored for _ in each.sample.completion_ids]),
        staleness=torch.tensor([versions for each in scored for versions in each.staleness]),
        completion=torch.tensor([at for at, each in enumerate(scored) for _ in each.sample.completion_ids]),
        weight=torch.tensor([each.weight for each in scored for _ in each.sample.completion_ids]),
    )


def _choices(scored: Sequence[Scored], columns: Sequence[Sequence[int]], length: int) -> PackedChoices | None:
    """Lay out the experts that samples' tokens met; a shared prompt's are those of the last sample that has any."""
    known = [(own[:-1], each.experts) for each, own in zip(scored, columns, strict=True) if each.experts]
    if not known:
        return None
    first, experts = known[0]
    choices = torch.zeros(length, len(experts) // len(first), dtype=torch.uint8)
    is_known = torch.zeros(length, dtype=torch.bool)
    for own, experts in known:
        # Copied: what bytes hold is not to be written, and torch warns that it might be.
        choices[own] = torch.frombuffer(bytearray(experts), dtype=torch.uint8).view(len(own), -1)
        is_known[own] = True
    return PackedChoices(choices, is_known)
