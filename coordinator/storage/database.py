"""Opening the database: migrations, and two kinds of transaction.

SQLite runs with a write-ahead log, and a writer takes its lock when it begins, so that two processes never
deadlock on an upgrade. Every commit survives kill -9. A durable one, the default, is on disk before it returns,
and so survives a power cut; for what may be forgotten then (nonces, leases) the wait for the disk is spared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import ArgumentError

from coordinator.errors import BadConfiguration

BUSY_TIMEOUT_MS = 30_000
POOL_SIZE = 48
"""More than the threads that serve requests, so that none of them waits for a connection."""


class Database:
    """One process's way to the run's database."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._engine = create_engine(url, pool_size=POOL_SIZE, max_overflow=0)
        except (ArgumentError, ImportError) as error:
            raise BadConfiguration("--database-url is no SQLAlchemy URL whose driver is installed") from error
        self._lazy = self._engine
        if self._engine.dialect.name == "sqlite":
            self._lazy = create_engine(url, pool_size=POOL_SIZE, max_overflow=0)
            _prepare_sqlite(self._engine, synchronous="FULL")
            _prepare_sqlite(self._lazy, synchronous="NORMAL")

    def migrate(self) -> None:
        """Bring the schema to this release's; does nothing when it is there already."""
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        config.set_main_option("path_separator", "os")
        with self.write() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """A transaction that may write: committed at the end of the block, rolled back on any exception."""
        engine = self._engine if durable else self._lazy
        with engine.connect().execution_options(veriswarm_write=True) as connection, connection.begin():
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database and takes no lock."""
        with self._engine.connect() as connection, connection.begin():
            yield connection

    def close(self) -> None:
        self._engine.dispose()
        self._lazy.dispose()


def sqlite_url(folder: Path) -> str:
    """The default database of a data folder."""
    return f"sqlite:///{folder / 'veriswarm.sqlite3'}"


def _prepare_sqlite(engine: Engine, *, synchronous: str) -> None:
    @event.listens_for(engine, "connect")
    def _connect(raw: Any, _record: Any) -> None:
        raw.isolation_level = None  # BEGIN is ours, below
        cursor = raw.cursor()
        settings = ("journal_mode=WAL", f"synchronous={synchronous}", "foreign_keys=ON")
        for setting in (*settings, f"busy_timeout={BUSY_TIMEOUT_MS}"):
            cursor.execute(f"PRAGMA {setting}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("veriswarm_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
