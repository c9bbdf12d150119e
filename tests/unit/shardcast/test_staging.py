"""Cutting a file: too few chunks and every hop adds seconds, too many and every request costs more than its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcast.manifest import KIB, MIB
from shardcast.store.staging import chunk_bytes_for


@pytest.mark.parametrize(
    ("size_bytes", "chunk_bytes"),
    [
        (0, 64 * KIB),
        (5 * MIB, 64 * KIB),
        (16 * MIB, 128 * KIB),
        (128 * MIB - 1, 512 * KIB),
        (128 * MIB, MIB),
        (512 * MIB, 4 * MIB),
        (62_000 * MIB, 4 * MIB),
    ],
)
def test_the_size_of_chunks_follows_the_file(tmp_path: Path, size_bytes: int, chunk_bytes: int) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    assert chunk_bytes_for(path) == chunk_bytes
