"""Numbers of tensors between files and memory, a piece of a few MiB at a time.

Files are read, not mapped: mapped pages count as a process's memory for as long as the file is open, which doubles what
loading a policy takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import torch
from torch import Tensor

from node.policy.config import DTYPES
from node.policy.weights import ITEM_BYTES, StoredTensor

PIECE_BYTES: Final = 4 * 2**20


def read_numbers(stored: StoredTensor, *, first: int = 0, count: int | None = None) -> Iterator[Tensor]:
    """Yield `count` numbers of a tensor from number `first` on (None: all), in its dtype, in flat pieces.

    The pieces share their memory: use one up before taking the next. Raises OSError, also for a file that ends early.
    """
    left = (stored.count - first if count is None else count) * ITEM_BYTES[stored.dtype]
    piece = torch.empty(min(left, PIECE_BYTES), dtype=torch.uint8)
    with stored.file.open("rb") as file:
        file.seek(stored.start + first * ITEM_BYTES[stored.dtype])
        while left:
            piece = piece[:left]
            if file.readinto(piece.numpy().data) != len(piece):
                raise OSError(f"{stored.file} has become shorter")
            yield piece.view(getattr(torch, DTYPES[stored.dtype]))
            left -= len(piece)


def read_into(target: Tensor, stored: StoredTensor, *, first: int = 0) -> bool:
    """Fill `target`, which is contiguous, from number `first` of a stored tensor on, cast to its dtype.

    Return whether all these numbers are finite as stored; the first one that is not ends the reading.
    """
    flat, at = target.view(-1), 0
    for piece in read_numbers(stored, first=first, count=len(flat)):
        if not bool(piece.isfinite().all()):
            return False
        flat[at : at + len(piece)].copy_(piece)
        at += len(piece)
    return True


def write_numbers(file: BinaryIO, tensors: Iterable[Tensor], *, dtype: torch.dtype) -> int:
    """Write the numbers of each tensor in turn, cast to `dtype`, and return how many; raises OSError.

    A tensor is released before the next one is taken from `tensors`.
    """
    written = 0
    for tensor in tensors:
        written += _write(file, tensor.detach(), dtype)
        del tensor
    return written


def _write(file: BinaryIO, tensor: Tensor, dtype: torch.dtype) -> int:
    flat = tensor.reshape(-1)
    pieces = (piece.to("cpu", dtype) for piece in torch.split(flat, PIECE_BYTES // flat.element_size()))
    file.writelines(piece.contiguous().view(torch.uint8).numpy().data for piece in pieces)
    return len(flat)
