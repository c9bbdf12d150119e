"""Several sequences as one input of a model: packed into a row, where what they begin with in common stands once.

A layer's per-token results depend on earlier tokens only, so a shared beginning needs computing once. A layout tells
attention which of the row's columns a sequence consists of (`node.policy.packed_attention`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor

PART_TOKENS: Final = 4096
"""Tokens that attention computes together without gradients, each sequence's counted as the longest's."""
KEPT_TOKENS: Final = 4096
"""That `KeptKeys` hold at most: 0.47 GB of Qwen3-0.6B, in bfloat16."""


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
    """S sequences of at most W tokens that attention computes together, their tokens from number Q before the last on.

    `columns` [S, W] are as a `PackedLayout`'s, of the kept tokens with the row's behind them, and `queries` [S, Q] the
    row's columns of the last Q; a kept token has no query, and column 0 stands for it. The row's columns `given` [N]
    get their results from here: they are at `places` [N] of flattened [S, Q].
    """

    columns: Tensor
    queries: Tensor
    given: Tensor
    places: Tensor

    def to(self, device: torch.device) -> LayoutPart:
        """Move to a device."""
        parts = (self.columns, self.queries, self.given, self.places)
        return LayoutPart(*(each.to(device) for each in parts))


@dataclass(slots=True)
class KeptKeys:
    """Keys and values of what sequences began with in earlier rows, for later ones that begin so.

    `beginnings` are their ids, each with its numbers among the kept tokens; `layers` has the keys and values
    [1, heads, tokens, D] of all of them. Of one model: what it computed of the same tokens.
    """

    beginnings: list[tuple[list[int], range]] = field(default_factory=list)
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """How many are kept."""
        return self.beginnings[-1][1].stop if self.beginnings else 0

    def keep(self, ids: list[int]) -> range | None:
        """Make room for a beginning; return its numbers, None if it is there or would be too much."""
        numbers = range(self.tokens, self.tokens + len(ids))
        if not ids or numbers.stop > KEPT_TOKENS or any(ids == held for held, _ in self.beginnings):
            return None
        self.beginnings.append((ids, numbers))
        return numbers

    def longest(self, ids: list[int], *, most: int) -> range:
        """Return the numbers of the longest of the beginnings that `ids` has, of at most `most` tokens."""
        own = [numbers for held, numbers in self.beginnings if len(held) <= most and held == ids[: len(held)]]
        return max(own, key=len, default=range(0))

    def with_row(self, layer: int, key: Tensor, value: Tensor, *, keeping: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's kept keys and values with a row's [1, heads, L, D] behind them.

        From then on the columns `keeping` of both together are kept, unless there are none.
        """
        if layer in self.layers:
            held_key, held_value = self.layers[layer]
            key, value = torch.cat([held_key, key], 2), torch.cat([held_value, value], 2)
        if len(keeping):
            self.layers[layer] = key[:, :, keeping], value[:, :, keeping]
        return key, value


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Positions of sequences in a row, where nothing asks for gradients: each may begin as the one before it.

    What a sequence shares is computed with the first that has it, also in attention where that is most of it. A part
    holds sequences of similar length, at most PART_TOKENS tokens or one sequence. Sequences may begin with tokens that
    are `kept`; afterwards the columns `keeping` are.
    """

    parts: tuple[LayoutPart, ...]
    kept: KeptKeys | None = None
    keeping: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @staticmethod
    def of(columns: Sequence[Sequence[int]], *, shared: Sequence[int], before: int = 0) -> PackedParts:
        """Lay out sequences by their columns, of which the first `shared[i]` are of the one before, or kept.

        `before` tokens are kept, and the row's columns are behind these.
        """
        lines = [line for line, own in enumerate(columns) if shared[line] < len(own)]
        mostly_shared = [line for line in lines if 2 * shared[line] > len(columns[line])]
        others = [line for line in lines if 2 * shared[line] <= len(columns[line])]
        parts = [
            _part(
                [columns[kind[at]] for at in part],
                [shared[kind[at]] for at in part],
                skips=kind is mostly_shared,
                before=before,
            )
            for kind in (others, mostly_shared)
            for part in by_length([len(columns[line]) for line in kind], most=PART_TOKENS)
        ]
        return PackedParts(tuple(parts))

    def to(self, device: torch.device) -> PackedParts:
        """Move to a device, but for what is kept, which is where the model is."""
        return PackedParts(tuple(part.to(device) for part in self.parts), self.kept, self.keeping.to(device))


@dataclass(frozen=True, slots=True)
class PackedIds:
    """A row's token `ids` and their `positions` in their sequences, and each sequence's `columns`."""

    ids: list[int]
    positions: list[int]
    columns: list[list[int]]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a model without its head reads of several sequences: `ids` [B, T].

    `places` are each sequence's own tokens in flattened `ids`, below 0 for kept ones. They stand in one row with
    `positions` [1, T] and `layout`, or each in a line of its own, without these.
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


def pack_ids(
    sequences: Sequence[Sequence[int]],
    *,
    shared: Sequence[int],
    begins: Sequence[Sequence[int]] | None = None,
    before: int = 0,
) -> PackedIds:
    """Put sequences into one row; the first `shared[i]` tokens of number i are those of number i - 1.

    Or they have the columns `begins[i]`, where that is not empty. The row's own columns begin at `before`.
    """
    ids: list[int] = []
    positions: list[int] = []
    columns: list[list[int]] = []
    for at, (sequence, known) in enumerate(zip(sequences, shared, strict=True)):
        own = range(before + len(ids), before + len(ids) + len(sequence) - known)
        begin = (begins[at] if begins else ()) or (columns[-1][:known] if known else ())
        columns.append([*begin, *own])
        ids += sequence[known:]
        positions += range(known, len(sequence))
    return PackedIds(ids, positions, columns)


def packed_input(sequences: Sequence[Sequence[int]], *, shared: Sequence[int]) -> ModelInput:
    """Return the sequences in one row; the first `shared[i]` tokens of number i are those of number i - 1."""
    return _packed(pack_ids(sequences, shared=shared), shared=shared)


def packed_behind(
    sequences: Sequence[Sequence[int]],
    *,
    shared: Sequence[int],
    begins: Sequence[range],
    kept: KeptKeys,
    keeping: Sequence[int],
) -> ModelInput:
    """Return the sequences in one row, as `packed_input`, behind what is kept: number i begins with `begins[i]` of it.

    The first `keeping[i]` tokens of number i are kept from then on.
    """
    before = kept.tokens
    row = pack_ids(sequences, shared=shared, begins=begins, before=before)
    read = _packed(row, shared=shared, before=before)
    assert read.layout is not None
    added = [
        column
        for ids, columns, count in zip(sequences, row.columns, keeping, strict=True)
        if kept.keep([*ids[:count]])
        for column in columns[:count]
    ]
    held = [*range(before), *added] if added else []
    return replace(read, layout=replace(read.layout, kept=kept, keeping=torch.tensor(held, dtype=torch.int64)))


def _packed(row: PackedIds, *, shared: Sequence[int], before: int = 0) -> ModelInput:
    return ModelInput(
        torch.tensor(row.ids)[None],
        tuple(torch.tensor(columns) - before for columns in row.columns),
        torch.tensor(row.positions)[None],
        PackedParts.of(row.columns, shared=shared, before=before),
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


def _part(columns: Sequence[Sequence[int]], shared: Sequence[int], *, skips: bool, before: int) -> LayoutPart:
    """Lay out one part, which has the results of what its sequences do not share; if `skips`, of little else."""
    first = min(shared) if skips else 0
    width = max(map(len, columns)) - first
    given = [column for own, known in zip(columns, shared, strict=True) for column in own[known:]]
    places = [
        line * width + at - first
        for line, (own, known) in enumerate(zip(columns, shared, strict=True))
        for at in range(known, len(own))
    ]
    padded = _padded(columns)
    queries = (padded[:, first:] - before).clamp_min(0)
    return LayoutPart(padded, queries, torch.tensor(given) - before, torch.tensor(places))


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
