"""The download on disk: whatever a crash leaves behind, the file that gets the final name is right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shardcast.errors import CorruptChunk, LocalFault, Malformed
from shardcast.partfile import PartFile, journal_of

CHUNK = 4096
PAYLOAD = random.Random(3).randbytes(5 * CHUNK - 100)


def piece(index: int) -> bytes:
    return PAYLOAD[index * CHUNK : (index + 1) * CHUNK]


def test_chunks_in_any_order_make_the_file(tmp_path: Path, publisher: Any) -> None:
    part = PartFile(tmp_path / "a.part", publisher.manifest(PAYLOAD))
    assert (tmp_path / "a.part").stat().st_size == len(PAYLOAD), "the space is taken before the transfer"
    for index in (4, 0, 3, 1, 2, 2):
        part.write(index, piece(index))
    part.finish(tmp_path / "a.bin")
    part.close()
    assert (tmp_path / "a.bin").read_bytes() == PAYLOAD
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_a_corrupt_chunk_is_not_written(tmp_path: Path, publisher: Any) -> None:
    part = PartFile(tmp_path / "a.part", publisher.manifest(PAYLOAD))
    with pytest.raises(CorruptChunk):
        part.write(1, piece(2))
    assert part.missing == {0, 1, 2, 3, 4}
    assert journal_of(tmp_path / "a.part").read_bytes() == b""
    part.close()


def test_resume_trusts_only_chunks_that_still_have_their_digest(tmp_path: Path, publisher: Any) -> None:
    """A power cut may keep the journal and lose the pages it speaks of."""
    path = tmp_path / "a.part"
    part = PartFile(path, publisher.manifest(PAYLOAD))
    for index in (0, 2, 4):
        part.write(index, piece(index))
    part.close()
    with path.open("r+b") as file:
        file.seek(2 * CHUNK)
        file.write(b"lost")
    with journal_of(path).open("ab") as file:
        file.write(b"\xff\xff\xff\xff\x00\x00\x00\x03\x00\x00")

    part = PartFile(path, publisher.manifest(PAYLOAD))
    assert part.missing == {1, 2, 3}
    for index in sorted(part.missing):
        part.write(index, piece(index))
    part.finish(tmp_path / "a.bin")
    part.close()
    assert (tmp_path / "a.bin").read_bytes() == PAYLOAD


def test_a_file_that_is_not_the_result_never_gets_the_name(tmp_path: Path, publisher: Any) -> None:
    """A publisher whose chunks do not add up, or a disk that forgets, must not reach the engine."""
    part = PartFile(tmp_path / "a.part", publisher.manifest(PAYLOAD, result_digest="00" * 32))
    for index in range(5):
        part.write(index, piece(index))
    with pytest.raises(Malformed) as caught:
        part.finish(tmp_path / "a.bin")
    part.close()
    assert caught.value.code == "result_mismatch"
    assert list(tmp_path.iterdir()) == []


def test_a_write_after_close_touches_nothing(tmp_path: Path, publisher: Any) -> None:
    """A thread that outlives its cancelled download must not write into a reused descriptor."""
    part = PartFile(tmp_path / "a.part", publisher.manifest(PAYLOAD))
    part.close()
    with (tmp_path / "innocent").open("w+b") as other:
        part.write(0, piece(0))
        assert other.read() == b""
    assert part.missing == {0, 1, 2, 3, 4}


def test_no_room_is_said_before_the_transfer(tmp_path: Path, publisher: Any) -> None:
    manifest = publisher.manifest(PAYLOAD, payload_bytes=2**52, result_bytes=2**52)
    with pytest.raises(LocalFault):
        PartFile(tmp_path / "a.part", manifest)
