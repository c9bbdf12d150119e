"""One payload on disk: preallocated, written in any order, readable while it grows, resumable after kill -9.

    <part>           the payload, each chunk at its offset, until all of it is there
    <part>.journal   the index of every chunk written, as u32 big-endian, in order of arrival
    <final>          the same file once it is whole

Every chunk is hashed before it is written, and hashed again before it is first read by a process that did not
write it: what lies on disk after a crash or a power cut is a claim. So nothing has to be fsynced. A whole file is
opened when it is used, so that a publisher's thousands of versions hold no descriptors. All methods may be called
from any thread.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a verified chunk lie; `file` is the caller's to close and outlives the payload's deletion."""

    file: BinaryIO
    offset: int
    length: int


class PayloadFile:
    """`payload` on its way to disk, or there. `arrived(index)` is called, in the writing thread, for every chunk."""

    def __init__(
        self, payload: Payload, *, final: Path, part: Path, arrived: Callable[[int], None] = lambda _: None
    ) -> None:
        self.payload = payload
        self._final, self._part, self._arrived = final, part, arrived
        self._lock = threading.Condition()
        self._users = 0
        self._closed = False
        self._twins = _twins(payload)
        self._states = bytearray(payload.chunk_count)
        self._file = self._journal = -1  # both are open while the payload is on its way, and only then
        try:
            self._open()
        except OSError as error:
            raise as_local_fault(error, part) from error

    # -- what is here

    @property
    def path(self) -> Path | None:
        """The whole file; None while it is on its way."""
        return None if self._journal >= 0 else self._final

    @property
    def missing_bytes(self) -> int:
        return sum(self.payload.chunk_length(index) for index in self._indices(_MISSING))

    def holds(self, index: int) -> bool:
        """Whether a chunk is here, verified or not."""
        return self._states[index] != _MISSING

    def missing(self) -> list[int]:
        """Indices of chunks that are not here; of equal chunks the first."""
        return [index for index in self._indices(_MISSING) if self._first_of_its_kind(index)]

    def count(self) -> int:
        """How many chunks are here."""
        return len(self._states) - self._states.count(_MISSING)

    def is_complete(self) -> bool:
        return self._states.find(_MISSING) < 0

    # -- writing

    def write(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Verify a chunk and write it wherever the payload has it. Raises CorruptChunk or LocalFault."""
        if wire.digest(memoryview(data)) != self.payload.chunk_digest(index):
            raise CorruptChunk(f"{len(data)} bytes that are not chunk {index}")
        wanted = [twin for twin in self._twins.get(index, (index,)) if self._states[twin] == _MISSING]
        # A thread that outlives its cancelled task must not write to a reused descriptor.
        with self._in_use() as file:
            if file is None or self._journal < 0:
                return
            try:
                for twin in wanted:
                    write_all(file, data, twin * self.payload.chunk_bytes)
                os.write(self._journal, b"".join(map(_INDEX.pack, wanted)))
            except OSError as error:
                raise as_local_fault(error, self._part) from error
            for twin in wanted:
                self._states[twin] = _VERIFIED
        for twin in wanted:
            self._arrived(twin)

    def finish(self) -> Path:
        """Give the whole file its final name; every chunk must be here.

        Raises LocalFault, "not_held" once it is closed.
        """
        with self._lock:
            if self._journal >= 0:
                self._lock.wait_for(lambda: not self._users)
            if self._closed:
                raise LocalFault(f"{self._final.name} was dropped meanwhile", code="not_held")
            if self._journal >= 0:
                if not self.is_complete():
                    raise ValueError("a payload that is not whole yet")
                try:
                    self._part.rename(self._final)
                except OSError as error:
                    raise as_local_fault(error, self._final) from error
                self._release()
                _journal_of(self._part).unlink(missing_ok=True)
        return self._final

    # -- reading

    def read(self, index: int) -> bytes | None:
        """A verified chunk; None if it is not here, or no longer what it was."""
        with self._in_use() as file:
            return self._pread(file, index) if file is not None and self._verify(file, index) else None

    def place(self, index: int) -> Place | None:
        """Where a verified chunk lies; None as in `read`. Cheap if this process has verified it.

        Raises LocalFault when there are no more descriptors.
        """
        with self._in_use() as descriptor:
            if descriptor is None or not self._verify(descriptor, index):
                return None
            try:
                with self._lock:  # opened anew, since copies of one descriptor would share its offset
                    own = os.open(self._part, os.O_RDONLY) if self._journal >= 0 else os.dup(descriptor)
            except OSError as error:
                raise as_local_fault(error, self._final) from error
            file = os.fdopen(own, "rb", buffering=0)
        return Place(file, index * self.payload.chunk_bytes, self.payload.chunk_length(index))

    def is_verified(self, index: int) -> bool:
        """Whether `place` and `read` need not hash."""
        return self._states[index] == _VERIFIED

    def verify(self, index: int) -> bool:
        """Whether a chunk is here and right, hashed again if this process has not yet."""
        with self._in_use() as file:
            return file is not None and self._verify(file, index)

    def read_range(self, offset: int, length: int) -> bytes:
        """Bytes as they lie on disk, fewer where they cannot be read: the caller verifies what it makes of them."""
        with self._in_use() as file:
            return b"" if file is None else _pread(file, length, offset)

    def trust(self) -> None:
        """Take what is here for verified: for whoever has hashed it while writing it."""
        self._states[:] = self._states.replace(bytes([_UNCHECKED]), bytes([_VERIFIED]))

    def check(self) -> None:
        """Hash what this process has not verified; what is wrong counts as missing from now on."""
        for index in self._indices(_UNCHECKED):
            self.verify(index)

    # -- the end

    def close(self) -> None:
        """Release the files; what was written stays for the next attempt."""
        with self._lock:
            self._lock.wait_for(lambda: not self._users)
            self._closed = True
            self._release()

    def delete(self) -> None:
        """Close and delete the files; places that were handed out stay readable."""
        self.close()
        for path in (self._final, self._part, _journal_of(self._part)):
            path.unlink(missing_ok=True)

    # -- inside

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
        """Close what is open."""
        for descriptor in (self._file, self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._journal = -1

    def _recover(self) -> None:
        """What the journal claims, to be verified before it is used."""
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
        """Whether a chunk is here and right; one that is not is forgotten, and a whole file is a part again."""
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
        """Make a whole file a part. The journal goes first: without it a crash in between would cost all chunks."""
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

    def _first_of_its_kind(self, index: int) -> bool:
        return index == self._twins.get(index, (index,))[0]

    @contextmanager
    def _in_use(self) -> Iterator[int | None]:
        """A descriptor that stays open inside; None if the payload was closed, or its file is gone."""
        with self._lock:
            usable, whole = not self._closed, self._journal < 0
            file = self._opened_whole() if usable and whole else self._file
            self._users += 1
        try:
            yield file if usable and file >= 0 else None
        finally:
            if usable and whole and file >= 0:
                os.close(file)
            with self._lock:
                self._users -= 1
                self._lock.notify_all()

    def _opened_whole(self) -> int:
        try:
            return os.open(self._final, os.O_RDONLY)
        except FileNotFoundError:
            return -1
        except OSError as error:
            raise as_local_fault(error, self._final) from error


def _journal_of(part: Path) -> Path:
    return part.with_suffix(".journal")


def _twins(payload: Payload) -> dict[int, tuple[int, ...]]:
    """For each chunk that occurs more than once, where it does, in order."""
    digests = payload.chunk_digests
    each = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
    if len(set(each)) == len(each):
        return {}
    where = defaultdict[bytes, list[int]](list)
    for index, digest in enumerate(each):
        where[digest].append(index)
    twins = (tuple(found) for found in where.values() if len(found) > 1)
    return {index: found for found in twins for index in found}


def _pread(file: int, length: int, offset: int) -> bytes:
    """Nothing where the disk cannot read: whoever compares digests finds the chunk damaged, and replaces it."""
    try:
        return os.pread(file, length, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def _preallocate(descriptor: int, size_bytes: int) -> None:
    """Reserve the space now, so that a full disk shows before the transfer and not at its end."""
    before = min(os.fstat(descriptor).st_size, size_bytes)
    os.ftruncate(descriptor, before)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
            os.ftruncate(descriptor, before)  # some file systems keep what they had reserved so far
            raise
        os.ftruncate(descriptor, size_bytes)
