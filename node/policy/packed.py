"""Several sequences as one input of a model: packed into a row, where what they begin with in common stands once.

A layer's per-token results depend on earlier tokens only, so a shared beginning needs computing once. A layout tells
attention which of the row's columns a sequence consists of (`node.policy.packed_attention`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor

PART_TOKENS: Final = 4096
"""Tokens that attention computes together without gradients, each sequence's counted as the longest's."""


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """The first `tokens` tokens of `samples` samples from number `sample` on: the row's columns from `column` on."""

    column: int
    tokens: int
    sample: int
    samples: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Positions of S samples of at most W tokens in a row of L, for gradients.

    `columns` [S, W] are the row's columns of each sample's tokens, prompt included, and its own first column behind its
    end; `flat_index` [L] is the inverse: where each column of the row is found in flattened `columns`, in the last of
    the samples that share it. `prompts` are those that several samples share.
    """

    columns: Tensor
    flat_index: Tensor
    prompts: tuple[SharedPrompt, ...] = ()

    @staticmethod
    def of(columns: Sequence[Sequence[int]], *, length: int) -> PackedLayout:
        """Lay out samples by their columns in a row of `length`; those that share a prompt stand beside each other."""
        padded = _padded(columns)
        flat_index = torch.zeros(length, dtype=torch.int64)
        for line, own in enumerate(columns):
            flat_index[torch.tensor(own)] = line * padded.shape[1] + torch.arange(len(own))
        return PackedLayout(padded, flat_index, tuple(_shared_prompts(columns)))

    def to(self, device: torch.device) -> PackedLayout:
        """Move to a device."""
        return PackedLayout(self.columns.to(device), self.flat_index.to(device), self.prompts)


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """S sequences of at most W tokens that attention computes together, their tokens from number `first` on.

    `columns` [S, W] are as a `PackedLayout`'s. The row's columns `given` [N] get their results from here: they are at
    `places` [N] of flattened [S, W - first].
    """

    columns: Tensor
    first: int
    given: Tensor
    places: Tensor

    def to(self, device: torch.device) -> LayoutPart:
        """Move to a device."""
        return LayoutPart(self.columns.to(device), self.first, self.given.to(device), self.places.to(device))


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Positions of sequences in a row, where nothing asks for gradients: each may begin as the one before it.

    What a sequence shares is computed with the first that has it, also in attention where that is most of it. A part
    holds sequences of similar length, at most PART_TOKENS tokens or one sequence.
    """

    parts: tuple[LayoutPart, ...]

    @staticmethod
    def of(columns: Sequence[Sequence[int]], *, shared: Sequence[int]) -> PackedParts:
        """Lay out sequences by their columns, of which the first `shared[i]` are those of the sequence before."""
        lines = [line for line, own in enumerate(columns) if shared[line] < len(own)]
        mostly_shared = [line for line in lines if 2 * shared[line] > len(columns[line])]
        others = [line for line in lines if 2 * shared[line] <= len(columns[line])]
        parts = [
            _part([columns[kind[at]] for at in part], [shared[kind[at]] for at in part], skips=kind is mostly_shared)
            for kind in (others, mostly_shared)
            for part in by_length([len(columns[line]) for line in kind], most=PART_TOKENS)
        ]
        return PackedParts(tuple(parts))

    def to(self, device: torch.device) -> PackedParts:
        """Move to a device."""
        return PackedParts(tuple(part.to(device) for part in self.parts))


@dataclass(frozen=True, slots=True)
class PackedIds:
    """A row's token `ids` and their `positions` in their sequences, and each sequence's `columns`."""

    ids: list[int]
    positions: list[int]
    columns: list[list[int]]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a model without its head reads of several sequences: `ids` [B, T].

    `places` are each sequence's own tokens in flattened `ids`. They stand in one row with `positions` [1, T] and
    `layout`, or each in a line of its own, without these.
    """

    ids: Tensor
    places: tuple[Tensor, ...]
    positions: Tensor | None = None
    layout: PackedParts | None = None

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the model's arguments beside ids, or their embeddings."""
        if self.positions is None or self.layout is None:
            return {}
        return {"position_ids": self.positions.to(device), "layout": self.layout.to(device)}


def pack_ids(sequences: Sequence[Sequence[int]], *, shared: Sequence[int]) -> PackedIds:
    """Put sequences into one row; the first `shared[i]` tokens of number i are those of number i - 1."""
    ids: list[int] = []
    positions: list[int] = []
    columns: list[list[int]] = []
    for sequence, known in zip(sequences, shared, strict=True):
        own = range(len(ids), len(ids) + len(sequence) - known)
        columns.append([*columns[-1][:known], *own] if known else [*own])
        ids += sequence[known:]
        positions += range(known, len(sequence))
    return PackedIds(ids, positions, columns)


def packed_input(sequences: Sequence[Sequence[int]], *, shared: Sequence[int]) -> ModelInput:
    """Return the sequences in one row; the first `shared[i]` tokens of number i are those of number i - 1."""
    row = pack_ids(sequences, shared=shared)
    return ModelInput(
        torch.tensor(row.ids)[None],
        tuple(torch.tensor(columns) for columns in row.columns),
        torch.tensor(row.positions)[None],
        PackedParts.of(row.columns, shared=shared),
    )


def padded_input(sequences: Sequence[Sequence[int]]) -> ModelInput:
    """Return the sequences each in a line of its own.

    Padding is on the right, and no token depends on a later one, so it needs no mask and changes nothing.
    """
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    for line, sequence in zip(ids, sequences, strict=True):
        line[: len(sequence)] = torch.tensor(sequence)
    places = tuple(line * width + torch.arange(len(sequence)) for line, sequence in enumerate(sequences))
    return ModelInput(ids, places)


def by_length(lengths: Sequence[int], *, most: int) -> Iterator[list[int]]:
    """Yield the numbers of sequences of similar length, which take at most `most` tokens padded, or are alone."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number], reverse=True):
        if batch and lengths[batch[0]] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _part(columns: Sequence[Sequence[int]], shared: Sequence[int], *, skips: bool) -> LayoutPart:
    """Lay out one part, which has the results of what its sequences do not share; if `skips`, of little else."""
    first = min(shared) if skips else 0
    width = max(map(len, columns)) - first
    given = [column for own, known in zip(columns, shared, strict=True) for column in own[known:]]
    places = [
        line * width + at - first
        for line, (own, known) in enumerate(zip(columns, shared, strict=True))
        for at in range(known, len(own))
    ]
    return LayoutPart(_padded(columns), first, torch.tensor(given), torch.tensor(places))


def _padded(columns: Sequence[Sequence[int]]) -> Tensor:
    """Return columns [S, W] of sequences; behind a sequence's end its first, as no other sequence's may count."""
    width = max(map(len, columns))
    return torch.tensor([[*own, *[own[0]] * (width - len(own))] for own in columns])


def _shared_prompts(columns: Sequence[Sequence[int]]) -> Iterator[SharedPrompt]:
    for column, lines in groupby(range(len(columns)), key=lambda line: columns[line][0]):
        first, *others = lines
        if others:
            tokens = sum(map(operator.eq, columns[first], columns[first + 1]))
            yield SharedPrompt(column, tokens, first, 1 + len(others))
