"""Leader election by a lock: an advisory lock on PostgreSQL, a file lock beside the database on SQLite.

Either lock ends with its process. A leader that lost its database connection may not know yet that another one leads,
so leaders' tasks must be safe to run twice at once.
"""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import IO, Final, Protocol

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from coordinator.storage.locks import LEADER, SPACE

_ACQUIRE: Final = text(f"SELECT pg_try_advisory_lock({SPACE}, {LEADER})")
_PING: Final = text("SELECT 1")


class Leadership(Protocol):
    """One process's claim to lead."""

    def acquire(self) -> bool:
        """Try to lead, without waiting; return whether this process leads. Raises DatabaseFault or OSError."""

    def release(self) -> None:
        """Stop leading."""


class FileLeadership:
    """Leadership by `flock`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        if self._file is None:
            file = self._path.open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                return False
            self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class SessionLeadership:
    """Leadership by a PostgreSQL advisory lock, held by one session."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._connection: Connection | None = None

    def acquire(self) -> bool:
        if self._connection is not None:
            try:
                self._connection.execute(_PING)
                return True
            except DBAPIError:
                self.release()
        connection = self._engine.connect()
        if connection.execute(_ACQUIRE).scalar_one():
            self._connection = connection
            return True
        connection.close()
        return False

    def release(self) -> None:
        """Stop leading and end the session: back in the pool, its connection would keep the lock."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(DBAPIError):
                connection.invalidate()
            connection.close()
