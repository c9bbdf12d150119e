"""Opening the database: migrations, and two kinds of transaction, on SQLite (the default) or PostgreSQL.

Every commit survives kill -9. A durable one, the default, is on disk before it returns, and so survives a power cut;
for what may be forgotten then (nonces, leases) the wait for the disk is spared, and for what may be seen before it is
durable (submissions) `sync` waits without a lock.

On SQLite one transaction writes at a time. On PostgreSQL many do, and what must not happen at once takes a lock of
`locks`.
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
from coordinator.storage.leadership import Leadership, LockedFile, SessionLock
from coordinator.storage.timings import Timed

__all__ = ["Connection", "Database", "migrations", "sqlite_path", "sqlite_url", "upgrade", "without_password"]

POOL_SIZE = 48
"""More than the threads that serve requests, so that none of them waits for a connection."""

POSTGRESQL_POOL_SIZE = 12
"""Each connection is a process of the server's; with 100 of them, its default, several of ours find room."""

POSTGRESQL_SETTINGS = {
    "application_name": "swarmproof",
    "lock_timeout": str(sqlite.BUSY_TIMEOUT_MS),
    # A process that is stopped in the middle must not keep the others from working.
    "idle_in_transaction_session_timeout": "60000",
}
_FLUSH: Final = text("SELECT pg_logical_emit_message(true, 'swarmproof', '')")
"""Writes a few bytes to the write-ahead log, whose commit waits for all that is before them."""


class Database:
    """One process's way to the run's database."""

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
        self._engine = create_engine(url, pool_size=POOL_SIZE, max_overflow=0)
        self._lazy = create_engine(url, pool_size=POOL_SIZE, max_overflow=0)
        self._turn: AbstractContextManager[None] = sqlite.Turn()
        self._wal: sqlite.SharedSync | None = sqlite.SharedSync(Path(f"{url.database}-wal"))
        line = sqlite.Line(Path(f"{url.database}-line"))
        sqlite.prepare(self._engine, line, synchronous="FULL")
        sqlite.prepare(self._lazy, line, synchronous="NORMAL")
        self._snapshot: dict[str, object] = {}

    def _open_postgresql(self, url: URL) -> None:
        def settings(**more: str) -> dict[str, str]:
            options = " ".join(f"-c {name}={value}" for name, value in (POSTGRESQL_SETTINGS | more).items())
            return {"options": options, "connect_timeout": "10"}

        durable, lazy = settings(synchronous_commit="on"), settings(synchronous_commit="off")
        self._engine = create_engine(url, pool_size=POSTGRESQL_POOL_SIZE, max_overflow=0, connect_args=durable)
        self._lazy = create_engine(url, pool_size=POSTGRESQL_POOL_SIZE, max_overflow=0, connect_args=lazy)
        self._turn, self._wal = nullcontext(), None
        self._snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}

    def migrate(self) -> None:
        """Bring the schema to this release's; does nothing when it is there already."""
        with self.write() as connection:
            locks.alone(connection)
            upgrade(connection)

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """A transaction that may write: committed at the end of the block, rolled back on any exception."""
        engine = self._engine if durable else self._lazy
        writing = {sqlite.WRITES: True}
        with (
            Timed("write") as timed,
            self._turn,
            engine.connect().execution_options(**writing) as connection,
            connection.begin(),
        ):
            timed.begun()
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database and takes no lock."""
        with (
            Timed("read") as timed,
            self._engine.connect().execution_options(**self._snapshot) as connection,
            connection.begin(),
        ):
            timed.begun()
            yield connection

    def sync(self) -> None:
        """Return once all that was committed before is on disk; those who ask at the same time wait for it together.

        For what others may see before it is durable, but its sender must not be told so. SQLite's write-ahead log is
        one file, which is synced here as a durable commit syncs it, but without holding up other writers; PostgreSQL's
        is flushed up to a commit by this one.
        """
        if self._wal is not None:
            self._wal.sync()
            return
        with self.write() as connection:
            connection.execute(_FLUSH)

    def leadership(self) -> Leadership:
        """A claim to lead among the processes that have this database."""
        if self._engine.dialect.name == "sqlite":
            return LockedFile(Path(f"{self._engine.url.database}-leader"))
        return SessionLock(self._engine)

    def close(self) -> None:
        """End its connections."""
        self._engine.dispose()
        self._lazy.dispose()


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Take the migrations up to `revision`, in the transaction of `connection`."""
    config = migrations()
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def migrations() -> Config:
    """Where Alembic finds the steps of the schema."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


def _checked(url: URL) -> URL:
    """Raise BadConfiguration for what the run's processes cannot share, or was not tried."""
    backend = url.get_backend_name()
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise BadConfiguration("--database-url must be sqlite:///FILE or postgresql://USER@HOST/NAME")
    if url.database in {None, "", ":memory:"} or "uri" in url.query:
        raise BadConfiguration("--database-url must name a plain file: other processes have to find it")
    return url


def sqlite_url(folder: Path) -> str:
    """The default database of a data folder."""
    return f"sqlite:///{folder / 'swarmproof.sqlite3'}"


def sqlite_path(url: str) -> Path | None:
    """Return the file that an SQLite database is in, None for another kind of database."""
    parsed = make_url(url)
    return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def without_password(url: str) -> str:
    """Return a database URL that may be shown and stored."""
    return make_url(url).render_as_string(hide_password=True)
