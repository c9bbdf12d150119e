"""One payload on disk: preallocated, written in any order, readable while it grows, resumable after kill -9.

    <part>           the payload, each chunk at its offset, until it is complete
    <part>.journal   the index of every chunk written, as u32 big-endian, in order of arrival
    <final>          the same file once it is complete

Every chunk is hashed before it is written, and again before its first read by a process that did not write it: data on
disk after a crash is only a claim, so nothing has to be fsynced. A complete file is opened on use, so that a
publisher's thousands of versions hold no descriptors. Thread-safe.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardcast import wire
from shardcast.errors import CorruptChunk, LocalFault
from shardcast.files import as_local_fault, write_all
from shardcast.manifest import DIGEST_BYTES, MIB, Payload

_INDEX = struct.Struct(">I")
_MAX_JOURNAL_BYTES = 16 * MIB
_MISSING, _UNCHECKED, _VERIFIED = 0, 1, 2

ChunkData = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Where a verified chunk lies; the caller closes `file`, which outlives the payload's deletion."""

    file: BinaryIO
    offset: int
    length: int


class PayloadFile:
    """A payload, complete or in progress.

    `written(index, data)` is called for every chunk before it is used, then `arrived(index)`, in the writing thread.
    """

    def __init__(
        self,
        payload: Payload,
        *,
        final: Path,
        part: Path,
        arrived: Callable[[int], None] = lambda _: None,
        written: Callable[[int, ChunkData], None] = lambda _index, _data: None,
    ) -> None:
        self.payload = payload
        self._final, self._part, self._arrived, self._written = final, part, arrived, written
        self._lock = threading.Condition()
        self._users = 0
        self._closed = False
        self._duplicates = _duplicates(payload)
        self._states = bytearray(payload.chunk_count)
        self._file = self._journal = -1  # both open exactly while the payload is incomplete
        try:
            self._open()
        except OSError as error:
            raise as_local_fault(error, part) from error

    # -- state

    @property
    def path(self) -> Path | None:
        """Path of the complete file; None while incomplete."""
        return None if self._journal >= 0 else self._final

    @property
    def missing_bytes(self) -> int:
        return sum(self.payload.chunk_length(index) for index in self._indices(_MISSING))

    def holds(self, index: int) -> bool:
        """Return whether a chunk is here, verified or not."""
        return self._states[index] != _MISSING

    def missing(self) -> list[int]:
        """List the indices of missing chunks; of equal chunks only the first."""
        return [index for index in self._indices(_MISSING) if self._is_first_duplicate(index)]

    def count(self) -> int:
        """Count the chunks that are here."""
        return len(self._states) - self._states.count(_MISSING)

    def is_complete(self) -> bool:
        return self._states.find(_MISSING) < 0

    # -- writing

    def write(self, index: int, data: ChunkData) -> None:
        """Verify a chunk and write it at every position it occurs. Raises CorruptChunk or LocalFault."""
        if wire.digest(memoryview(data)) != self.payload.chunk_digest(index):
            raise CorruptChunk(f"digest mismatch: {len(data)} bytes are not chunk {index}")
        wanted = [
            duplicate for duplicate in self._duplicates.get(index, (index,)) if self._states[duplicate] == _MISSING
        ]
        # A thread that outlives its cancelled task must not write to a reused descriptor.
        with self._borrow_descriptor() as file:
            if file is None or self._journal < 0:
                return
            try:
                for duplicate in wanted:
                    write_all(file, data, duplicate * self.payload.chunk_bytes)
                os.write(self._journal, b"".join(map(_INDEX.pack, wanted)))
            except OSError as error:
                raise as_local_fault(error, self._part) from error
            for duplicate in wanted:
                self._written(duplicate, data)
                self._states[duplicate] = _VERIFIED
        for duplicate in wanted:
            self._arrived(duplicate)

    def finish(self) -> Path:
        """Rename the complete file to its final name and return it; ValueError if chunks are missing.

        Raises LocalFault, "not_held" once it is closed.
        """
        with self._lock:
            if self._journal >= 0:
                self._lock.wait_for(lambda: not self._users)
            if self._closed:
                raise LocalFault(f"{self._final.name} was dropped while it was fetched", code="not_held")
            if self._journal >= 0:
                if not self.is_complete():
                    raise ValueError("payload is incomplete")
                try:
                    self._part.rename(self._final)
                except OSError as error:
                    raise as_local_fault(error, self._final) from error
                self._release()
                _journal_of(self._part).unlink(missing_ok=True)
        return self._final

    # -- reading

    def read(self, index: int) -> bytes | None:
        """Read a verified chunk; None if it is missing or damaged."""
        with self._borrow_descriptor() as file:
            return self._pread(file, index) if file is not None and self._verify(file, index) else None

    def location(self, index: int) -> ChunkLocation | None:
        """Locate a verified chunk for sendfile; None as in `read`. Cheap once verified by this process.

        Raises LocalFault when no descriptors are left.
        """
        with self._borrow_descriptor() as descriptor:
            if descriptor is None or not self._verify(descriptor, index):
                return None
            try:
                with self._lock:  # reopened: a duplicated descriptor would share its offset
                    own = os.open(self._part, os.O_RDONLY) if self._journal >= 0 else os.dup(descriptor)
            except OSError as error:
                raise as_local_fault(error, self._final) from error
            file = os.fdopen(own, "rb", buffering=0)
        return ChunkLocation(file, index * self.payload.chunk_bytes, self.payload.chunk_length(index))

    def is_verified(self, index: int) -> bool:
        """Return whether `location` and `read` need not hash the chunk."""
        return self._states[index] == _VERIFIED

    def verify(self, index: int) -> bool:
        """Hash a chunk unless this process has verified it; return whether it is here and right."""
        with self._borrow_descriptor() as file:
            return file is not None and self._verify(file, index)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with unverified bytes from disk, as far as readable; the caller verifies the outcome."""
        with self._borrow_descriptor() as file, _unreadable_is_missing():
            if file is not None:
                os.preadv(file, [target], offset)

    def trust(self) -> None:
        """Mark every held chunk as verified; only for whoever hashed it while writing."""
        self._states[:] = self._states.replace(bytes([_UNCHECKED]), bytes([_VERIFIED]))

    def check(self, threads: int = 1) -> None:
        """Verify every unverified chunk; damaged ones count as missing."""
        unchecked = list(self._indices(_UNCHECKED))
        if unchecked:
            with ThreadPoolExecutor(threads) as pool:
                deque(pool.map(self.verify, unchecked), maxlen=0)

    # -- closing

    def close(self) -> None:
        """Close the files; what was written stays for the next attempt."""
        with self._lock:
            self._lock.wait_for(lambda: not self._users)
            self._closed = True
            self._release()

    def delete(self) -> None:
        """Close and delete the files; locations that were handed out stay readable."""
        self.close()
        for path in (self._final, self._part, _journal_of(self._part)):
            path.unlink(missing_ok=True)

    # -- internals

    def _open(self) -> None:
        size_bytes = self.payload.payload_bytes
        if self._final.exists():
            if self._final.stat().st_size == size_bytes:
                self._states[:] = bytes([_UNCHECKED]) * len(self._states)
                return
            self._final.unlink()
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _preallocate(self._file, size_bytes)
            self._open_journal()
            self._recover()
        except OSError:
            self._release()
            raise

    def _open_journal(self) -> None:
        self._journal = os.open(_journal_of(self._part), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def _release(self) -> None:
        """Close open descriptors."""
        for descriptor in (self._file, self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._journal = -1

    def _recover(self) -> None:
        """Load the journal's claims as unverified chunks."""
        journal = os.pread(self._journal, min(os.fstat(self._journal).st_size, _MAX_JOURNAL_BYTES), 0)
        whole = len(journal) - len(journal) % _INDEX.size
        for (index,) in _INDEX.iter_unpack(journal[:whole]):
            if index < len(self._states):
                self._states[index] = _UNCHECKED
        self._rewrite_journal()

    def _rewrite_journal(self) -> None:
        here = [index for index, state in enumerate(self._states) if state != _MISSING]
        os.ftruncate(self._journal, 0)
        os.write(self._journal, b"".join(map(_INDEX.pack, here)))

    def _verify(self, file: int, index: int) -> bool:
        """Verify a chunk; a damaged one is marked missing, and a complete file becomes a part again."""
        if self._states[index] != _UNCHECKED:
            return self._states[index] == _VERIFIED
        if wire.digest(self._pread(file, index)) == self.payload.chunk_digest(index):
            self._states[index] = _VERIFIED
            return True
        with self._lock:
            if self._states[index] == _UNCHECKED:
                self._states[index] = _MISSING
            if self._journal < 0 and not self._closed:
                try:
                    self._reopen()
                except OSError as error:
                    raise as_local_fault(error, self._part) from error
        return self._states[index] == _VERIFIED

    def _reopen(self) -> None:
        """Turn a complete file into a part. The journal goes first: a crash in between would otherwise cost all
        chunks.
        """
        try:
            self._open_journal()
            self._rewrite_journal()
            self._final.rename(self._part)
            self._file = os.open(self._part, os.O_RDWR)
        except OSError:
            self._release()
            raise

    def _pread(self, file: int, index: int) -> bytes:
        return _pread(file, self.payload.chunk_length(index), index * self.payload.chunk_bytes)

    def _indices(self, state: int) -> Iterator[int]:
        at = self._states.find(state)
        while at >= 0:
            yield at
            at = self._states.find(state, at + 1)

    def _is_first_duplicate(self, index: int) -> bool:
        return index == self._duplicates.get(index, (index,))[0]

    @contextmanager
    def _borrow_descriptor(self) -> Iterator[int | None]:
        """Yield a descriptor that stays open inside; None if the payload was closed or its file is gone."""
        with self._lock:
            usable, whole = not self._closed, self._journal < 0
            file = self._open_final() if usable and whole else self._file
            self._users += 1
        try:
            yield file if usable and file >= 0 else None
        finally:
            if usable and whole and file >= 0:
                os.close(file)
            with self._lock:
                self._users -= 1
                self._lock.notify_all()

    def _open_final(self) -> int:
        try:
            return os.open(self._final, os.O_RDONLY)
        except FileNotFoundError:
            return -1
        except OSError as error:
            raise as_local_fault(error, self._final) from error


