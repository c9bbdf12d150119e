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
    tables = [_folded(bits, k)]
    maxima = _magnitude_maxima(tables[0])
    while (coarser := _folded(maxima, k)).shape[1] == _MAX_FOLD:
        tables.append(coarser)
        maxima = coarser.amax(1)
    floor = coarser.amax(1).topk(k, dim=1, sorted=False).values.amin(1)
    place = (maxima >= floor.unsqueeze(1)).view(-1).nonzero().squeeze(1)
    magnitude = maxima
    for table in reversed(tables):
        place, magnitude = _unfolded(table, place, floor)
    return _ranked(place, magnitude, bits.shape, k)


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


def _unfolded(table: Tensor, place: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """What reaches the floor [n] of its row in some columns of `table` [n, fold, columns]: places and magnitudes.

    `place`: of the columns, counted through all rows; so are the places of the result in the flattened table.
    """
    _, fold, columns = table.shape
    row = place // columns
    offset = torch.arange(0, fold * columns, columns, device=place.device).unsqueeze(1)
    places = (place + row * ((fold - 1) * columns) + offset).view(-1)
    magnitude = table.view(-1).index_select(0, places) & MAGNITUDE_BITS
    reaches = (magnitude.view(fold, -1) >= floor.index_select(0, row)).view(-1).nonzero().squeeze(1)
    return places.index_select(0, reaches), magnitude.index_select(0, reaches)


def _ranked(place: Tensor, magnitude: Tensor, shape: torch.Size, k: int) -> Tensor:
    """Indices [n, k] of the k largest of each of n rows of N elements, from places in all of them, in any order."""
    n, size = shape
    row = place // size
    # Ascending: by row, then the largest magnitude first, then the lowest index.
    key = ((row << 15) + (MAGNITUDE_BITS - magnitude)) * size + (place - row * size)
    counts = torch.bincount(row, minlength=n)
    first = counts.cumsum(0) - counts
    rank = first.unsqueeze(1) + torch.arange(k, device=place.device)
    return key.sort().values[rank] % size
