"""Restore a run from a backup into an empty place.

Requests signed within the last minute stay valid for another one, and whether one was used after the backup is unknown,
as nonces are not backed up. So the run is not in place before all of them have expired: `SETTLE_SECONDS` after the
start, provided the run's coordinator had stopped before.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.backup.blobs import for_each, max_blob_bytes, read_backup_blob, referenced_blobs
from coordinator.backup.create import EXCLUDED_TABLES
from coordinator.backup.datasets import held_datasets, restore_datasets, verify_datasets
from coordinator.backup.manifest import BackupError, BackupManifest, read_manifest
from coordinator.backup.tables import Scalar, load_table, read_rows
from coordinator.errors import BadConfiguration
from coordinator.run.home import DATABASE_URL_FILE, MAX_SPEC_BYTES
from coordinator.storage import locks, log, uploads
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Connection, Database, sqlite_path, sqlite_url, upgrade, without_password
from coordinator.storage.facts import BLOBS, FACTS, PUBLIC_KEY, SPEC, put_fact
from coordinator.storage.faults import DatabaseAway, DatabaseFault
from coordinator.storage.log_tree import LogTree
from coordinator.storage.open_blobs import open_blobs
from coordinator.storage.whole_tables import continue_sequences, known_revisions, table_names, whole_tables
from node.protocol.requests import MAX_CLOCK_SKEW_SECONDS
from node.protocol.run import FileSpec, RunSpec, run_id_of
from shardcast.errors import Malformed
from shardcast.wire import decode

SETTLE_SECONDS: Final = 2.0 * MAX_CLOCK_SKEW_SECONDS + 1.0
"""After this time every request an earlier coordinator accepted has expired, even if signed by a clock as far ahead as
allowed.
"""

_SQLITE_FILES: Final = ("", "-wal", "-shm", "-line")


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore; `blobs` counts the backup's blobs, and `lacking` are the run's datasets that it lacks."""

    manifest: BackupManifest
    blobs: int
    lacking: tuple[FileSpec, ...]


@dataclass(frozen=True, slots=True)
class _VerifiedBackup:
    """A verified backup: its rules, parsed and as stored."""

    folder: Path
    manifest: BackupManifest
    spec: RunSpec
    spec_text: bytes

    def names(self) -> Iterator[str]:
        """Yield the names of the blobs it holds."""
        lacking = frozenset(self.manifest.missing)
        return (name for name in referenced_blobs(self.folder, self.manifest, self.spec_text) if name not in lacking)

    def blob(self, name: str) -> bytes:
        return read_backup_blob(self.folder, name, max_bytes=max_blob_bytes(self.spec))


