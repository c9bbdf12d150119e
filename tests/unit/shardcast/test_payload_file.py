"""A payload on disk: whatever a crash leaves behind, only bytes that have their digest are served or named."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from shardcast.errors import CorruptChunk, LocalFault
from shardcast.store.payload_file import PayloadFile

CHUNK = 4096
PAYLOAD = random.Random(3).randbytes(5 * CHUNK - 100)


def piece(index: int) -> bytes:
    return PAYLOAD[index * CHUNK : (index + 1) * CHUNK]


def opened(folder: Path, publisher: Any, data: bytes = PAYLOAD, **options: Any) -> PayloadFile:
    return PayloadFile(publisher.payload(data), final=folder / "a.bin", part=folder / "a.part", **options)


def filled(folder: Path, publisher: Any) -> PayloadFile:
    file = opened(folder, publisher)
    for index in file.missing():
        file.write(index, piece(index))
    return file


def test_chunks_in_any_order_make_the_file(tmp_path: Path, publisher: Any) -> None:
    arrived = list[int]()
    file = opened(tmp_path, publisher, arrived=arrived.append)
    assert (tmp_path / "a.part").stat().st_size == len(PAYLOAD), "the space is taken before the transfer"
    assert file.missing_bytes == len(PAYLOAD)
    for index in (4, 0, 3, 1, 2, 2):
        file.write(index, piece(index))
    assert file.path is None
    assert file.finish() == tmp_path / "a.bin" == file.path
    assert file.read(4) == piece(4)
    file.close()
    assert (tmp_path / "a.bin").read_bytes() == PAYLOAD
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert arrived == [4, 0, 3, 1, 2]


def test_a_corrupt_chunk_is_not_written(tmp_path: Path, publisher: Any) -> None:
    file = opened(tmp_path, publisher)
    with pytest.raises(CorruptChunk):
        file.write(1, piece(2))
    assert file.missing() == [0, 1, 2, 3, 4]
    assert (tmp_path / "a.journal").read_bytes() == b""
    file.close()


def test_a_file_that_lacks_chunks_never_gets_the_name(tmp_path: Path, publisher: Any) -> None:
    file = opened(tmp_path, publisher)
    for index in range(4):
        file.write(index, piece(index))
    with pytest.raises(ValueError, match="incomplete"):
        file.finish()
    file.close()
    assert not (tmp_path / "a.bin").exists()


def test_resume_trusts_only_chunks_that_still_have_their_digest(tmp_path: Path, publisher: Any) -> None:
    """A power cut may keep the journal and lose the pages it speaks of."""
    file = opened(tmp_path, publisher)
    for index in (0, 2, 4):
        file.write(index, piece(index))
    file.close()
    with (tmp_path / "a.part").open("r+b") as part:
        part.seek(2 * CHUNK)
        part.write(b"lost")
    with (tmp_path / "a.journal").open("ab") as journal:
        journal.write(b"\xff\xff\xff\xff\x00\x00\x00\x03\x00\x00")

    file = opened(tmp_path, publisher)
    assert file.missing() == [1], "what the journal claims is looked at when it is needed"
    file.check()
    assert file.missing() == [1, 2, 3]
    for index in file.missing():
        file.write(index, piece(index))
    file.finish()
    file.close()
    assert (tmp_path / "a.bin").read_bytes() == PAYLOAD


def test_a_whole_file_that_was_damaged_is_a_part_again(tmp_path: Path, publisher: Any) -> None:
    """One bad sector costs one chunk, and what is under the final name is always right or gone."""
    filled(tmp_path, publisher).finish()
    with (tmp_path / "a.bin").open("r+b") as whole:
        whole.seek(3 * CHUNK)
        whole.write(b"rot")
    file = opened(tmp_path, publisher)
    assert file.path is not None
    assert file.read(2) == piece(2)
    assert file.read(3) is None
    assert file.location(3) is None
    assert file.path is None
    assert not (tmp_path / "a.bin").exists()
    assert file.missing() == [3]
    file.write(3, piece(3))
    file.finish()
    file.close()
    assert (tmp_path / "a.bin").read_bytes() == PAYLOAD


def test_a_whole_file_of_another_length_is_fetched_again(tmp_path: Path, publisher: Any) -> None:
    (tmp_path / "a.bin").write_bytes(PAYLOAD[:-1])
    file = opened(tmp_path, publisher)
    assert file.missing() == [0, 1, 2, 3, 4]
    file.close()


def test_equal_chunks_are_asked_for_once_and_written_everywhere(tmp_path: Path, publisher: Any) -> None:
    """Padding and untied zeros must not be transferred again and again."""
    data = bytes(3 * CHUNK) + PAYLOAD[:CHUNK] + bytes(CHUNK)
    arrived = list[int]()
    file = opened(tmp_path, publisher, data, arrived=arrived.append)
    assert file.missing() == [0, 3]
    file.write(3, PAYLOAD[:CHUNK])
    file.write(0, bytes(CHUNK))
    assert file.is_complete()
    assert sorted(arrived) == [0, 1, 2, 3, 4]
    assert file.finish().read_bytes() == data
    file.close()


def test_a_place_outlives_the_deletion_of_its_payload(tmp_path: Path, publisher: Any) -> None:
    """An old version may be dropped while somebody is still being sent its chunks."""
    file = filled(tmp_path, publisher)
    place = file.location(1)
    assert place is not None
    file.delete()
    assert list(tmp_path.iterdir()) == []
    with place.file:
        place.file.seek(place.offset)
        assert place.file.read(place.length) == piece(1)
    assert file.location(1) is None
    assert file.read(1) is None


def test_a_write_after_close_touches_nothing(tmp_path: Path, publisher: Any) -> None:
    """A thread that outlives its cancelled download must not write into a reused descriptor."""
    file = opened(tmp_path, publisher)
    file.close()
    with (tmp_path / "innocent").open("w+b") as other:
        file.write(0, piece(0))
        assert other.read() == b""
    assert file.missing() == [0, 1, 2, 3, 4]


def test_threads_write_and_close_at_once(tmp_path: Path, publisher: Any) -> None:
    """Cancelling a download closes its file under the threads that are about to write: none may hit another file."""
    for _ in range(30):
        file = opened(tmp_path, publisher)
        threads = [threading.Thread(target=file.write, args=(index, piece(index))) for index in range(5)]
        for thread in threads:
            thread.start()
        file.close()
        for thread in threads:
            thread.join()
    file = opened(tmp_path, publisher)
    file.check()
    for index in file.missing():
        file.write(index, piece(index))
    assert file.finish().read_bytes() == PAYLOAD
    file.close()


def test_no_room_is_said_before_the_transfer(tmp_path: Path, publisher: Any) -> None:
    payload = publisher.payload(PAYLOAD, payload_bytes=2**52)
    with pytest.raises(LocalFault):
        PayloadFile(payload, final=tmp_path / "a.bin", part=tmp_path / "a.part")
