"""Blobs in a folder, the default, for processes that share a disk."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Final

from blake3 import blake3

from coordinator.errors import DamagedBlob, StorageFault, StoreAway
from coordinator.storage.blobs import BlobStore, check_name, checked_blob, wait_together
from coordinator.storage.timings import metered
from node.protocol.reasons import Reason, Refusal
from shardcast.files import sync_folder
from shardcast.wire import digest

LEFTOVER_SECONDS = 600.0
"""Longer than any upload takes: older partial files are of killed processes."""
_PIECE_BYTES = 1024 * 1024

_MAKING: Final = threading.Lock()
"""Threads that make files in one folder at the same time spin in the kernel, for 5 % of an API's processor time. The
event loop, which makes those of large bodies, waits for none of them."""

HELD_BYTES: Final = 128 * 1024
"""Of each body that arrives, in memory: of as many as there are connections, 128 MiB."""


class Incoming:
    """A blob being written; up to HELD_BYTES of it are in memory, and in no file before `sync`.

    Whoever writes it may be the event loop, and to make a file waits for the disk while others are synced.
    """

    def __init__(self, path: Path, *, max_bytes: int, place: Callable[[Path, str], None]) -> None:
        self._path, self._place = path, place
        self._max_bytes = max_bytes
        self._hasher = blake3()
        self._file: IO[bytes] | None = None
        self._held = bytearray()
        self._lock = threading.Lock()  # whoever waits for a thread's sync may go, and close it
        self._is_synced = self.is_committed = self._is_closed = False
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        """BLAKE3 of the bytes so far, in hexadecimal."""
        return self._hasher.hexdigest()

    def write(self, piece: bytes) -> None:
        """Append `piece`; raises Refusal past the limit, without writing it, and FileNotFoundError without a folder."""
        self.size_bytes += len(piece)
        if self.size_bytes > self._max_bytes:
            raise Refusal(Reason.OVERSIZED_BODY, f"More than {self._max_bytes} bytes.")
        self._hasher.update(piece)
        self._held += piece
        self._is_synced = False
        if len(self._held) > HELD_BYTES:
            with self._lock:
                self._write_held(nullcontext())

    def sync(self) -> None:
        """Sync the bytes to disk, unless they are there, before the transaction that commits them.

        Raises FileNotFoundError without a folder.
        """
        with self._lock:
            if not self._is_synced:
                os.fsync(self._write_held(_MAKING).fileno())
                self._is_synced = True

    def _write_held(self, turn: AbstractContextManager[object]) -> IO[bytes]:
        if self._is_closed:
            raise ValueError("the blob is closed")
        if self._file is None:
            with turn:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._file = os.fdopen(descriptor, "wb", buffering=0)
        while self._held:
            del self._held[: self._file.write(self._held)]
        return self._file

    def close(self) -> None:
        """Close the file, and remove it unless it is committed."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                try:
                    self._file.close()
                finally:
                    if not self.is_committed:
                        self._path.unlink(missing_ok=True)

    def commit(self) -> None:
        """Rename the synced file to its digest."""
        self._place(self._path, self.digest)
        self.is_committed = True


class FolderBlobs(BlobStore):
    """Blob store in a folder; a blob is complete and on disk before its name exists.

    Once the whole folder is gone, as when its disk is no longer mounted, methods raise StoreAway: no blob is missing.
    So a process that opens a known store does not `create` it: what it wrote would lie below the mount point.
    """

    def __init__(self, folder: Path, *, create: bool = True) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        if create:
            self._incoming.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Return the path of blob `name`; raises StorageFault unless it is a digest."""
        check_name(name)
        return self._folder / name[:2] / name

    @metered("put")
    def put(self, data: bytes) -> str:
        (name,) = self._put([data])
        return name

    @metered("put")
    def put_many(self, blobs: Sequence[bytes]) -> list[str]:
        return self._put(blobs)

    def _put(self, blobs: Sequence[bytes]) -> list[str]:
        names = [digest(data) for data in blobs]
        with ExitStack() as opened:
            written = []
            for name, data in zip(names, blobs, strict=True):
                if not self._is_whole(name, size_bytes=len(data)):
                    written.append(opened.enter_context(self.incoming(max_bytes=len(data))))
                    written[-1].write(data)
            if len(written) > 1:
                # A file system writes its journal once for all whose syncs wait for it.
                wait_together([each.sync for each in written])
            for each in written:
                each.sync()
                each.commit()
        return names

    @metered("get")
    def get(self, name: str, *, max_bytes: int) -> bytes:
        try:
            with self.path(name).open("rb") as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError as error:
            raise self._missing(name) from error
        return checked_blob(data, name, max_bytes=max_bytes)

    def remove(self, name: str) -> None:
        try:
            self.path(name).unlink()
        except FileNotFoundError as error:
            if not self._incoming.is_dir():
                raise self._away() from error

    def verified_path(self, name: str) -> Path:
        """Return the path of blob `name` after reading it once; raises StorageFault, DamagedBlob."""
        path, hasher = self.path(name), blake3()
        try:
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    hasher.update(piece)
        except FileNotFoundError as error:
            raise self._missing(name) from error
        if hasher.hexdigest() != name:
            raise DamagedBlob(f"blob {name} is damaged")
        return path

    def _missing(self, name: str) -> StorageFault | StoreAway:
        # An empty mount point is a folder, too: what tells is the one that is made before any blob.
        return StorageFault(f"blob {name} is missing") if self._incoming.is_dir() else self._away()

    def _away(self) -> StoreAway:
        return StoreAway(f"the blobs' folder {self._folder} is gone: see that its disk is mounted")

    def _is_whole(self, name: str, *, size_bytes: int) -> bool:
        try:
            with self.path(name).open("rb") as file:
                checked_blob(file.read(size_bytes + 1), name, max_bytes=size_bytes)
        except (FileNotFoundError, StorageFault):
            return False
        return True

    @contextmanager
    def incoming(self, *, max_bytes: int) -> Iterator[Incoming]:
        """Open a blob for writing in pieces; it is removed at the end of the block unless committed."""
        incoming = Incoming(self._incoming / secrets.token_hex(16), max_bytes=max_bytes, place=self._place)
        try:
            yield incoming
        except FileNotFoundError as error:
            if self._incoming.is_dir():
                raise
            raise self._away() from error
        finally:
            incoming.close()

    def _place(self, temporary: Path, name: str) -> None:
        target = self.path(name)
        try:
            temporary.replace(target)
        except FileNotFoundError:  # the first blob with these two digits
            try:
                target.parent.mkdir(exist_ok=True)
            except FileNotFoundError as error:
                raise self._away() from error
            temporary.replace(target)

    def sync(self) -> None:
        for each in (*self._folder.iterdir(), self._folder):
            sync_folder(each)

    def clear_leftovers(self) -> None:
        if not self._incoming.is_dir():
            raise self._away()
        for leftover in self._incoming.iterdir():
            try:
                if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                    leftover.unlink()
            except FileNotFoundError:
                continue  # committed meanwhile, or removed by another process