def restore(
    folder: Path,
    data: Path,
    *,
    database_url: str | None = None,
    blobs_url: str | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Restored:
    """Restore the backup in `folder` into the data folder `data` (empty or missing) and the given database and blob
    store.

    `wait` is called once, with the seconds left of SETTLE_SECONDS after verification. Raises BackupError,
    BadConfiguration, LocalFault or OSError, and then leaves nothing but blobs in an object store.
    """
    begun = time.monotonic()
    manifest = read_manifest(folder)
    if manifest.revision not in known_revisions():
        raise BackupError(f"{folder} is of a newer release, {manifest.software}: restore it with that release")
    _check_place(data, database_url)
    checked = _verify_backup(folder, manifest)
    wait(max(0.0, SETTLE_SECONDS - (time.monotonic() - begun)))
    with _rollback_on_failure(data, database_url):
        data.mkdir(parents=True, exist_ok=True)
        store = open_blobs(blobs_url, data, create=True)
        store.begin(checked.spec_text)
        count = _put_blobs(checked, store)
        restore_datasets(folder, manifest, checked.spec, data=data)
        if database_url is not None:
            (data / DATABASE_URL_FILE).write_text(without_password(database_url))
        with _writing(database_url or sqlite_url(data)) as connection:
            _load(connection, checked, store=(blobs_url or "").rstrip("/"))
    held = held_datasets(manifest, checked.spec)
    return Restored(manifest, count, tuple(one for one in checked.spec.dataset_files if one not in held))


def _check_place(data: Path, database_url: str | None) -> None:
    """Raise BadConfiguration if anything would be overwritten."""
    if data.exists() and any(data.iterdir()):
        raise BadConfiguration(f"{data} is not empty: choose a new folder with --data")
    if database_url is None:
        return
    database = Database(database_url)
    if files := _sqlite_files(database_url):
        if files[0].exists():
            raise BadConfiguration(f"{files[0]} exists already: choose a new file with --database-url")
        return
    try:
        with database.read() as connection:
            tables = table_names(connection)
    except DatabaseAway as error:
        raise BadConfiguration(f"--database-url cannot be reached: {error.orig}") from error
    finally:
        database.close()
    if tables:
        raise BadConfiguration(f"database of --database-url already has a table {tables[0]!r}: choose an empty one")


def _sqlite_files(database_url: str) -> list[Path]:
    """Return a SQLite database's files, the main one first; [] for PostgreSQL."""
    path = sqlite_path(database_url)
    return [] if path is None else [Path(f"{path}{end}") for end in _SQLITE_FILES]


@contextmanager
def _writing(database_url: str) -> Iterator[Connection]:
    """Open an atomic transaction; raises BackupError for what the database refuses."""
    database = Database(database_url)
    try:
        with database.write() as connection:
            yield connection
    except DatabaseFault as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise BackupError(f"database refused the backup: {reason}") from error
    finally:
        database.close()


@contextmanager
def _rollback_on_failure(data: Path, database_url: str | None) -> Iterator[None]:
    """Remove what was written if the block fails; PostgreSQL rolls back by itself."""
    was_there = data.exists()
    try:
        yield
    except BaseException:
        for path in data.iterdir() if data.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not was_there and data.exists():
            data.rmdir()
        for path in _sqlite_files(database_url) if database_url is not None else ():
            path.unlink(missing_ok=True)
        raise


def _verify_backup(folder: Path, manifest: BackupManifest) -> _VerifiedBackup:
    """Read and verify all of a backup before anything is written; raises BackupError."""
    known: dict[Scalar, Scalar] = {}
    for table in manifest.tables:
        rows = read_rows(folder, manifest.generation, table)
        if table.columns == ("name", "value") and table.name == FACTS:
            known = {row[0]: row[1] for row in rows}
        deque(rows, maxlen=0)
    rules = str(known.get(SPEC)).encode()
    try:
        spec = decode(RunSpec, rules, max_bytes=MAX_SPEC_BYTES)
        run_id = run_id_of(bytes.fromhex(str(known.get(PUBLIC_KEY))))
    except (Malformed, ValueError) as error:
        raise BackupError(f"{folder} does not identify its run: {error}") from error
    if run_id != manifest.run_id:
        raise BackupError(f"{folder} has tables of another run than its manifest")
    checked = _VerifiedBackup(folder, manifest, spec, rules)
    for_each(checked.names(), checked.blob)
    verify_datasets(folder, manifest, spec)
    return checked


def _put_blobs(checked: _VerifiedBackup, store: BlobStore) -> int:
    """Put all blobs into the run's store; return their number."""

    def put(name: str) -> None:
        store.put(checked.blob(name))

    count = for_each(checked.names(), put)
    store.sync()
    return count


def _load(connection: Connection, checked: _VerifiedBackup, *, store: str) -> None:
    """Create the backup's schema, load it, and upgrade it to this release's."""
    manifest = checked.manifest
    locks.exclusive(connection)
    upgrade(connection, manifest.revision)
    present = {table.name: table for table in whole_tables(connection, newest=False)}
    files = {table.name: table for table in manifest.tables}
    if files.keys() != present.keys() - EXCLUDED_TABLES:
        raise BackupError(f"backup tables do not match schema {manifest.revision}")
    for table in present.values():
        if table.name in files:
            file = files[table.name]
            load_table(connection, table, file.columns, read_rows(checked.folder, manifest.generation, file))
    _rebuild_log_nodes(connection, manifest)
    upgrade(connection)
    continue_sequences(connection)
    uploads.forget_all(connection)  # they name the previous store; their bodies are in the backup's blobs
    put_fact(connection, BLOBS, store)


def _rebuild_log_nodes(connection: Connection, manifest: BackupManifest) -> None:
    """Derive the log's inner nodes from the loaded entries; raises BackupError unless they match the manifest."""
    tree = LogTree()
    while leaves := log.leaves(connection, tree.size, manifest.log_size):
        log.add_nodes(connection, [node for leaf in leaves for node in tree.append(leaf)])
    if not log.size(connection) == tree.size == manifest.log_size or tree.root().hex() != manifest.log_root:
        raise BackupError("backup log does not match the Merkle root in its manifest")
