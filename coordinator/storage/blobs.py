"""Content-addressed blobs: submissions, kept measurements, admitted groups. One port, two backends.

A blob's name is its BLAKE3 digest, and exists only once the blob is complete. Reads verify digest and size. A missing
or damaged blob raises StorageFault; an unreachable store, or a folder that is gone as a whole, raises StoreAway, an
OSError, on which processes retry. So does, for a while, a store that answers with other bytes (CorruptRead): a read
over a network may go wrong once.

An `UploadStore` receives bodies from their senders directly. An upload's key is its lease and SHA-256, and an offer is
a presigned URL that accepts nothing else.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from coordinator.errors import DamagedBlob, StorageFault
from shardcast.wire import digest, is_digest

T = TypeVar("T")

WAITS_AT_ONCE: Final = 8
_waiting: Final = ThreadPoolExecutor(WAITS_AT_ONCE, thread_name_prefix="blobs")


def wait_together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run calls that wait for a disk or a network at the same time; return what each returns, in their order.

    Raises what the first of those that failed did, once none is under way.
    """
    running = [_waiting.submit(call) for call in calls]
    wait(running)
    return [each.result() for each in running]


class BlobStore(abc.ABC):
    """Blobs by BLAKE3 digest. Every method may block and raise OSError."""

    @abc.abstractmethod
    def put(self, data: bytes) -> str:
        """Store `data`, over a damaged blob of that name too; return its digest."""

    def put_many(self, blobs: Sequence[bytes]) -> list[str]:
        """Store several blobs as `put` does, with one wait for all; return their digests.

        Where one cannot be stored, this raises, and some of the others are.
        """
        return wait_together([partial(self.put, data) for data in blobs])

    @abc.abstractmethod
    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Return the verified bytes of blob `name`; raises StorageFault, also for more than `max_bytes`.

        Raises DamagedBlob for other bytes; a store behind a network raises CorruptRead first.
        """

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Remove blob `name` if it exists."""

    def begin(self, data: bytes) -> None:
        """Store a run's first blob; raises BadConfiguration if the store's settings prevent that."""
        self.put(data)

    @property
    def uploads(self) -> UploadStore | None:
        """This store if it takes uploads, otherwise None."""
        return None

    def sync(self) -> None:
        """Make the names of all blobs durable, as their content already is."""
        return

    def clear_leftovers(self) -> None:
        """Remove partial blobs of killed processes; call before serving."""
        return


@dataclass(frozen=True, slots=True)
class Upload:
    """A body that its sender uploads, with BLAKE3 (`body`) and SHA-256 in hexadecimal as the sender claims them."""

    lease: str
    body: str
    sha256: str
    body_bytes: int


@dataclass(frozen=True, slots=True)
class BlobStream:
    """A blob opened for streaming; `read` blocks and returns at most so many bytes, b"" at the end."""

    size_bytes: int
    read: Callable[[int], bytes]
    close: Callable[[], None]


class UploadStore(BlobStore):
    """A blob store to which senders upload directly; `url` as in `open_blobs`."""

    url: str

    @property
    def uploads(self) -> UploadStore:
        return self

    @abc.abstractmethod
    def open_stream(self, name: str) -> BlobStream | None:
        """Open blob `name` for reading, unverified; return None if there is none."""

    @abc.abstractmethod
    def offer(self, upload: Upload, *, seconds: int) -> str:
        """Return a presigned URL, valid for `seconds`, to PUT exactly these bytes; only the sender may know it."""

    @abc.abstractmethod
    def holds(self, upload: Upload) -> bool:
        """Return whether the upload exists with its size and SHA-256."""

    @abc.abstractmethod
    def fetch(self, upload: Upload) -> bytes:
        """Return the upload's bytes, verified by size and SHA-256, not BLAKE3; raises as `get` does."""

    @abc.abstractmethod
    def keep(self, upload: Upload, name: str) -> None:
        """Copy the upload to blob `name` inside the store; raises StorageFault if it is missing."""

    @abc.abstractmethod
    def discard(self, upload: Upload) -> None:
        """Remove the upload if it exists."""


def check_name(name: str) -> None:
    """Raise StorageFault unless `name` is a digest."""
    if not is_digest(name):
        raise StorageFault("not a blob's name")


def checked_blob(data: bytes, name: str, *, max_bytes: int) -> bytes:
    """Return `data` if it is blob `name` and within `max_bytes`; raises StorageFault, DamagedBlob."""
    if len(data) > max_bytes:
        raise StorageFault(f"blob {name} has more than {max_bytes} bytes")
    if digest(data) != name:
        raise DamagedBlob(f"blob {name} is damaged")
    return data
