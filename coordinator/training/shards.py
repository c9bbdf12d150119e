"""Files of tensors' rows: each process writes the rows it holds, and any number of processes reads them back.

A file is a safetensors file of this process's rows, written and hashed from where the tensors lie: on a CPU nothing is
copied, and of a device's tensors one at a time is in memory. Reading checks whole pieces, and copies the rows that
overlap those of the reader.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BLOCK_BYTES = 8 * 1024 * 1024
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that safetensors calls `name`."""
    return next(dtype for dtype, its in _DTYPES.items() if its == name)


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows [start, end) of a tensor's dimension 0 at byte `offset` of `file`, and their BLAKE3; a scalar is one row."""

    file: str
    offset: int
    start: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows from `start` on of a tensor of `shape` that this process holds, in `local`.

    `is_shared` if every process holds the same ones, which the first one writes for all.
    """

    shape: tuple[int, ...]
    start: int
    local: Tensor
    is_shared: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Rows:
        """Return this process's rows of a whole tensor, or of one that is sharded on dimension 0."""
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape), 0, tensor.detach(), is_shared=True)
        _, (start, *others) = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if any(others):
            raise ValueError("a tensor is sharded on another dimension than its first")
        return cls(tuple(tensor.shape), start, tensor.to_local().detach(), is_shared=False)

    @property
    def end(self) -> int:
        return self.start + (self.local.shape[0] if self.shape else 1)

    @property
    def dtype(self) -> str:
        """The dtype's name in safetensors."""
        return _DTYPES[self.local.dtype]

    @property
    def row_bytes(self) -> int:
        count = 1
        for size in self.shape[1:]:
            count *= size
        return count * self.local.element_size()


def write_rows(path: Path, rows: Mapping[str, Rows]) -> dict[str, Piece]:
    """Write a safetensors file of `rows` durably; return each one's piece. Raises OSError."""
    rows = {name: one for name, one in rows.items() if one.end > one.start}
    pieces = dict[str, Piece]()
    try:
        with path.open("wb") as file:
            file.write(_header(rows))
            for name, one in rows.items():
                pieces[name] = Piece(path.name, file.tell(), one.start, one.end, _write_hashed(file, one.local))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # which a write does not say
        raise
    return pieces


def _write_hashed(file: BinaryIO, tensor: Tensor) -> str:
    """Write a tensor's bytes and return their BLAKE3."""
    data, hasher = _bytes_of(tensor), blake3()
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        hasher.update(block)
        file.write(block)
    return hasher.hexdigest()


def read_rows(folder: Path, rows: Rows, pieces: Iterable[Piece]) -> bool:
    """Read `rows` from those of `pieces` that have some; return whether these are whole and as they were written.

    Raises OSError.
    """
    whole = rows.local if rows.local.device.type == "cpu" and rows.local.is_contiguous() else _host_copy(rows.local)
    target, covered, intact = _bytes_of(whole), 0, True
    for piece in pieces:
        start, end = max(piece.start, rows.start), min(piece.end, rows.end)
        if start >= end:
            continue
        covered += end - start
        with (folder / piece.file).open("rb") as file:
            file.seek(piece.offset)
            intact &= _read_piece(file, piece, rows, target)
    if whole is not rows.local:
        rows.local.copy_(whole)
    return intact and covered == rows.end - rows.start


def _read_piece(file: BinaryIO, piece: Piece, rows: Rows, target: memoryview) -> bool:
    """Hash a whole piece and copy what belongs to `rows` into `target`; return whether its digest is right."""
    size, shift = (piece.end - piece.start) * rows.row_bytes, (piece.start - rows.start) * rows.row_bytes
    block, hasher, done = memoryview(bytearray(min(size, BLOCK_BYTES))), blake3(), 0
    while done < size:
        count = file.readinto(block[: size - done])  # type: ignore[attr-defined]  # BufferedReader's
        if not count:
            return False
        hasher.update(block[:count])
        begin, end = max(0, done + shift), min(len(target), done + shift + count)
        if begin < end:
            target[begin:end] = block[begin - done - shift : end - done - shift]
        done += count
    return hasher.hexdigest() == piece.digest


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, of which a contiguous one on the CPU is not copied."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(rows: Mapping[str, Rows]) -> bytes:
    """Build the header of a safetensors file."""
    entries, end = dict[str, object](), 0
    for name, one in rows.items():
        begin, end = end, end + one.local.numel() * one.local.element_size()
        entries[name] = {"dtype": one.dtype, "shape": list(one.local.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
