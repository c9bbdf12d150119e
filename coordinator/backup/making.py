"""Making a backup of a run, while others serve it."""

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

from alembic.script import ScriptDirectory
from msgspec import structs
from sqlalchemy import Connection, MetaData, Table, select

from coordinator.backup.blobs import Copied, Copying, for_each, max_blob_bytes, named, sync_blobs, uploaded
from coordinator.backup.log_tree import LogTree
from coordinator.backup.manifest import (
    BLOBS,
    LOCK,
    MANIFEST,
    MAX_MISSING,
    TABLES,
    Manifest,
    read_manifest,
    write_manifest,
)
from coordinator.backup.tables import write_table
from coordinator.errors import BadConfiguration, StorageFault
from coordinator.home import Home
from coordinator.storage import log as storage_log
from coordinator.storage.database import migrations
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.schema import log_entries
from coordinator.storage.schema import metadata as newest_schema
from shardcast.files import TEMPORARY_SUFFIX, FolderLock, sync_folder
from shardcast.wire import encode

VERSION_TABLE: Final = "alembic_version"
LEFT_OUT: Final = frozenset({VERSION_TABLE, "nonces", "log_nodes"})
"""Tables that are not in a backup."""

_OURS: Final = {MANIFEST, MANIFEST + TEMPORARY_SUFFIX, TABLES, BLOBS, LOCK}


@dataclass(frozen=True, slots=True)
class Made:
    """A backup that is complete, and what came into its folder with it."""

    manifest: Manifest
    copied: Copied


def back_up(home: Home, folder: Path, *, verify: bool = False) -> Made:
    """Bring the backup in `folder`, which may be empty or missing, to the run's state now; any process may go on.

    With `verify` the blobs that are there are read, and those that are damaged replaced. Raises BadConfiguration for a
    folder that holds something else, or a backup that this run does not continue; StorageFault for a log that is
    damaged; LocalFault and OSError. Whatever happens, the backup that was there before is there, or the new one.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        before = _earlier(folder, home)
        _clear(folder, keep=before.generation if before else None)
        generation = secrets.token_hex(16)
        (folder / TABLES / generation).mkdir(parents=True)
        try:
            made = _made(home, folder, generation, before=before, verify=verify)
        except BaseException:
            shutil.rmtree(folder / TABLES / generation, ignore_errors=True)
            raise
        _clear(folder, keep=generation)
    finally:
        lock.release()
    return made


def _earlier(folder: Path, home: Home) -> Manifest | None:
    if not (folder / MANIFEST).exists():
        others = sorted(path.name for path in folder.iterdir() if path.name not in _OURS)
        if others:
            raise BadConfiguration(f"{folder} holds other files, {others[0]!r} among them: name an empty folder")
        return None
    before = read_manifest(folder)
    if before.run_id != home.run_id:
        raise BadConfiguration(f"{folder} holds the backup of run {before.run_id[:16]}…: name another folder")
    return before


def _clear(folder: Path, *, keep: str | None) -> None:
    """Remove the tables of every backup but that of generation `keep`: of killed ones, and of the one before it."""
    tables = folder / TABLES
    for old in tables.iterdir() if tables.exists() else ():
        if old.name != keep:
            shutil.rmtree(old)


def _made(home: Home, folder: Path, generation: str, *, before: Manifest | None, verify: bool) -> Made:
    manifest = _snapshot(home, folder, generation, before)
    target = FolderBlobs(folder / BLOBS)
    target.clear_leftovers()
    copying = Copying(
        home.blobs,
        target,
        uploads=uploaded(folder, manifest),
        max_bytes=max_blob_bytes(home.spec),
        verify=verify,
    )
    for_each(named(folder, manifest, encode(home.spec)), copying.copy)
    missing = sorted(copying.copied.missing)
    if len(missing) > MAX_MISSING:
        raise StorageFault(f"the run's store lacks {len(missing)} of its blobs, {missing[0]} among them")
    tables = folder / TABLES
    sync_blobs(folder / BLOBS)
    for each in (tables / generation, tables, folder):
        sync_folder(each)
    return Made(write_manifest(folder, structs.replace(manifest, missing=tuple(missing))), copying.copied)


def _snapshot(home: Home, folder: Path, generation: str, before: Manifest | None) -> Manifest:
    """Write all tables as they are at one moment."""
    with home.database.read() as connection:
        made_at = int(time.time())
        schema = MetaData()
        schema.reflect(connection, only=lambda name, _: name in newest_schema.tables or name == VERSION_TABLE)
        revision = connection.execute(select(schema.tables[VERSION_TABLE])).scalar_one()
        if revision not in revisions():
            raise BadConfiguration(f"the database is of a newer release (schema {revision}): back up with that one")
        if before is not None:
            _check_continues(connection, before, folder)
        tree = LogTree()

        def look(table: Table, row: Sequence[Any]) -> None:
            if table.name == log_entries.name:
                tree.append(bytes(row[1]))

        tables = tuple(
            write_table(connection, table, folder, generation, look=partial(look, table))
            for table in schema.sorted_tables
            if table.name not in LEFT_OUT
        )
        if tree.root() != storage_log.root(connection, tree.size):
            raise StorageFault("the log's entries do not have the Merkle root that the database keeps for them")
    return Manifest(
        format="veriswarm backup/1",
        software=metadata.version("veriswarm"),
        revision=revision,
        run_id=home.run_id,
        log_size=tree.size,
        log_root=tree.root().hex(),
        made_at=made_at,
        generation=generation,
        tables=tables,
        missing=(),
    )


def _check_continues(connection: Connection, before: Manifest, folder: Path) -> None:
    """Raise BadConfiguration where the log that was backed up is no beginning of the run's: each is then all that is
    left of its history."""
    size = storage_log.size(connection)
    if size < before.log_size or storage_log.root(connection, before.log_size).hex() != before.log_root:
        raise BadConfiguration(
            f"{folder} holds a backup with {before.log_size} log entries, which this run's log of {size} does not "
            "continue: the run was restored from another backup since; name another folder"
        )


def revisions() -> frozenset[str]:
    """The schemas that this release knows."""
    return frozenset(step.revision for step in ScriptDirectory.from_config(migrations()).walk_revisions())
