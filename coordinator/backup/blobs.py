"""Blobs of a backup: list what its rows refer to, and copy it concurrently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from coordinator.backup.manifest import BackupError, BackupManifest, blob_path
from coordinator.backup.tables import read_rows
from coordinator.errors import CorruptRead, StorageFault
from coordinator.run.home import MAX_SPEC_BYTES
from coordinator.storage.blobs import BlobStore, Upload, checked_blob
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.schema import SubmissionState
from coordinator.training.group_size import max_group_bytes
from coordinator.verifier.evidence import MAX_BLOB_BYTES
from node.protocol.requests import MAX_HEADER_BYTES
from node.protocol.run import RunSpec
from shardcast.wire import digest, is_digest

REFERENCES: Final = {"submissions": ("request", "body", "evidence"), "groups": ("blob",)}
"""Columns that hold blob names, by table; earlier schemas lack some. The run's rules are a blob, too.

A submission with an `envelope` has its request in that column, and not in a blob.
"""

_THREADS: Final = 8
_BATCH_NAMES: Final = 256


def max_blob_bytes(spec: RunSpec) -> int:
    """Return the upper bound of a blob's size in this run."""
    return max(
        spec.limits.max_submission_bytes, max_group_bytes(spec), MAX_BLOB_BYTES, MAX_SPEC_BYTES, MAX_HEADER_BYTES
    )


def referenced_blobs(folder: Path, manifest: BackupManifest, spec: bytes) -> Iterator[str]:
    """Yield the names of all blobs of the backup in `folder`, possibly repeated. Raises BackupError."""
    yield digest(spec)
    for table in manifest.tables:
        columns = [name for name in REFERENCES.get(table.name, ()) if name in table.columns]
        for row in read_rows(folder, manifest.generation, table) if columns else ():
            values = dict(zip(table.columns, row, strict=True))
            if table.name == "submissions" and values["state"] == SubmissionState.EXPIRED:
                continue
            without = "request" if values.get("envelope") is not None else None
            for name in (values[column] for column in columns if column != without):
                if not name:  # none, or an expired group's
                    continue
                if not isinstance(name, str) or not is_digest(name):
                    raise BackupError(f"backup table {table.name} has a row with an invalid blob name")
                yield name


def for_each(names: Iterable[str], do: Callable[[str], object]) -> int:
    """Call `do` on each of `names` in threads and return their number. Raises the first exception."""
    iterator, count = iter(names), 0
    with ThreadPoolExecutor(_THREADS) as pool:
        while batch := dict.fromkeys(islice(iterator, _BATCH_NAMES)):
            count += sum(1 for _ in pool.map(do, batch))
    return count


def pending_uploads(folder: Path, manifest: BackupManifest) -> dict[str, Upload]:
    """Return the uploads in the object store that await their verdict, by blob name."""
    uploads: dict[str, Upload] = {}
    for table in manifest.tables:
        if table.name == "uploads":
            for row in read_rows(folder, manifest.generation, table):
                values = dict(zip(table.columns, row, strict=True))
                if values["submission"] is not None:
                    upload = Upload(
                        str(values["lease"]), str(values["body"]), str(values["sha256"]), int(str(values["body_bytes"]))
                    )
                    uploads[upload.body] = upload
    return uploads


@dataclass(slots=True)
class CopyCounts:
    """Blobs added to the backup, and those missing from the run's own store."""

    blobs: int = 0
    size_bytes: int = 0
    missing: set[str] = field(default_factory=set)


class BlobCopier:
    """Copies blobs of a run into a backup folder. Thread-safe."""

    def __init__(
        self, store: BlobStore, target: FolderBlobs, *, uploads: dict[str, Upload], max_bytes: int, verify: bool
    ) -> None:
        self._store, self._target, self._uploads = store, target, uploads
        self._max_bytes, self._verify = max_bytes, verify
        self._lock = threading.Lock()
        self.copied = CopyCounts()

    def copy(self, name: str) -> None:
        """Copy blob `name` unless it exists already (and is intact, with `verify`)."""
        path = self._target.path(name)
        if path.exists() and (not self._verify or self._is_whole(name)):
            return
        data = self._fetch(name)
        if data is not None:
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

    def _fetch(self, name: str) -> bytes | None:
        """Fetch blob `name`, or the pending upload that will become it; None if there is neither."""
        for look in (self._stored, self._pending_body, self._stored):  # it may be stored meanwhile
            try:
                data = look(name)
            except (StorageFault, CorruptRead):
                continue
            if data is not None and digest(data) == name:
                return data
        return None

    def _stored(self, name: str) -> bytes:
        return self._store.get(name, max_bytes=self._max_bytes)

    def _pending_body(self, name: str) -> bytes | None:
        upload = self._uploads.get(name)
        store = self._store.uploads
        return None if upload is None or store is None else store.fetch(upload)


def read_backup_blob(folder: Path, name: str, *, max_bytes: int) -> bytes:
    """Read blob `name` of the backup in `folder`; raises BackupError."""
    path = blob_path(folder, name)
    try:
        with path.open("rb") as file:
            return checked_blob(file.read(max_bytes + 1), name, max_bytes=max_bytes)
    except FileNotFoundError as error:
        raise BackupError(f"{path} is missing") from error
    except StorageFault as error:
        raise BackupError(f"{path} is damaged: {error}") from error