def _journal_of(part: Path) -> Path:
    return part.with_suffix(".journal")


def _duplicates(payload: Payload) -> dict[int, tuple[int, ...]]:
    """Map each chunk that occurs more than once to its positions, in order."""
    digests = payload.chunk_digests
    each = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
    if len(set(each)) == len(each):
        return {}
    positions_by_digest = defaultdict[bytes, list[int]](list)
    for index, digest in enumerate(each):
        positions_by_digest[digest].append(index)
    duplicates = (tuple(positions) for positions in positions_by_digest.values() if len(positions) > 1)
    return {index: positions for positions in duplicates for index in positions}


def _pread(file: int, length: int, offset: int) -> bytes:
    """Read from `file`; empty where it cannot be read."""
    with _unreadable_is_missing():
        return os.pread(file, length, offset)
    return b""


@contextmanager
def _unreadable_is_missing() -> Iterator[None]:
    """Ignore EIO, so that the digest check finds the chunk damaged and replaces it."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def _preallocate(descriptor: int, size_bytes: int) -> None:
    """Reserve the space now, so that a full disk shows before the transfer."""
    before = min(os.fstat(descriptor).st_size, size_bytes)
    os.ftruncate(descriptor, before)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
            os.ftruncate(descriptor, before)  # some file systems keep a partial reservation
            raise
        os.ftruncate(descriptor, size_bytes)
