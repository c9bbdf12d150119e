"""Content-addressed blobs: submissions, their signed requests, admitted groups. One port, two backends.

A blob's name is its BLAKE3 digest, and exists only once the blob is complete. Nothing that was read is believed: it
is checked against its name, and against a limit on its size. What is not there, or is damaged, is a StorageFault; a
store that cannot be asked now is StoreAway, an OSError, for which every process waits.

An `UploadStore` takes bodies from their senders itself, so that no process of the run carries them. An upload lies
under its lease and its SHA-256, and whoever gets an `offer` can put nothing else there.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.errors import StorageFault
from shardcast.wire import digest, is_digest


class BlobStore(abc.ABC):
    """Blobs by their BLAKE3 digest. Every method may block, and raise OSError."""

    @abc.abstractmethod
    def put(self, data: bytes) -> str:
        """Store `data`; return its digest."""

    @abc.abstractmethod
    def get(self, name: str, *, max_bytes: int) -> bytes:
        """The bytes of blob `name`, checked against it; raises StorageFault, also for more than `max_bytes`."""

    def begin(self, data: bytes) -> None:
        """Store a run's first blob; raises BadConfiguration where a setting keeps that from working."""
        self.put(data)

    @property
    def uploads(self) -> UploadStore | None:
        """The store as one that takes uploads; None if it does not."""
        return None

    def sync(self) -> None:
        """Make the names of all blobs durable, as their content is already."""
        return

    def clear_leftovers(self) -> None:
        """Remove what killed processes left half written; call before serving."""
        return


@dataclass(frozen=True, slots=True)
class Upload:
    """A body that its sender puts into the store: BLAKE3 and SHA-256 (hexadecimal) as the sender claims them."""

    lease: str
    body: str
    sha256: str
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A blob that is sent on as it is read; `read` blocks, and gives at most so many bytes, none at the end."""

    size_bytes: int
    read: Callable[[int], bytes]
    close: Callable[[], None]


class UploadStore(BlobStore):
    """A store that senders can reach."""

    url: str
    """What names it, see `open_blobs`."""

    @property
    def uploads(self) -> UploadStore:
        return self

    @abc.abstractmethod
    def reading(self, name: str) -> Reading | None:
        """Blob `name` as it is stored, unchecked; None if there is none."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Remove blob `name`, if it is there."""

    @abc.abstractmethod
    def offer(self, upload: Upload, *, seconds: int) -> str:
        """A URL at which exactly these bytes, and nothing else, may be PUT for so long. The sender's secret."""

    @abc.abstractmethod
    def holds(self, upload: Upload) -> bool:
        """Whether the store has an object of that size and SHA-256 there."""

    @abc.abstractmethod
    def fetch(self, upload: Upload) -> bytes:
        """The bytes that lie there, checked against size and SHA-256, not BLAKE3; raises StorageFault."""

    @abc.abstractmethod
    def keep(self, upload: Upload, name: str) -> None:
        """Make a blob of what lies there, inside the store; raises StorageFault if nothing does."""

    @abc.abstractmethod
    def discard(self, upload: Upload) -> None:
        """Remove what lies there, if anything does."""


def check_name(name: str) -> None:
    """Raise StorageFault for anything that is not a digest."""
    if not is_digest(name):
        raise StorageFault("not a blob's name")


def checked_blob(data: bytes, name: str, *, max_bytes: int) -> bytes:
    """`data` if it is blob `name`; raises StorageFault."""
    if len(data) > max_bytes:
        raise StorageFault(f"blob {name} has more than {max_bytes} bytes")
    if digest(data) != name:
        raise StorageFault(f"blob {name} is damaged")
    return data
