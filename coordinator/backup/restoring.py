"""Restoring a run from a backup, into a place where nothing is.

What nodes signed within the last minute is good for another one, and whether it was used up after the backup is known
to nobody here: its nonces are gone. So nothing is in place before all of it is out of date: `SETTLE_SECONDS` after the
beginning, if the coordinator that the run had stopped before.
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

from sqlalchemy import Connection, MetaData, delete, func, insert, inspect, make_url, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from coordinator.backup.blobs import backed_up, for_each, max_blob_bytes, named, sync_blobs
from coordinator.backup.log_tree import LogTree
from coordinator.backup.making import LEFT_OUT, revisions
from coordinator.backup.manifest import BackupError, Manifest, read_manifest
from coordinator.backup.tables import Scalar, insert_rows, load_table, read_rows
from coordinator.errors import BadConfiguration
from coordinator.home import ELSEWHERE, MAX_SPEC_BYTES
from coordinator.leader import FACT as LEADER
from coordinator.storage import locks, log
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database, sqlite_url, upgrade
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.open_blobs import open_blobs
from coordinator.storage.schema import facts, log_nodes, uploads
from coordinator.storage.schema import metadata as newest_schema
from node.protocol.requests import MAX_CLOCK_SKEW_SECONDS
from node.protocol.run import RunSpec, run_id_of
from shardcast.errors import Malformed
from shardcast.wire import decode, digest

SETTLE_SECONDS: Final = 2.0 * MAX_CLOCK_SKEW_SECONDS + 1.0
"""By then, whatever a coordinator has accepted is too old for the next: it may have been signed by a clock that is
ahead by as much as is allowed."""

_STORE: Final = "blobs"
"""The fact that says where the run's blobs are (`coordinator.home`)."""

_SQLITE_FILES: Final = ("", "-wal", "-shm", "-line")
_SEQUENCE: Final = "SELECT pg_get_serial_sequence(:table, :column)"


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored; `blobs` counts those of the backup."""

    manifest: Manifest
    blobs: int


@dataclass(frozen=True, slots=True)
class _Checked:
    """A backup that is whole: its rules, as they are and as they are stored, and the run's public key."""

    folder: Path
    manifest: Manifest
    spec: RunSpec
    spec_text: bytes

    def names(self) -> Iterator[str]:
        """The blobs that it has."""
        lacking = frozenset(self.manifest.missing)
        return (name for name in named(self.folder, self.manifest, self.spec_text) if name not in lacking)

    def blob(self, name: str) -> bytes:
        return backed_up(self.folder, name, max_bytes=max_blob_bytes(self.spec))


