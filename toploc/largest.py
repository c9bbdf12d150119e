"""The k largest magnitudes of many chunks, with ties broken by position.

`torch.topk` picks among equal magnitudes as its kernel pleases, so a GPU and a CPU that hold the same bits
disagree on which points a proof passes through. Here the element with the lower index comes first, on every
device, and two parties with equal activations always choose the same points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAGNITUDE_BITS = 0x7FFF

_MAX_FOLD = 8
# Elements folded at once: 2 MiB of bf16, so that maxima are taken of what is still in a core's cache.
_FOLD_ELEMENTS = 2**20


def largest(bits: Tensor, k: int) -> Tensor:
    """Indices [n, k], int64 and unordered, of the k largest magnitudes of each row of `bits` [n, N].

    `bits`: int16, patterns of bfloat16. Of equal magnitudes the lower index is taken first. k <= N.

    Rows are folded to maxima of a few elements each, these to maxima of a few of them, and so on. The k columns with
    the largest maxima hold k elements at or above the smallest of these maxima, so nothing below it can be among
    the k largest, and only columns that reach it are unfolded. What is left is little more than k elements, and is
    ranked exactly.
    """
    n, size = bits.shape
    tables = [_folded(bits, k)]
    maxima = _magnitude_maxima(tables[0])
    while _fold(maxima.shape[1], k) > 1:
        tables.append(_folded(maxima, k))
        maxima = tables[-1].amax(1)
    floor = maxima.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    row, index = (maxima >= floor).nonzero(as_tuple=True)
    for table in reversed(tables):
        row, index = _unfolded(table, row, index, floor)
    key = (bits[row, index] & MAGNITUDE_BITS).long() * size + (size - 1 - index)
    return size - 1 - _top_keys(key, row, n, k) % size


def _fold(size: int, k: int) -> int:
    """The largest power of two that divides `size`, up to 8, with at least 4 k columns where possible."""
    fold = math.gcd(size, _MAX_FOLD)
    while fold > 1 and size // fold < 4 * k:
        fold //= 2
    return fold


def _folded(values: Tensor, k: int) -> Tensor:
    """[n, N] as [n, fold, columns]. Column j is {j, j + columns, ...}: maxima are taken over contiguous memory."""
    n, size = values.shape
    fold = _fold(size, k)
    return values.view(n, fold, size // fold)


def _magnitude_maxima(table: Tensor) -> Tensor:
    rows = max(1, _FOLD_ELEMENTS // table[0].numel())
    return torch.cat([(part & MAGNITUDE_BITS).amax(1) for part in torch.split(table, rows)])


def _unfolded(table: Tensor, row: Tensor, column: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Of table[row, :, column], what reaches the floor [n, 1] of its row: rows, and places in the row unfolded."""
    which, place = ((table[row, :, column] & MAGNITUDE_BITS) >= floor[row]).nonzero(as_tuple=True)
    return row[which], place * table.shape[2] + column[which]


def _top_keys(key: Tensor, row: Tensor, n: int, k: int) -> Tensor:
    """The k largest keys of each of n rows, [n, k], from a flat list with the rows in ascending order."""
    counts = torch.bincount(row, minlength=n)
    offset = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    table = key.new_full((n, int(counts.max())), -1)
    table[row, offset] = key
    return table.topk(k, dim=1, sorted=False).values
