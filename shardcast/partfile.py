"""A download in progress on disk: preallocated, written in any order, resumable after kill -9.

    <name>.part      the payload, each chunk at its offset
    <name>.journal   the index of every chunk written, as u32 big-endian, in order of arrival

An index is appended after its chunk was written. On resume each journalled chunk is hashed again, so
neither file has to be trusted or fsynced until the end. All methods may be called from any thread.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from pathlib import Path

from blake3 import blake3

from shardcast import wire
from shardcast.errors import CorruptChunk, LocalFault, Malformed
from shardcast.files import as_local_fault, sync_folder
from shardcast.manifest import MIB, Manifest

_INDEX = struct.Struct(">I")
_MAX_JOURNAL_BYTES = 16 * MIB


class PartFile:
    """The payload of `manifest` on its way to disk; `missing` are the chunks still to come."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._journal_path = journal_of(path)
        self._manifest = manifest
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            self._journal = os.open(self._journal_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            _preallocate(self._file, manifest.payload_bytes)
            self.missing = set(range(manifest.chunk_count)) - self._recover()
        except OSError as error:
            raise as_local_fault(error, path) from error

    def write(self, index: int, data: bytes | bytearray) -> None:
        """Verify a chunk and write it at its place. Raises CorruptChunk or LocalFault."""
        if wire.digest(memoryview(data)) != self._manifest.chunk_digest(index):
            raise CorruptChunk(f"{len(data)} bytes that are not chunk {index}")
        # The lock keeps a thread that outlives its cancelled task from writing to a reused descriptor.
        with self._lock:
            if self._closed or index not in self.missing:
                return
            try:
                _write_all(self._file, data, index * self._manifest.chunk_bytes)
                os.write(self._journal, _INDEX.pack(index))
            except OSError as error:
                raise as_local_fault(error, self._path) from error
            self.missing.discard(index)

    def finish(self, final: Path) -> None:
        """Check the whole payload, make it durable, and give it its final name.

        Raises Malformed "result_mismatch" when verified chunks do not add up to the manifest's result: the
        publisher contradicts itself, or this disk does not keep what is written; the part is deleted.
        """
        with self._lock:
            if file_digest(self._file, self._manifest.payload_bytes) != self._manifest.result_digest:
                self._delete()
                raise Malformed("the chunks do not add up to the manifest's result", code="result_mismatch")
            try:
                os.fsync(self._file)
                self._path.rename(final)
                sync_folder(final.parent)
            except OSError as error:
                raise as_local_fault(error, final) from error
            self._journal_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the files; what was written stays for the next attempt."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)
                os.close(self._journal)

    def _delete(self) -> None:
        self._path.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def _recover(self) -> set[int]:
        """Journalled chunks whose bytes are right; the journal is rewritten to just those."""
        size_bytes = min(os.fstat(self._journal).st_size, _MAX_JOURNAL_BYTES)
        journal = os.pread(self._journal, size_bytes, 0)
        whole = len(journal) - len(journal) % _INDEX.size
        claimed = {index for (index,) in _INDEX.iter_unpack(journal[:whole])}
        intact = {index for index in claimed if self._is_intact(index)}
        os.ftruncate(self._journal, 0)
        os.write(self._journal, b"".join(_INDEX.pack(index) for index in sorted(intact)))
        return intact

    def _is_intact(self, index: int) -> bool:
        if index >= self._manifest.chunk_count:
            return False
        data = os.pread(self._file, self._manifest.chunk_length(index), index * self._manifest.chunk_bytes)
        return wire.digest(data) == self._manifest.chunk_digest(index)


def journal_of(part: Path) -> Path:
    """Where the journal of a .part file lies."""
    return part.with_suffix(".journal")


def file_digest(descriptor: int, size_bytes: int) -> str:
    """BLAKE3 of the first `size_bytes` of an open file, in bounded memory."""
    hasher = blake3()
    buffer = bytearray(MIB)
    at = 0
    while at < size_bytes:
        got = os.preadv(descriptor, [memoryview(buffer)[: min(MIB, size_bytes - at)]], at)
        if got == 0:
            break
        hasher.update(memoryview(buffer)[:got])
        at += got
    return hasher.hexdigest()


def _preallocate(descriptor: int, size_bytes: int) -> None:
    """Reserve the space now, so that a full disk shows before the transfer and not at its end."""
    if os.fstat(descriptor).st_size > size_bytes:
        os.ftruncate(descriptor, size_bytes)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
            raise
        os.ftruncate(descriptor, size_bytes)


def _write_all(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        if written <= 0:
            raise LocalFault("the disk takes no more bytes")
        view, offset = view[written:], offset + written
