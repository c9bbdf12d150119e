"""Which of several processes does what is to be done once for all: the one that holds a lock.

On PostgreSQL it is an advisory lock of a connection that does nothing else, on SQLite the lock of a file beside the
database. Either goes when its process does, however it ends. A leader that is cut off from the database may not know
yet that another one leads: whatever leaders do must do no harm when two do it at once.
"""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import IO, Final, Protocol

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from coordinator.storage.locks import LEADER, SPACE

_TAKE: Final = text(f"SELECT pg_try_advisory_lock({SPACE}, {LEADER})")
_LOOK: Final = text("SELECT 1")


class Leadership(Protocol):
    """One process's claim to lead."""

    def take(self) -> bool:
        """Whether this process leads from now on, or still does; another one's leadership is not waited for."""

    def release(self) -> None:
        """Let another process lead."""


class LockedFile:
    """Leadership by `flock`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """As `Leadership.take`."""
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
        """As `Leadership.release`."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SessionLock:
    """Leadership by an advisory lock of PostgreSQL's, which its session keeps while it lasts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._connection: Connection | None = None

    def take(self) -> bool:
        """As `Leadership.take`. Raises OperationalError while the database is away."""
        if self._connection is not None:
            try:
                self._connection.execute(_LOOK)
                return True
            except DBAPIError:
                self._drop()
        connection = self._engine.connect()
        if connection.execute(_TAKE).scalar_one():
            self._connection = connection
            return True
        connection.close()
        return False

    def release(self) -> None:
        """As `Leadership.release`."""
        if self._connection is not None:
            self._drop()

    def _drop(self) -> None:
        """End the session: a connection that goes back to the pool would keep its lock."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(DBAPIError):
                connection.invalidate()
            connection.close()
