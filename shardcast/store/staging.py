"""Split a file into chunks: hash it and take a private copy."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from shardcast.errors import LocalFault
from shardcast.files import as_local_fault, write_all
from shardcast.manifest import DIGEST_BYTES, KIB, MIB, Limits, Payload

CHUNKS_PER_PAYLOAD = 128
"""Minimum pipeline steps of a transfer through a relay tree: each hop adds the time of one chunk."""

SMALLEST_CHUNK, LARGEST_CHUNK = 64 * KIB, 4 * MIB
"""Smaller chunks cost more per request than their bytes; larger ones cost more per hop than they save."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A private copy at `path`, its payload description, and the BLAKE3 digest of the whole."""

    path: Path
    payload: Payload
    digest: str

    def read(self, index: int) -> bytes:
        """Read chunk `index`."""
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), self.payload.chunk_length(index), index * self.payload.chunk_bytes)


def chunk_bytes_for(path: Path) -> int:
    """Choose a chunk size in bytes for a file: a power of two; a default for a pipe, whose size is unknown."""
    try:
        size_bytes = path.stat().st_size if path.is_file() else CHUNKS_PER_PAYLOAD * MIB
    except OSError as error:
        raise as_local_fault(error, path) from error
    largest = max(1, size_bytes // CHUNKS_PER_PAYLOAD)
    return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, 1 << (largest.bit_length() - 1)))


def stage(source: Path, target: Path, *, chunk_bytes: int, limits: Limits, threads: int = 1) -> Staged:
    """Copy `source` to `target` in one pass, in memory of about 2 chunks for each of `threads`, which hash and write.

    Raises LocalFault "empty", "too_large", "disk_full".
    """
    try:
        with source.open("rb", buffering=0) as file, target.open("wb") as copy:
            payload, digest = _copy(file.readinto, copy.fileno(), chunk_bytes, limits, threads)
            return Staged(target, payload, digest)
    except OSError as error:
        raise as_local_fault(error, source) from error


def _copy(
    readinto: Callable[[memoryview], int], copy: int, chunk_bytes: int, limits: Limits, threads: int
) -> tuple[Payload, str]:
    whole, digests, size_bytes = blake3(max_threads=threads), bytearray(), 0
    under_way = deque[tuple[Future[bytes], memoryview]]()
    # Used again and again: fresh memory for every chunk costs as much as reading it.
    free = [memoryview(bytearray(chunk_bytes)) for _ in range(2 * threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        while data := _read_chunk(readinto, free[-1]):
            if len(digests) // DIGEST_BYTES + len(under_way) >= limits.max_chunks:
                raise LocalFault(f"the file is too large for chunks of {chunk_bytes} bytes", code="too_large")
            under_way.append((pool.submit(_write_and_hash, copy, size_bytes, data), free.pop()))
            size_bytes += len(data)
            if size_bytes > limits.max_payload_bytes:
                raise LocalFault(f"the file has more than {limits.max_payload_bytes} bytes", code="too_large")
            whole.update(data)
            if not free:
                done, buffer = under_way.popleft()
                digests += done.result()
                free.append(buffer)
        for done, _ in under_way:
            digests += done.result()
    if not size_bytes:
        raise LocalFault("the file is empty", code="empty")
    payload = Payload(chunk_bytes=chunk_bytes, payload_bytes=size_bytes, chunk_digests=bytes(digests))
    return payload, whole.hexdigest()


def _read_chunk(readinto: Callable[[memoryview], int], buffer: memoryview) -> memoryview:
    """Read the next chunk, shorter only at the end; a pipe may return less than requested."""
    filled = 0
    while filled < len(buffer) and (count := readinto(buffer[filled:])):
        filled += count
    return buffer[:filled]


def _write_and_hash(copy: int, offset: int, data: memoryview) -> bytes:
    write_all(copy, data, offset)
    return bytes(blake3(data).digest())
