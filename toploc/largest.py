"""The k largest magnitudes of many chunks, with ties broken by position.

`torch.topk` picks among equal magnitudes as its kernel pleases, so a GPU and a CPU that hold the same bits
disagree on which points a proof passes through. Here the element with the lower index comes first, on every
device, and two parties with equal activations always choose the same points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MAX_GROUP = 64


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """Indices [n, k], int64 and unordered, of the k largest of each row of `magnitudes` [n, N].

    `magnitudes`: non-negative int16. Of equal magnitudes the lower index is taken first. k <= N.

    The k groups with the largest maxima hold k elements at or above the smallest of these maxima, so nothing
    below it can be among the k largest. What is left is little more than k elements, and is ranked exactly.
    """
    n, size = magnitudes.shape
    group = _group_size(size, k)
    # Group j is {j, j + stride, j + 2 * stride, ...}: its maximum is taken over contiguous memory.
    grouped = magnitudes.view(n, group, size // group)
    maxima = grouped.amax(1)
    floor = maxima.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    row, column = (maxima >= floor).nonzero(as_tuple=True)
    members = grouped[row, :, column]
    which, place = (members >= floor[row]).nonzero(as_tuple=True)
    index = place * (size // group) + column[which]
    key = members[which, place].long() * size + (size - 1 - index)
    return size - 1 - _top_keys(key, row[which], n, k) % size


def _group_size(size: int, k: int) -> int:
    """The largest power of two that divides `size`, up to 64, with at least 4 k groups where possible."""
    group = math.gcd(size, _MAX_GROUP)
    while group > 1 and size // group < 4 * k:
        group //= 2
    return group


def _top_keys(key: Tensor, row: Tensor, n: int, k: int) -> Tensor:
    """The k largest keys of each of n rows, [n, k], from a flat list with the rows in ascending order."""
    counts = torch.bincount(row, minlength=n)
    offset = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    table = key.new_full((n, int(counts.max())), -1)
    table[row, offset] = key
    return table.topk(k, dim=1, sorted=False).values
