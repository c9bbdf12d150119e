"""Cutting a file: too few chunks and every hop adds seconds, too many and every request costs more than its bytes."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from shardcast import wire
from shardcast.manifest import DEFAULT_LIMITS, KIB, MIB
from shardcast.store.staging import chunk_bytes_for, stage


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


@pytest.mark.parametrize("size_bytes", [1, 4096, 4097, 40 * 4096, 41 * 4096 + 7])
def test_digests_do_not_depend_on_the_threads(tmp_path: Path, size_bytes: int) -> None:
    """A trainer that moves to a larger machine publishes the same manifest again, or its run ends."""
    data = random.Random(size_bytes).randbytes(size_bytes)
    (tmp_path / "file").write_bytes(data)
    for threads in (1, 2, 7):
        staged = stage(tmp_path / "file", tmp_path / "copy", chunk_bytes=4096, limits=DEFAULT_LIMITS, threads=threads)
        assert (tmp_path / "copy").read_bytes() == data
        assert staged.digest == wire.digest(data)
        expected = b"".join(bytes.fromhex(wire.digest(data[at : at + 4096])) for at in range(0, size_bytes, 4096))
        assert staged.payload.chunk_digests == expected


def test_a_pipe_is_staged_like_a_file(tmp_path: Path) -> None:
    """A pipe gives less than it is asked for."""
    data = random.Random(0).randbytes(300_000)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(data,))
    writer.start()
    staged = stage(tmp_path / "pipe", tmp_path / "copy", chunk_bytes=4096, limits=DEFAULT_LIMITS, threads=3)
    writer.join()
    assert staged.digest == wire.digest(data)
    assert (tmp_path / "copy").read_bytes() == data
