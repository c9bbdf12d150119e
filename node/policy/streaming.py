"""Numbers of tensors between files and memory, a piece of a few MiB at a time.

Files are read, not mapped: mapped pages count as a process's memory for as long as the file is open, which doubles what
loading a policy takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.policy.config import DTYPES
from node.policy.weights import ITEM_BYTES, StoredTensor

PIECE_BYTES: Final = 4 * 2**20

_EXPONENTS: Final = {"F32": ("<u4", 0x7F80_0000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}
"""The bits of a number that are all set if it is not finite, by safetensors' name of its dtype."""

Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SeenChunks:
    """Which chunks of a file hold only finite numbers, if its numbers have the dtype `stored_as`."""

    stored_as: str
    chunk_bytes: int
    is_seen: bytes

    def unseen(self, tensor: StoredTensor) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of the numbers of a tensor that are in no seen chunk."""
        item = ITEM_BYTES[tensor.dtype]
        if tensor.dtype != self.stored_as or tensor.start % item or self.chunk_bytes % item:
            yield 0, tensor.count
            return
        at, end = tensor.start, tensor.start + tensor.count * item
        while at < end:
            chunk = at // self.chunk_bytes
            until = min(end, (chunk + 1) * self.chunk_bytes)
            if not self.is_seen[chunk]:
                yield (at - tensor.start) // item, (until - at) // item
            at = until


def are_finite(data: Buffer, *, stored_as: str) -> bool:
    """Return whether all numbers in `data`, which is not empty, are finite; `stored_as` is safetensors' dtype.

    Their exponents are compared as integers, which takes a small part of the time of torch's `isfinite`.
    """
    kind, exponent = _EXPONENTS[stored_as]
    return bool(np.bitwise_and(np.frombuffer(data, kind), exponent).max() != exponent)


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
        if not are_finite(piece.view(torch.uint8).numpy(), stored_as=stored.dtype):
            return False
        flat[at : at + len(piece)].copy_(piece)
        at += len(piece)
    return True


def write_numbers(file: BinaryIO, pieces: Iterable[Tensor], *, tensors: Iterable[tuple[int, torch.dtype]]) -> int:
    """Write `tensors`, each so many numbers in a dtype, made of `pieces`; return how many were written.

    No piece has numbers of two tensors, and each is released before the next one is taken. Raises OSError.
    """
    waiting, written = iter(tensors), 0
    left, dtype = 0, torch.float32
    for piece in pieces:
        while left <= 0 < piece.numel():
            left, dtype = next(waiting, (piece.numel(), dtype))
        left -= piece.numel()
        written += _write(file, piece.detach(), dtype)
        del piece
    return written


def _write(file: BinaryIO, tensor: Tensor, dtype: torch.dtype) -> int:
    flat = tensor.reshape(-1)
    pieces = (piece.to("cpu", dtype) for piece in torch.split(flat, PIECE_BYTES // flat.element_size()))
    file.writelines(piece.contiguous().view(torch.uint8).numpy().data for piece in pieces)
    return len(flat)
