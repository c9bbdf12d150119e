"""Create a backup of a run while it is served."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from msgspec import UNSET, structs

from coordinator.backup.blobs import (
    BlobCopier,
    CopyCounts,
    for_each,
    max_blob_bytes,
    pending_uploads,
    referenced_blobs,
)
from coordinator.backup.datasets import copy_datasets
from coordinator.backup.manifest import (
    BLOBS,
    LOCK,
    MANIFEST,
    MAX_MISSING,
    TABLES,
    BackupManifest,
    read_manifest,
    write_manifest,
)
from coordinator.backup.tables import write_table
from coordinator.errors import BadConfiguration, StorageFault
from coordinator.run.home import Home
from coordinator.storage import log as storage_log
from coordinator.storage.database import Connection
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.log_tree import LogTree
from coordinator.storage.whole_tables import VERSION_TABLE, WholeTable, known_revisions, revision, whole_tables
from node.datasets.folder import DATASETS
from shardcast.files import TEMPORARY_SUFFIX, FolderLock, sync_folder
from shardcast.wire import encode

EXCLUDED_TABLES: Final = frozenset({VERSION_TABLE, "heartbeats", "nonces", "newcomers", "log_nodes"})
"""Tables that are not backed up."""

_KNOWN_NAMES: Final = {MANIFEST, MANIFEST + TEMPORARY_SUFFIX, TABLES, BLOBS, DATASETS, LOCK}


@dataclass(frozen=True, slots=True)
class BackupResult:
    """A complete backup, and what was copied for it."""

    manifest: BackupManifest
    copied: CopyCounts


def back_up(home: Home, folder: Path, *, verify: bool = False) -> BackupResult:
    """Update the backup in `folder` (may be empty or missing) to the run's current state; other processes may keep
    running.

    With `verify` existing blobs are read, and damaged ones replaced. Raises BadConfiguration for a folder with other
    content or a backup that this run does not continue; StorageFault for a damaged log; LocalFault and OSError. On
    failure the previous backup stays intact.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        previous = _previous_manifest(folder, home)
        _remove_other_generations(folder, keep=previous.generation if previous else None)
        generation = secrets.token_hex(16)
        (folder / TABLES / generation).mkdir(parents=True)
        try:
            made = _write_backup(home, folder, generation, previous=previous, verify=verify)
        except BaseException:
            shutil.rmtree(folder / TABLES / generation, ignore_errors=True)
            raise
        _remove_other_generations(folder, keep=generation)
    finally:
        lock.release()
    return made


def _previous_manifest(folder: Path, home: Home) -> BackupManifest | None:
    if not (folder / MANIFEST).exists():
        others = sorted(path.name for path in folder.iterdir() if path.name not in _KNOWN_NAMES)
        if others:
            raise BadConfiguration(f"{folder} holds other files, e.g. {others[0]!r}: choose an empty folder")
        return None
    previous = read_manifest(folder)
    if previous.run_id != home.run_id:
        raise BadConfiguration(f"{folder} holds a backup of run {previous.run_id[:16]}…: choose another folder")
    return previous


def _remove_other_generations(folder: Path, *, keep: str | None) -> None:
    """Remove the tables of every generation but `keep`: of interrupted backups, and of the previous one."""
    tables = folder / TABLES
    for old in tables.iterdir() if tables.exists() else ():
        if old.name != keep:
            shutil.rmtree(old)


def _write_backup(
    home: Home, folder: Path, generation: str, *, previous: BackupManifest | None, verify: bool
) -> BackupResult:
    manifest = _snapshot(home, folder, generation, previous)
    target = FolderBlobs(folder / BLOBS)
    target.clear_leftovers()
    copying = BlobCopier(
        home.blobs,
        target,
        uploads=pending_uploads(folder, manifest),
        max_bytes=max_blob_bytes(home.spec),
        verify=verify,
    )
    for_each(referenced_blobs(folder, manifest, encode(home.spec)), copying.copy)
    missing = sorted(copying.copied.missing)
    if len(missing) > MAX_MISSING:
        raise StorageFault(f"blob store lacks {len(missing)} of the run's blobs, e.g. {missing[0]}")
    datasets = copy_datasets(home, folder, verify=verify)
    tables = folder / TABLES
    target.sync()
    for each in (tables / generation, tables, folder):
        sync_folder(each)
    complete = structs.replace(manifest, missing=tuple(missing), datasets=datasets or UNSET)
    return BackupResult(write_manifest(folder, complete), copying.copied)


def _snapshot(home: Home, folder: Path, generation: str, previous: BackupManifest | None) -> BackupManifest:
    """Write all tables as of one moment."""
    with home.database.read() as connection:
        made_at = int(time.time())
        schema = revision(connection)
        if schema not in known_revisions():
            raise BadConfiguration(f"database is of a newer release (schema {schema}): back up with that release")
        if previous is not None:
            _check_continues(connection, previous, folder)
        tree = LogTree()

        def on_row(table: WholeTable, row: Sequence[Any]) -> None:
            if table.name == storage_log.ENTRIES:
                tree.append(bytes(row[1]))

        tables = tuple(
            write_table(connection, table, folder, generation, on_row=partial(on_row, table))
            for table in whole_tables(connection, newest=True)
            if table.name not in EXCLUDED_TABLES
        )
        if tree.root() != storage_log.root(connection, tree.size):
            raise StorageFault("log entries do not match the Merkle root stored in the database")
    return BackupManifest(
        format="swarmproof backup/1",
        software=metadata.version("swarmproof"),
        revision=schema,
        run_id=home.run_id,
        log_size=tree.size,
        log_root=tree.root().hex(),
        made_at=made_at,
        generation=generation,
        tables=tables,
        missing=(),
    )


def _check_continues(connection: Connection, previous: BackupManifest, folder: Path) -> None:
    """Raise BadConfiguration unless the run's log extends the backed-up one: otherwise the backup may be the only copy
    of its history.
    """
    size = storage_log.size(connection)
    if size < previous.log_size or storage_log.root(connection, previous.log_size).hex() != previous.log_root:
        raise BadConfiguration(
            f"{folder} holds a backup with {previous.log_size} log entries, which this run's log of {size} does not "
            "continue: the run was restored from another backup since; choose another folder"
        )
