"""The database: migrations, and read and write transactions, on SQLite (the default) or PostgreSQL.

Every commit survives kill -9. A durable one, the default, also survives a power cut: it returns after an fsync. State
that may be lost then (nonces, leases) skips the fsync; submissions call `sync`, which waits without holding a lock.

SQLite has one writer at a time. PostgreSQL has many, which exclude each other by the locks of `locks`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError

from coordinator.errors import BadConfiguration
from coordinator.storage import locks, postgresql, sqlite
from coordinator.storage.faults import DatabaseAway, LockHeld, is_lock_held
from coordinator.storage.leadership import FileLeadership, Leadership, SessionLeadership
from coordinator.storage.prepared import Prepared, fence
from coordinator.storage.timings import Transaction, TransactionTimer
from node.runtime.extras import install_hint

__all__ = ["Connection", "Database", "migrations", "sqlite_path", "sqlite_url", "upgrade", "without_password"]

POOL_SIZE = 48
"""More than the server's threads, so that none of them waits for a connection."""

POSTGRESQL_POOL_SIZE = 12
"""Small, since the server's default limit is 100 connections, for all processes of the run together."""

POSTGRESQL_SETTINGS = {
    "application_name": "swarmproof",
    "lock_timeout": str(sqlite.BUSY_TIMEOUT_MS),
    # A process stopped inside a transaction must not block the others.
    "idle_in_transaction_session_timeout": "60000",
}
POSTGRESQL_LINK = {"keepalives_idle": 10, "keepalives_interval": 5, "tcp_user_timeout": 30_000}
"""After 30 s without a sign of life a connection is lost. A server whose host is switched off says nothing, and by the
system's own limits whoever waits for it does so for a quarter of an hour, or two hours: of a run's leases, all."""
_FLUSH: Final = text("SELECT pg_logical_emit_message(true, 'swarmproof', '')")
"""Writes a few bytes to the write-ahead log; their commit flushes everything before them."""


_SAVEPOINT, _RELEASE = Prepared(text("SAVEPOINT job")), Prepared(text("RELEASE SAVEPOINT job"))
_ROLL_BACK = Prepared(text("ROLLBACK TO SAVEPOINT job"))
_DURABLE = Prepared(text("SET LOCAL synchronous_commit = on"))

T = TypeVar("T")


class JobOutcome(NamedTuple, Generic[T]):
    """What one of several jobs returned, or what it raised; `is_sync_due` if it asked for a sync."""

    value: T | None
    error: Exception | None
    is_sync_due: bool = False


class _Batch(threading.local):
    """The transactions that this thread executes several jobs in, if any, and whether the last one asked for a sync."""

    connection: Connection | None = None
    reading: Connection | None = None
    is_sync_due = False


