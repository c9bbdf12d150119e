"""Tokenized examples on disk: written once, and mapped by every process.

    tokens.bin      uint32 [tokens], of which the highest bit says that a token is learnt
    examples.npy    int64 [examples, 2]: where each one ends in tokens.bin, and whether it is held out

Rows are held out by a digest of what is read of them: a repeated row, whatever its other columns say, is on one side
only, and the loss on held-out rows is of rows that training has not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from coordinator.sft.recipe import DataCounts, SftRecipe
from coordinator.sft.rendering import RowRenderer, TokenizedExample
from coordinator.sft.rows import BadData, ChatRow, PairRow, RowFault, parse_row, read_lines
from coordinator.training.groups import Sample
from coordinator.training.packing import Scored
from shardcast.files import sync_folder

TOKENS: Final = "tokens.bin"
TABLE: Final = "examples.npy"
MAX_NAMED: Final = 5
"""Lines that a message names."""
_LEARNT: Final = 1 << 31


class Examples:
    """The examples in a folder; `training` and `held_out` are their numbers."""

    def __init__(self, folder: Path) -> None:
        self._tokens: NDArray[np.uint32] = np.memmap(folder / TOKENS, dtype=np.uint32, mode="r")
        table: NDArray[np.int64] = np.load(folder / TABLE, allow_pickle=False)
        self._ends = [0, *table[:, 0].tolist()]
        is_held_out = table[:, 1].tolist()
        self.training = [number for number, is_held in enumerate(is_held_out) if not is_held]
        self.held_out = [number for number, is_held in enumerate(is_held_out) if is_held]

    def scored(self, number: int) -> Scored:
        """Return an example as the packing takes a sample: what is learnt as drawn, what is not as replies."""
        words = self._tokens[self._ends[number] : self._ends[number + 1]].tolist()
        first = next(at for at, word in enumerate(words) if word & _LEARNT)
        prompt, learnt, context = words[:first], list[int](), list[int]()
        replies: list[tuple[int, tuple[int, ...]]] = []
        for word in words[first:]:
            if not word & _LEARNT:
                context.append(word)
                continue
            if context:
                replies.append((len(learnt), tuple(context)))
                context = []
            learnt.append(word ^ _LEARNT)
        sample = Sample(tuple(prompt), tuple(learnt), (0.0,) * len(learnt), replies=tuple(replies))
        return Scored(sample, advantage=1.0, staleness=(0,) * len(learnt))


def write_examples(
    folder: Path, data: Path, recipe: SftRecipe, renderer: RowRenderer, *, max_tokens: int, on_row: Callable[[], None]
) -> DataCounts:
    """Write the examples of the file `data` to `folder`; `on_row` is called before each row, and may raise.

    Raises BadData, which names faulty lines, and OSError.
    """
    digests, of_row, ends = list[int](), list[int](), list[int]()
    faults, too_long, learnt = list[str](), list[int](), 0
    with (folder / TOKENS).open("wb") as file:
        for number, line in read_lines(data):
            on_row()
            try:
                row = parse_row(line, recipe.columns)
                found = list(renderer.examples(row))
            except RowFault as fault:
                faults.append(f"line {number}: {fault}")
                continue
            kept = [each for each in found if len(each.ids) <= max_tokens]
            too_long += [number] * (len(found) - len(kept))
            if not kept:
                continue
            digests.append(_row_digest(row, seed=recipe.seed))
            for each in kept:
                ends.append((ends[-1] if ends else 0) + _write(file, each))
                of_row.append(len(digests) - 1)
                learnt += sum(each.is_learnt)
        file.flush()
        os.fsync(file.fileno())
    if faults:
        more = f"; and {len(faults) - MAX_NAMED:,} more" if len(faults) > MAX_NAMED else ""
        raise BadData(f"{data}: {'; '.join(faults[:MAX_NAMED])}{more}")
    is_held_out = _held_out(digests, share=recipe.held_out)
    table = np.array([ends, [is_held_out[number] for number in of_row]], dtype=np.int64).T
    held_out = int(table[:, 1].sum())
    if held_out == len(table):
        what = f"every row has more than {max_tokens} tokens (--max-tokens)" if too_long else "no rows to train on"
        raise BadData(f"{data}: {what}")
    _save_table(folder, table)
    return DataCounts(
        training=len(table) - held_out,
        held_out=held_out,
        tokens=ends[-1],
        learnt_tokens=learnt,
        too_long=len(too_long),
        too_long_lines=tuple(too_long[:MAX_NAMED]),
    )


def _save_table(folder: Path, table: NDArray[np.int64]) -> None:
    """Write where each example ends and whether it is held out, and have the folder on disk."""
    with (folder / TABLE).open("wb") as file:
        np.save(file, table, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _write(file: BinaryIO, example: TokenizedExample) -> int:
    """Write an example's tokens, and return how many."""
    marks = np.array(example.is_learnt, dtype=np.uint32) * np.uint32(_LEARNT)
    file.write((np.array(example.ids, dtype=np.uint32) | marks).tobytes())
    return len(example.ids)


def _row_digest(row: PairRow | ChatRow, *, seed: int) -> int:
    data = msgspec.json.encode(row, order="sorted")
    return int.from_bytes(blake3(seed.to_bytes(8, "big") + data).digest()[:8], "big")


def _held_out(digests: Sequence[int], *, share: float) -> list[bool]:
    """Choose the rows with the smallest digests: `share` of all, and at least one if there is a share."""
    if not share or not digests:
        return [False] * len(digests)
    bound = sorted(digests)[max(1, round(share * len(digests))) - 1]
    return [digest <= bound for digest in digests]