def restore(
    folder: Path,
    data: Path,
    *,
    database_url: str | None = None,
    blobs_url: str | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Restored:
    """Restore the backup in `folder` into the data folder `data`, which has to be empty or missing, and the database
    and the store that are named.

    `wait` is called once, with how many seconds are left of SETTLE_SECONDS when everything was checked. Raises
    BackupError, BadConfiguration or OSError, and leaves nothing then but blobs in an object store.
    """
    begun = time.monotonic()
    manifest = read_manifest(folder)
    if manifest.revision not in revisions():
        raise BackupError(f"{folder} is of a newer release, {manifest.software}: restore it with that one")
    _check_place(data, database_url)
    checked = _checked(folder, manifest)
    wait(max(0.0, SETTLE_SECONDS - (time.monotonic() - begun)))
    with _undone_on_failure(data, database_url):
        data.mkdir(parents=True, exist_ok=True)
        store = open_blobs(blobs_url, data)
        store.begin(checked.spec_text)
        count = _put_blobs(checked, store)
        if database_url is not None:
            (data / ELSEWHERE).write_text(make_url(database_url).render_as_string(hide_password=True))
        with _writing(database_url or sqlite_url(data)) as connection:
            _load(connection, checked, store=(blobs_url or "").rstrip("/"))
    return Restored(manifest, count)


def _check_place(data: Path, database_url: str | None) -> None:
    """Raise BadConfiguration where anything would be overwritten."""
    if data.exists() and any(data.iterdir()):
        raise BadConfiguration(f"{data} is not empty: name a new folder with --data")
    if database_url is None:
        return
    database = Database(database_url)
    if files := _sqlite_files(database_url):
        if files[0].exists():
            raise BadConfiguration(f"{files[0]} is there already: name a new file with --database-url")
        return
    try:
        with database.read() as connection:
            tables = inspect(connection).get_table_names()
    except OperationalError as error:
        raise BadConfiguration(f"--database-url cannot be reached: {error.orig}") from error
    finally:
        database.close()
    if tables:
        raise BadConfiguration(f"the database of --database-url has a table {tables[0]!r} already: name an empty one")


def _sqlite_files(database_url: str) -> list[Path]:
    """The files that a database takes, itself first; none of PostgreSQL's."""
    url = make_url(database_url)
    return [Path(f"{url.database}{end}") for end in _SQLITE_FILES] if url.get_backend_name() == "sqlite" else []


@contextmanager
def _writing(database_url: str) -> Iterator[Connection]:
    """A transaction that is all or nothing; raises BackupError for what the database does not do."""
    database = Database(database_url)
    try:
        with database.write() as connection:
            yield connection
    except DBAPIError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise BackupError(f"the database does not take the backup: {reason}") from error
    finally:
        database.close()


@contextmanager
def _undone_on_failure(data: Path, database_url: str | None) -> Iterator[None]:
    """Remove what was written, should the block fail; PostgreSQL does that itself."""
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


def _checked(folder: Path, manifest: Manifest) -> _Checked:
    """Read all of a backup, before anything is written; raises BackupError."""
    known: dict[Scalar, Scalar] = {}
    for table in manifest.tables:
        rows = read_rows(folder, manifest.generation, table)
        if table.columns == ("name", "value") and table.name == facts.name:
            known = {row[0]: row[1] for row in rows}
        deque(rows, maxlen=0)
    rules = str(known.get("spec")).encode()
    try:
        spec = decode(RunSpec, rules, max_bytes=MAX_SPEC_BYTES)
        run_id = run_id_of(bytes.fromhex(str(known.get("public_key"))))
    except (Malformed, ValueError) as error:
        raise BackupError(f"{folder} does not say what its run is: {error}") from error
    if run_id != manifest.run_id:
        raise BackupError(f"{folder} has the tables of another run than its manifest's")
    checked = _Checked(folder, manifest, spec, rules)
    for_each(checked.names(), checked.blob)
    return checked


def _put_blobs(checked: _Checked, store: BlobStore) -> int:
    """Put all blobs into the run's store; how many."""

    def put(name: str) -> None:
        store.put(checked.blob(name))

    count = for_each(checked.names(), put)
    if isinstance(store, FolderBlobs):
        sync_blobs(store.path(digest(checked.spec_text)).parents[1])
    return count


def _load(connection: Connection, checked: _Checked, *, store: str) -> None:
    """Make the backup's schema, fill it, and bring it to this release's."""
    manifest = checked.manifest
    locks.alone(connection)
    upgrade(connection, manifest.revision)
    schema = MetaData()
    schema.reflect(connection)
    files = {table.name: table for table in manifest.tables}
    if files.keys() != schema.tables.keys() - LEFT_OUT:
        raise BackupError(f"the backup's tables are not those of schema {manifest.revision}")
    for table in schema.sorted_tables:
        if table.name in files:
            file = files[table.name]
            load_table(connection, table, file.columns, read_rows(checked.folder, manifest.generation, file))
    _grow_log(connection, manifest)
    upgrade(connection)
    if connection.dialect.name == "postgresql":
        _set_sequences(connection)
    connection.execute(delete(uploads))  # of a store that the run has left; their bodies are blobs by now
    connection.execute(delete(facts).where(facts.c.name.in_((_STORE, LEADER))))
    connection.execute(insert(facts).values(name=_STORE, value=store))


def _grow_log(connection: Connection, manifest: Manifest) -> None:
    """Derive the log's inner nodes from its entries, as they are in the database now; raises BackupError unless they
    are those of the manifest."""
    tree = LogTree()
    while leaves := log.leaves(connection, tree.size, manifest.log_size):
        nodes = [node for leaf in leaves for node in tree.append(leaf)]
        rows: list[dict[str, object]] = [{"level": level, "index": at, "hash": value} for level, at, value in nodes]
        insert_rows(connection, log_nodes, rows)
    if not log.size(connection) == tree.size == manifest.log_size or tree.root().hex() != manifest.log_root:
        raise BackupError("the backup's log does not have the Merkle root that its manifest names")


def _set_sequences(connection: Connection) -> None:
    """Have PostgreSQL count on from the rows that there are."""
    for table in newest_schema.sorted_tables:
        column = table.autoincrement_column
        if column is None:
            continue
        sequence = connection.execute(text(_SEQUENCE), {"table": table.name, "column": column.name}).scalar()
        last = connection.execute(select(func.max(column))).scalar()
        if sequence is not None and last is not None:
            connection.execute(select(func.setval(sequence, last)))
