"""The blobs of a backup: which ones its rows refer to, and copying them, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from coordinator.backup.manifest import BackupError, Manifest, blob_path
from coordinator.backup.tables import read_rows
from coordinator.errors import StorageFault
from coordinator.evidence import MAX_BLOB_BYTES
from coordinator.home import MAX_SPEC_BYTES
from coordinator.storage.blobs import BlobStore, Upload, UploadStore, checked_blob
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.training.group_size import max_group_bytes
from node.protocol.requests import MAX_HEADER_BYTES
from node.protocol.run import RunSpec
from shardcast.files import sync_folder
from shardcast.wire import digest, is_digest

REFERENCES: Final = {"submissions": ("request", "body", "evidence"), "groups": ("blob",)}
"""Columns, by table, that hold the names of blobs; earlier schemas lack some. The run's rules are a blob, too."""

_THREADS: Final = 8
_AT_ONCE: Final = 256


def max_blob_bytes(spec: RunSpec) -> int:
    """The most that any blob of the run has."""
    return max(
        spec.limits.max_submission_bytes, max_group_bytes(spec), MAX_BLOB_BYTES, MAX_SPEC_BYTES, MAX_HEADER_BYTES
    )


def named(folder: Path, manifest: Manifest, spec: bytes) -> Iterator[str]:
    """The names of all blobs of the backup in `folder`; some of them more than once. Raises BackupError."""
    yield digest(spec)
    for table in manifest.tables:
        at = [table.columns.index(name) for name in REFERENCES.get(table.name, ()) if name in table.columns]
        for row in read_rows(folder, manifest.generation, table) if at else ():
            for name in (row[place] for place in at):
                if name is None:
                    continue
                if not isinstance(name, str) or not is_digest(name):
                    raise BackupError(f"a row of the backup's table {table.name} names no blob where it should")
                yield name


def for_each(names: Iterable[str], do: Callable[[str], object]) -> int:
    """Call `do` on each of `names`, in threads; how many there were. Raises what the first of them raises."""
    every, count = iter(names), 0
    with ThreadPoolExecutor(_THREADS) as pool:
        while some := dict.fromkeys(islice(every, _AT_ONCE)):
            count += sum(1 for _ in pool.map(do, some))
    return count


def uploaded(folder: Path, manifest: Manifest) -> dict[str, Upload]:
    """What lies in the object store under its lease until its verdict, by the name that its sender gave the body."""
    found: dict[str, Upload] = {}
    for table in manifest.tables:
        if table.name == "uploads":
            for row in read_rows(folder, manifest.generation, table):
                of = dict(zip(table.columns, row, strict=True))
                if of["submission"] is not None:
                    upload = Upload(str(of["lease"]), str(of["body"]), str(of["sha256"]), int(str(of["body_bytes"])))
                    found[upload.body] = upload
    return found


@dataclass(slots=True)
class Copied:
    """Blobs that came into the backup, and those that the run's own store does not have."""

    blobs: int = 0
    size_bytes: int = 0
    missing: set[str] = field(default_factory=set)


class Copying:
    """Copies blobs of a run into the folder of a backup. Safe to share between threads."""

    def __init__(
        self, store: BlobStore, target: FolderBlobs, *, uploads: dict[str, Upload], max_bytes: int, verify: bool
    ) -> None:
        self._store, self._target, self._uploads = store, target, uploads
        self._max_bytes, self._verify = max_bytes, verify
        self._lock = threading.Lock()
        self.copied = Copied()

    def copy(self, name: str) -> None:
        """Copy blob `name`, unless it is there already: and is whole, if that is to be looked at."""
        path = self._target.path(name)
        if path.exists() and (not self._verify or self._is_whole(name)):
            return
        data = self._fetched(name)
        if data is not None:
            path.unlink(missing_ok=True)
            self._target.put(data)
        with self._lock:
            if data is None:
                self.copied.missing.add(name)
            else:
                self.copied.blobs += 1
                self.copied.size_bytes += len(data)

    def _is_whole(self, name: str) -> bool:
        try:
            self._target.get(name, max_bytes=self._max_bytes)
        except StorageFault:
            return False
        return True

    def _fetched(self, name: str) -> bytes | None:
        """Blob `name` of the run, or what will get that name once it is judged; None if there is neither."""
        for look in (self._stored, self._not_judged_yet, self._stored):  # it may get its name meanwhile
            try:
                data = look(name)
            except StorageFault:
                continue
            if data is not None and digest(data) == name:
                return data
        return None

    def _stored(self, name: str) -> bytes:
        return self._store.get(name, max_bytes=self._max_bytes)

    def _not_judged_yet(self, name: str) -> bytes | None:
        upload = self._uploads.get(name)
        if upload is None or not isinstance(self._store, UploadStore):
            return None
        return self._store.fetch(upload)


def backed_up(folder: Path, name: str, *, max_bytes: int) -> bytes:
    """Blob `name` of the backup in `folder`; raises BackupError."""
    path = blob_path(folder, name)
    try:
        with path.open("rb") as file:
            return checked_blob(file.read(max_bytes + 1), name, max_bytes=max_bytes)
    except FileNotFoundError as error:
        raise BackupError(f"{path} is missing") from error
    except StorageFault as error:
        raise BackupError(f"{path} is damaged: {error}") from error


def sync_blobs(folder: Path) -> None:
    """Make the names of the blobs in `folder` durable, as their content is already."""
    for each in (*folder.iterdir(), folder):
        sync_folder(each)
