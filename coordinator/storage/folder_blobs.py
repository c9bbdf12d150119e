"""Blobs in a folder: the default, for a run whose processes share a disk."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from blake3 import blake3

from coordinator.errors import StorageFault
from coordinator.storage.blobs import BlobStore, check_name, checked_blob
from coordinator.storage.timings import metered
from node.protocol.reasons import Reason, Refusal
from shardcast.files import sync_folder
from shardcast.wire import digest

LEFTOVER_SECONDS = 600.0
"""Longer than an upload may take: what is older was left by a process that was killed."""


class Incoming:
    """A blob under way."""

    def __init__(self, file: IO[bytes], *, max_bytes: int, place: Callable[[str], None]) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._place = place
        self._hasher = blake3()
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        """BLAKE3 of what has arrived so far."""
        return self._hasher.hexdigest()

    def write(self, piece: bytes) -> None:
        """Add `piece`; raises Refusal past the limit, before anything is written."""
        self.size_bytes += len(piece)
        if self.size_bytes > self._max_bytes:
            raise Refusal(Reason.OVERSIZED_BODY, f"More than {self._max_bytes} bytes.")
        self._hasher.update(piece)
        self._file.write(piece)

    def sync(self) -> None:
        """Bring everything to disk, still under no name: what takes time, before a transaction."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def commit(self) -> None:
        """Give the blob, after `sync`, its name."""
        self._place(self.digest)


class FolderBlobs(BlobStore):
    """Blobs in a folder. A blob is complete and on disk before its name exists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where blob `name` lies; raises StorageFault for anything that is not a digest."""
        check_name(name)
        return self._folder / name[:2] / name

    @metered("put")
    def put(self, data: bytes) -> str:
        name = digest(data)
        if not self.path(name).exists():
            with self.incoming(max_bytes=len(data)) as incoming:
                incoming.write(data)
                incoming.sync()
                incoming.commit()
        return name

    @metered("get")
    def get(self, name: str, *, max_bytes: int) -> bytes:
        try:
            with self.path(name).open("rb") as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError as error:
            raise StorageFault(f"blob {name} is missing") from error
        return checked_blob(data, name, max_bytes=max_bytes)

    @contextmanager
    def incoming(self, *, max_bytes: int) -> Iterator[Incoming]:
        """A blob that arrives in pieces; what is not committed is removed at the end of the block."""
        descriptor, temporary = tempfile.mkstemp(dir=self._incoming)
        path = Path(temporary)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield Incoming(file, max_bytes=max_bytes, place=lambda name: self._place(path, name))
        finally:
            path.unlink(missing_ok=True)

    def _place(self, temporary: Path, name: str) -> None:
        target = self.path(name)
        target.parent.mkdir(exist_ok=True)
        temporary.replace(target)

    def sync(self) -> None:
        """Make the names of all blobs durable, as their content is already."""
        for each in (*self._folder.iterdir(), self._folder):
            sync_folder(each)

    def clear_leftovers(self) -> None:
        """Remove what killed processes left half written, and not what others are writing; call before serving."""
        for leftover in self._incoming.iterdir():
            try:
                if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                    leftover.unlink()
            except FileNotFoundError:
                continue  # its writer gave it its name, or another process was faster
