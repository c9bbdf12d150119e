"""Find the k largest magnitudes of many chunks, with ties broken by position.

`torch.topk` breaks ties as its kernel pleases, so a GPU and a CPU holding the same bits would choose different points.
Here the lower index wins on every device: equal activations always give the same points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAGNITUDE_BITS = 0x7FFF
_MAX_FOLD = 8
# Elements folded at once: 2 MiB of bf16, to stay in a core's cache.
_FOLD_ELEMENTS = 2**20


def largest(bits: Tensor, k: int) -> Tensor:
    """Return indices [n, k], int64 and unordered, of the k largest magnitudes of each row of `bits` [n, N].

    `bits`: int16 patterns of bfloat16; k <= N. Ties go to the lower index.

    Rows are folded repeatedly to maxima of a few elements each. The k columns with the largest maxima hold k elements
    at or above the smallest of these maxima, so nothing below it can be among the k largest, and only columns that
    reach it are unfolded. The few remaining elements are ranked exactly.
    """
    tables = [_as_table(bits, k)]
    maxima = _magnitude_maxima(tables[0])
    while (coarser := _as_table(maxima, k)).shape[1] == _MAX_FOLD:
        tables.append(coarser)
        maxima = coarser.amax(1)
    floor = coarser.amax(1).topk(k, dim=1, sorted=False).values.amin(1)
    position = (maxima >= floor.unsqueeze(1)).view(-1).nonzero().squeeze(1)
    magnitude = maxima
    for table in reversed(tables):
        position, magnitude = _unfold(table, position, floor)
    return _rank_candidates(position, magnitude, bits.shape, k)


def _fold_factor(size: int, k: int) -> int:
    """Return the largest power of two up to 8 that divides `size` and leaves at least 4 k columns if possible."""
    fold = math.gcd(size, _MAX_FOLD)
    while fold > 1 and size // fold < 4 * k:
        fold //= 2
    return fold


def _as_table(values: Tensor, k: int) -> Tensor:
    """View [n, N] as [n, fold, columns]; column j is {j, j + columns, ...}, so that maxima run over contiguous
    memory.
    """
    n, size = values.shape
    fold = _fold_factor(size, k)
    return values.view(n, fold, size // fold)


def _magnitude_maxima(table: Tensor) -> Tensor:
    rows = max(1, _FOLD_ELEMENTS // table[0].numel())
    return torch.cat([(part & MAGNITUDE_BITS).amax(1) for part in torch.split(table, rows)])


def _unfold(table: Tensor, position: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Find the elements of some columns of `table` [n, fold, columns] that reach their row's floor [n].

    `position`: of the columns, counted through all rows. Returns positions in the flattened table and magnitudes.
    """
    _, fold, columns = table.shape
    row = position // columns
    offset = torch.arange(0, fold * columns, columns, device=position.device).unsqueeze(1)
    positions = (position + row * ((fold - 1) * columns) + offset).view(-1)
    magnitude = table.view(-1).index_select(0, positions) & MAGNITUDE_BITS
    reaches = (magnitude.view(fold, -1) >= floor.index_select(0, row)).view(-1).nonzero().squeeze(1)
    return positions.index_select(0, reaches), magnitude.index_select(0, reaches)


def _rank_candidates(position: Tensor, magnitude: Tensor, shape: torch.Size, k: int) -> Tensor:
    """Return indices [n, k] of the k largest of each of n rows from candidate positions and magnitudes."""
    n, size = shape
    row = position // size
    # Ascending: by row, then the largest magnitude first, then the lowest index.
    key = ((row << 15) + (MAGNITUDE_BITS - magnitude)) * size + (position - row * size)
    counts = torch.bincount(row, minlength=n)
    first = counts.cumsum(0) - counts
    rank = first.unsqueeze(1) + torch.arange(k, device=position.device)
    return key.sort().values[rank] % size