class Database:
    """Connection pools to the run's database, shared by the threads of one process."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._batch = _Batch()
        try:
            parsed = _checked(make_url(url))
            if parsed.get_backend_name() == "sqlite":
                self._open_sqlite(parsed)
            else:
                self._open_postgresql(parsed)
        except (ArgumentError, ImportError) as error:
            raise BadConfiguration(
                "--database-url is no SQLAlchemy URL whose driver is installed; for postgresql+psycopg://: "
                f"{install_hint('postgresql')}"
            ) from error

    def _open_sqlite(self, url: URL) -> None:
        sqlite.protect(Path(str(url.database)))
        self._engine = create_engine(url, pool_size=POOL_SIZE, max_overflow=0)
        self._lazy = create_engine(url, pool_size=POOL_SIZE, max_overflow=0)
        prompt = create_engine(url, pool_size=1, max_overflow=-1)  # one for each event loop
        self._write_lock: AbstractContextManager[None] = sqlite.FairLock()
        self._wal: sqlite.GroupSync | None = sqlite.GroupSync(Path(f"{url.database}-wal"))
        process_lock = sqlite.ProcessLock(Path(f"{url.database}-line"))
        sqlite.prepare(self._engine, process_lock, synchronous="FULL")
        sqlite.prepare(self._lazy, process_lock, synchronous="NORMAL")
        sqlite.prepare(prompt, process_lock, synchronous="NORMAL", waits=False)
        self._engines: Sequence[Engine] = (self._engine, self._lazy, prompt)
        writes = {sqlite.WRITES: True}
        self._reads: Engine = self._engine
        self._writes: dict[bool, Engine] = {
            True: self._engine.execution_options(**writes),
            False: self._lazy.execution_options(**writes),
        }
        self._prompt_reads: Engine = prompt
        self._prompt_writes: Engine = prompt.execution_options(**writes)

    def _open_postgresql(self, url: URL) -> None:
        link = {name: value for name, value in POSTGRESQL_LINK.items() if name not in url.query}

        def settings(**more: str) -> dict[str, str | int | None]:
            options = " ".join(f"-c {name}={value}" for name, value in (POSTGRESQL_SETTINGS | more).items())
            # psycopg prepares nothing, or it would deallocate all of a connection's, `Prepared`'s too, at a rollback.
            return {**link, "options": options, "connect_timeout": 10, "prepare_threshold": None}

        durable, lazy = settings(synchronous_commit="on"), settings(synchronous_commit="off")
        self._engine = create_engine(url, pool_size=POSTGRESQL_POOL_SIZE, max_overflow=0, connect_args=durable)
        self._lazy = create_engine(url, pool_size=POSTGRESQL_POOL_SIZE, max_overflow=0, connect_args=lazy)
        self._write_lock, self._wal = nullcontext(), None
        self._engines = (self._engine, self._lazy)
        for engine in self._engines:
            postgresql.prepare(engine)
        writes = {postgresql.BEGIN: postgresql.WRITES}
        self._reads = self._engine.execution_options(**{postgresql.BEGIN: postgresql.READS})
        self._writes = {
            True: self._engine.execution_options(**writes),
            False: self._lazy.execution_options(**writes),
        }

    def migrate(self) -> None:
        """Migrate the schema to this release's."""
        with self.write() as connection:
            locks.exclusive(connection)
            upgrade(connection)

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """Open a write transaction: committed at the end of the block, rolled back on any exception.

        Among jobs that are executed together it is a part of theirs.
        """
        shared = self._batch.connection
        with self._transaction(durable=durable) if shared is None else _savepoint(shared) as connection:
            yield connection

    @contextmanager
    def _transaction(self, *, durable: bool, asked_at: Sequence[float] = ()) -> Iterator[Connection]:
        # The time of the wait begins before the lock.
        asked_at = asked_at or (time.perf_counter(),)
        with self._write_lock, self._begun("write", self._writes[durable], asked_at) as connection:
            yield connection

    @contextmanager
    def _begun(self, kind: Transaction, engine: Engine, asked_at: Sequence[float]) -> Iterator[Connection]:
        with TransactionTimer(kind, asked_at) as timer, engine.connect() as connection, connection.begin():
            timer.begun()
            yield connection

    @property
    def has_many_writers(self) -> bool:
        """Whether transactions of `write` go on beside each other."""
        return self._wal is None

    def execute_together(
        self, jobs: Sequence[Callable[[], T]], *, asked_at: Sequence[float] = (), leasing: bool = False
    ) -> list[JobOutcome[T]]:
        """Call `jobs`, each with at most one transaction of `write`, which become one; return what each returned, or
        what it raised.

        `asked_at` is since when each has waited, by `time.perf_counter`, for the metrics. `leasing` says that they take
        `locks.leasing`, and otherwise none does.
        A job that raises undoes its own writes alone, and `sync` waits once, after the commit, for all that asked for
        it. One that would have waited for a lock on PostgreSQL has raised LockHeld, and is to be called by itself.
        Raises DatabaseAway, or StorageFault of the sync: then none is done. Not durable, as with `durable=False`.
        """
        with self._transaction(durable=False, asked_at=asked_at) as connection:
            locks.together(connection, leasing=leasing)
            outcomes = self._write_in(connection, jobs)
            fence(connection)
            is_sync_due = any(outcome.is_sync_due for outcome in outcomes)
            if is_sync_due and self._wal is None:  # its own commit is the flush
                _DURABLE.send(connection)
        if is_sync_due and self._wal is not None:
            self.sync()
        return outcomes

    def execute_now(self, jobs: Sequence[Callable[[], T]], *, asked_at: Sequence[float] = ()) -> list[JobOutcome[T]]:
        """Call `jobs` on SQLite as `execute_together`, but wait for nothing.

        What has `is_sync_due` is done once the caller's `sync` has returned. Raises LockHeld, and calls none of them,
        where it would wait for another writer.
        """
        assert isinstance(self._write_lock, sqlite.FairLock)
        with self._write_lock.if_free(), self._begun("write", self._prompt_writes, asked_at) as connection:
            return self._write_in(connection, jobs)

    def _write_in(self, connection: Connection, jobs: Sequence[Callable[[], T]]) -> list[JobOutcome[T]]:
        self._batch.connection = connection
        try:
            return [self._outcome(job) for job in jobs]
        finally:
            self._batch.connection = None

    def _outcome(self, job: Callable[[], T]) -> JobOutcome[T]:
        self._batch.is_sync_due = False
        try:
            return JobOutcome(job(), None, self._batch.is_sync_due)
        except DatabaseAway as error:
            if is_lock_held(error):
                return JobOutcome(None, LockHeld())
            raise
        except Exception as error:  # noqa: BLE001  (raised again by whoever waits for this job)
            return JobOutcome(None, error)

    def read_together(self, jobs: Sequence[Callable[[], T]], *, asked_at: Sequence[float] = ()) -> list[JobOutcome[T]]:
        """Call `jobs`, whose transactions of `read` become one; as `execute_together`."""
        with self._snapshot(asked_at) as connection:
            return self._read_in(connection, jobs)

    def read_now(self, jobs: Sequence[Callable[[], T]], *, asked_at: Sequence[float] = ()) -> list[JobOutcome[T]]:
        """Call `jobs` on SQLite as `read_together`, but wait for nothing; as `execute_now`."""
        with self._begun("read", self._prompt_reads, asked_at) as connection:
            return self._read_in(connection, jobs)

    def _read_in(self, connection: Connection, jobs: Sequence[Callable[[], T]]) -> list[JobOutcome[T]]:
        self._batch.reading = connection
        try:
            return [self._outcome(job) for job in jobs]
        finally:
            self._batch.reading = None

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read transaction: a snapshot of the database, without locks.

        Among jobs that are executed together it is theirs.
        """
        shared = self._batch.reading
        with self._snapshot() if shared is None else nullcontext(shared) as connection:
            yield connection

    def _snapshot(self, asked_at: Sequence[float] = ()) -> AbstractContextManager[Connection]:
        return self._begun("read", self._reads, asked_at)

    def sync(self) -> None:
        """Wait until everything committed so far is on disk, without blocking writers.

        Concurrent callers share one fsync of SQLite's write-ahead log, or the flush of PostgreSQL's. For state that
        others may see before it is durable, but that must not be acknowledged before.
        """
        if self._batch.connection is not None:
            self._batch.is_sync_due = True
            return
        if self._wal is not None:
            self._wal.sync()
            return
        with self.write() as connection:
            connection.execute(_FLUSH)

    def leadership(self) -> Leadership:
        """A claim to lead among the processes that have this database."""
        if self._engine.dialect.name == "sqlite":
            return FileLeadership(Path(f"{self._engine.url.database}-leader"))
        return SessionLeadership(self._engine)

    def close(self) -> None:
        """Close all connections."""
        for engine in self._engines:
            engine.dispose()


@contextmanager
def _savepoint(connection: Connection) -> Iterator[Connection]:
    """Undo what the block wrote in `connection` if it raises."""
    fence(connection)
    _SAVEPOINT.send(connection)
    try:
        yield connection
    except BaseException as error:
        if isinstance(error, DatabaseAway) and not is_lock_held(error):
            raise  # nothing can be undone, and the whole transaction ends
        fence(connection)
        _ROLL_BACK.run(connection)
        _RELEASE.send(connection)
        raise
    if connection.dialect.name == "sqlite":  # which keeps the pages before each; PostgreSQL's ends with the commit
        _RELEASE.run(connection)


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the migrations up to `revision`, in the transaction of `connection`."""
    config = migrations()
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def migrations() -> Config:
    """Return Alembic's configuration for this package's migrations."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


def _checked(url: URL) -> URL:
    """Return `url` with the supported driver; raises BadConfiguration unless several processes can share it."""
    backend = url.get_backend_name()
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise BadConfiguration("--database-url must be sqlite:///FILE or postgresql://USER@HOST/NAME")
    if url.database in {None, "", ":memory:"} or "uri" in url.query:
        raise BadConfiguration("--database-url must name a plain file: other processes have to find it")
    return url


def sqlite_url(folder: Path) -> str:
    """Return the URL of a data folder's default database."""
    return f"sqlite:///{folder / 'swarmproof.sqlite3'}"


def sqlite_path(url: str) -> Path | None:
    """Return an SQLite database's file, None for PostgreSQL."""
    parsed = make_url(url)
    return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def without_password(url: str) -> str:
    """Return a database URL with its password hidden, to show and store."""
    return make_url(url).render_as_string(hide_password=True)
