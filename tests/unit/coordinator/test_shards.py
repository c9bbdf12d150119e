"""Rows of tensors in files: what some processes wrote, any other number reads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from coordinator.training.shards import BLOCK_BYTES, Piece, Rows, read_rows, write_rows

TENSORS = {
    "matrix": torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "short": torch.tensor([[1.5, 2.5]]),
    "wide": torch.rand(3, BLOCK_BYTES // 4 - 1, generator=torch.Generator().manual_seed(1)),
}


def parts(tensor: Tensor, count: int) -> list[Rows]:
    """Divide a tensor as FSDP does: the last processes may have fewer rows, or none."""
    each = -(-len(tensor) // count)
    starts = [min(len(tensor), rank * each) for rank in range(count + 1)]
    return [
        Rows(tuple(tensor.shape), start, tensor[start:end].clone(), is_shared=False)
        for start, end in itertools.pairwise(starts)
    ]


def written(folder: Path, count: int) -> dict[str, list[Piece]]:
    """Write all tensors by so many processes; return each one's pieces."""
    pieces: dict[str, list[Piece]] = {name: [] for name in TENSORS}
    for rank in range(count):
        held = {name: parts(tensor, count)[rank] for name, tensor in TENSORS.items()}
        for name, piece in write_rows(folder / f"{rank}.safetensors", held).items():
            pieces[name].append(piece)
    return pieces


@pytest.mark.parametrize(("writers", "readers"), [*itertools.product((1, 2, 4, 8), (1, 3, 4))])
def test_what_any_number_of_processes_wrote_any_number_reads(tmp_path: Path, writers: int, readers: int) -> None:
    pieces = written(tmp_path, writers)
    for name, tensor in TENSORS.items():
        for rows in parts(tensor, readers):
            wanted = rows.local.clone()
            rows.local.fill_(-1)
            assert read_rows(tmp_path, rows, pieces[name])
            assert torch.equal(rows.local, wanted)


def test_a_file_is_one_that_other_programs_read(tmp_path: Path) -> None:
    written(tmp_path, 2)
    found = load_file(tmp_path / "1.safetensors")
    assert found.keys() == {"matrix", "half", "wide"}, "a process without rows of a tensor leaves it out"
    assert torch.equal(found["matrix"], TENSORS["matrix"][4:])


def test_a_bit_in_rows_that_the_reader_does_not_need_is_found_too(tmp_path: Path) -> None:
    """Else it would wait for the day on which another number of processes reads it."""
    pieces = written(tmp_path, 1)
    path, (piece,) = tmp_path / "0.safetensors", pieces["matrix"]
    data = bytearray(path.read_bytes())
    data[piece.offset + 6 * 12] ^= 1  # in the last row
    path.write_bytes(data)
    first, _ = parts(TENSORS["matrix"], 2)
    assert not read_rows(tmp_path, first, [piece])


def test_rows_that_no_piece_has_are_not_taken_for_read(tmp_path: Path) -> None:
    pieces = written(tmp_path, 2)
    (rows,) = parts(TENSORS["matrix"], 1)
    assert not read_rows(tmp_path, rows, pieces["matrix"][:1])


def test_a_tensor_that_is_not_contiguous_is_written_and_read_by_its_rows(tmp_path: Path) -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    piece = write_rows(tmp_path / "0", {"turned": Rows.of(turned)})["turned"]
    into = torch.zeros(2, 3).t()
    assert read_rows(tmp_path, Rows.of(into), [piece])
    assert torch.equal(into, turned)
