"""Policies whose numbers are looked at while they arrive: what is found is what reading the file would have found."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from narrow_run import policy_file, sharp_model
from torch import Tensor

from node.policy import arrival, file
from node.policy.arrival import MOST_ARRIVING, ArrivingPolicies
from node.policy.errors import MalformedPolicy
from node.policy.file import inspect_policy
from node.policy.reading import inspect_once
from node.policy.weights import ITEM_BYTES, StoredTensor
from shardcast import Payload
from shardcast.wire import digest

CHUNK_BYTES = 4096


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A policy in float32."""
    return policy_file(sharp_model(1), tmp_path_factory.mktemp("policy")).read_bytes()


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what is read of files for their numbers from now on."""
    found: list[int] = []
    read = file.read_numbers

    def counted(tensor: StoredTensor, **part: Any) -> Iterator[Tensor]:
        count = part.get("count")
        found.append((tensor.count if count is None else count) * ITEM_BYTES[tensor.dtype])
        return read(tensor, **part)

    monkeypatch.setattr(file, "read_numbers", counted)
    return found


def arrive(data: bytes, path: Path, *, dtype: str = "float32", without: frozenset[int] = frozenset()) -> int:
    """Let a file arrive in any order, but for chunks that an earlier process wrote; return how many chunks it has."""
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    payload = Payload(
        chunk_bytes=CHUNK_BYTES,
        payload_bytes=len(data),
        chunk_digests=b"".join(bytes.fromhex(digest(chunk)) for chunk in chunks),
    )
    arriving, name = ArrivingPolicies(dtype), payload.digest
    order = sorted({*range(len(chunks))} - without)
    random.Random(2).shuffle(order)
    for index in order:
        arriving.chunk(name, payload, index, memoryview(chunks[index]))
    path.write_bytes(data)
    arriving.whole(name, payload, path)
    return len(chunks)


def header_bytes(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def test_nobody_reads_a_policy_that_was_looked_at_while_it_arrived(
    policy: bytes, tmp_path: Path, bytes_read: list[int]
) -> None:
    """Tens of gigabytes, from disk, before the first verdict under each new policy."""
    arrive(policy, tmp_path / "1.bin")
    assert sum(bytes_read) <= header_bytes(policy) + 2 * CHUNK_BYTES, "what lies in chunks with the header"
    bytes_read.clear()
    inspect_once(tmp_path / "1.bin")
    assert bytes_read == []


@pytest.mark.parametrize("at", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("number", ["0000c07f", "000080ff"])
def test_a_number_that_is_not_finite_is_refused_as_ever(policy: bytes, tmp_path: Path, at: float, number: str) -> None:
    data, start = bytearray(policy), header_bytes(policy)
    where = start + int(at * (len(data) - start - 4)) // 4 * 4
    data[where : where + 4] = bytes.fromhex(number)
    arrive(bytes(data), tmp_path / "1.bin")
    with pytest.raises(MalformedPolicy) as ever:
        inspect_policy(tmp_path / "1.bin")
    with pytest.raises(MalformedPolicy) as caught:
        inspect_once(tmp_path / "1.bin")
    assert (caught.value.code, str(caught.value)) == (ever.value.code, str(ever.value))


def test_chunks_that_an_earlier_process_wrote_are_read(policy: bytes, tmp_path: Path, bytes_read: list[int]) -> None:
    """A fetch that was interrupted goes on with what is on disk."""
    data = bytearray(policy)
    data[-4:] = b"\xff\xff\xff\x7f"
    last = (len(data) - 1) // CHUNK_BYTES
    arrive(bytes(data), tmp_path / "1.bin", without=frozenset({last - 1, last}))
    with pytest.raises(MalformedPolicy):
        inspect_once(tmp_path / "1.bin")
    bytes_read.clear()
    arrive(policy, tmp_path / "2.bin", without=frozenset({last - 1, last}))
    assert len(policy) > 4 * sum(bytes_read) > 0


@pytest.mark.parametrize("case", ["another dtype", "numbers across chunks"])
def test_a_file_of_another_form_than_the_runs_is_read_whole(
    policy: bytes, tmp_path: Path, bytes_read: list[int], case: str
) -> None:
    """What was seen says nothing of its numbers."""
    data = policy
    if case == "numbers across chunks":
        header = json.dumps(json.loads(policy[8 : header_bytes(policy)])).encode()
        header += b" " * (3 - len(header) % 4)  # so that data begins at an odd offset
        data = len(header).to_bytes(8, "little") + header + policy[header_bytes(policy) :]
    arrive(data, tmp_path / "1.bin", dtype="bfloat16" if case == "another dtype" else "float32")
    assert sum(bytes_read) == len(policy) - header_bytes(policy)


@pytest.mark.parametrize("is_finite", [True, False])
def test_chunks_that_no_memory_is_left_to_look_at_are_read_later(
    policy: bytes, tmp_path: Path, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch, *, is_finite: bool
) -> None:
    """The fetch would fail, and with it the verifier that waits for it."""
    data = bytearray(policy)
    if not is_finite:
        data[-4:] = b"\xff\xff\xff\x7f"
    look = arrival.are_finite

    def short(chunk: memoryview, *, stored_as: str) -> bool:
        if bytes(chunk) in (data[-len(chunk) :], data[CHUNK_BYTES : 2 * CHUNK_BYTES]):
            raise MemoryError
        return look(chunk, stored_as=stored_as)

    monkeypatch.setattr(arrival, "are_finite", short)
    arrive(bytes(data), tmp_path / "1.bin")
    assert len(policy) > 4 * sum(bytes_read) > 0
    if is_finite:
        inspect_once(tmp_path / "1.bin")
    else:
        with pytest.raises(MalformedPolicy):
            inspect_once(tmp_path / "1.bin")


def test_policies_that_never_arrive_take_no_memory_for_ever() -> None:
    """A source may begin with one version after the other."""
    arriving = ArrivingPolicies("float32")
    for number in range(3 * MOST_ARRIVING):
        payload = Payload(chunk_bytes=CHUNK_BYTES, payload_bytes=CHUNK_BYTES, chunk_digests=bytes([number]) * 32)
        arriving.chunk(payload.digest, payload, 0, bytes(CHUNK_BYTES))
    assert len(arriving._seen) == MOST_ARRIVING
