"""The database: migrations, and read and write transactions, on SQLite (the default) or PostgreSQL.

Every commit survives kill -9. A durable one, the default, also survives a power cut: it returns after an fsync. State
that may be lost then (nonces, leases) skips the fsync; submissions call `sync`, which waits without holding a lock.

SQLite has one writer at a time. PostgreSQL has many, which exclude each other by the locks of `locks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError

from coordinator.errors import BadConfiguration
from coordinator.storage import locks, sqlite
from coordinator.storage.leadership import FileLeadership, Leadership, SessionLeadership
from coordinator.storage.timings import TransactionTimer

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
_FLUSH: Final = text("SELECT pg_logical_emit_message(true, 'swarmproof', '')")
"""Writes a few bytes to the write-ahead log; their commit flushes everything before them."""


class Database:
    """Connection pools to the run's database, shared by the threads of one process."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            parsed = _checked(make_url(url))
            if parsed.get_backend_name() == "sqlite":
                self._open_sqlite(parsed)
            else:
                self._open_postgresql(parsed)
        except (ArgumentError, ImportError) as error:
            raise BadConfiguration(
                "--database-url is no SQLAlchemy URL whose driver is installed; for postgresql+psycopg:// "
                "pip install '.[postgresql]'"
            ) from error

    def _open_sqlite(self, url: URL) -> None:
        sqlite.protect(Path(str(url.database)))
        self._engine = create_engine(url, pool_size=POOL_SIZE, max_overflow=0)
        self._lazy = create_engine(url, pool_size=POOL_SIZE, max_overflow=0)
        self._write_lock: AbstractContextManager[None] = sqlite.FairLock()
        self._wal: sqlite.GroupSync | None = sqlite.GroupSync(Path(f"{url.database}-wal"))
        process_lock = sqlite.ProcessLock(Path(f"{url.database}-line"))
        sqlite.prepare(self._engine, process_lock, synchronous="FULL")
        sqlite.prepare(self._lazy, process_lock, synchronous="NORMAL")
        self._snapshot: dict[str, object] = {}

    def _open_postgresql(self, url: URL) -> None:
        def settings(**more: str) -> dict[str, str]:
            options = " ".join(f"-c {name}={value}" for name, value in (POSTGRESQL_SETTINGS | more).items())
            return {"options": options, "connect_timeout": "10"}

        durable, lazy = settings(synchronous_commit="on"), settings(synchronous_commit="off")
        self._engine = create_engine(url, pool_size=POSTGRESQL_POOL_SIZE, max_overflow=0, connect_args=durable)
        self._lazy = create_engine(url, pool_size=POSTGRESQL_POOL_SIZE, max_overflow=0, connect_args=lazy)
        self._write_lock, self._wal = nullcontext(), None
        self._snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}

    def migrate(self) -> None:
        """Migrate the schema to this release's."""
        with self.write() as connection:
            locks.exclusive(connection)
            upgrade(connection)

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """Open a write transaction: committed at the end of the block, rolled back on any exception."""
        engine = self._engine if durable else self._lazy
        with (
            TransactionTimer("write") as timer,
            self._write_lock,
            engine.connect().execution_options(**{sqlite.WRITES: True}) as connection,
            connection.begin(),
        ):
            timer.begun()
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read transaction: a snapshot of the database, without locks."""
        with (
            TransactionTimer("read") as timer,
            self._engine.connect().execution_options(**self._snapshot) as connection,
            connection.begin(),
        ):
            timer.begun()
            yield connection

    def sync(self) -> None:
        """Wait until everything committed so far is on disk, without blocking writers.

        Concurrent callers share one fsync of SQLite's write-ahead log, or the flush of PostgreSQL's. For state that
        others may see before it is durable, but that must not be acknowledged before.
        """
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
        self._engine.dispose()
        self._lazy.dispose()


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
