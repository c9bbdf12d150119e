"""Many writers of one SQLite file: threads of a process in turn, processes in a line, and one fsync for all who wait.

SQLite runs with a write-ahead log, and a writer takes its lock when it begins, so that two processes never
deadlock on an upgrade.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import OperationalError

from coordinator.errors import StorageFault

BUSY_TIMEOUT_MS = 30_000
LOOK_SECONDS = 0.001
WRITES = "swarmproof_write"
"""The execution option of a connection whose transaction takes SQLite's lock."""


class Turn:
    """One writer of this process at a time, in the order in which they came; not re-entrant, as SQLite's lock is not.

    The threads of a process would else look for SQLite's lock one against the other, and some wait for seconds.
    Whose turn does not come within BUSY_TIMEOUT_MS gets SQLite's own error.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            called = threading.Event()
            self._waiting.append(called)
        came = False
        try:
            came = called.wait(BUSY_TIMEOUT_MS / 1000)
        finally:
            if not came:  # too late, or a signal's handler raised: the turn must not be left with nobody
                self._leave(called)
        if not came:
            raise OperationalError("BEGIN IMMEDIATE", None, sqlite3.OperationalError("database is locked"))

    def _leave(self, called: threading.Event) -> None:
        with self._mutex:
            if called in self._waiting:
                self._waiting.remove(called)
                return
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


class SharedSync:
    """fsync of one file, once for all who asked before it began.

    Once it has failed it fails for good: the kernel forgets what it could not write, and the next fsync succeeds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counting, self._syncing = threading.Lock(), threading.Lock()
        self._asked = self._done = 0
        self._failure: OSError | None = None

    def sync(self) -> None:
        """Raises StorageFault."""
        with self._counting:
            self._asked += 1
            mine = self._asked
        with self._syncing:
            if self._done >= mine:
                return
            covered = self._asked
            with self._path.open("rb") as file:
                self._fsync(file)
            self._done = covered

    def _fsync(self, file: IO[bytes]) -> None:
        try:
            if self._failure is None:
                os.fsync(file.fileno())
        except OSError as error:
            self._failure = error
        if self._failure is not None:
            raise StorageFault(f"{self._path} could not be written: see to the disk, and restart") from self._failure


class Line:
    """Who of the processes writes next: whoever has the lock of a file beside the database.

    SQLite has writers sleep up to 100 ms between two looks for its lock, and so lets one that comes and goes keep
    others out for seconds. Here one process looks for it every millisecond, and the others for their place behind it,
    so that who has just written is not next again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, connection: Connection) -> None:
        """BEGIN IMMEDIATE, which raises OperationalError when it gets no lock within BUSY_TIMEOUT_MS."""
        raw: Any = connection.connection.dbapi_connection
        until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
        raw.execute("PRAGMA busy_timeout=0")
        try:
            with self._path.open("a") as file:
                # Who is never first, because a process that was stopped is, tries without.
                _look_for(lambda: _is_first(file), until=until)
                if not _look_for(lambda: _has_begun(raw), until=until):
                    connection.exec_driver_sql("BEGIN IMMEDIATE")  # fails as SQLAlchemy's errors do
        finally:
            raw.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")


def _is_first(file: IO[str]) -> bool:
    """Whether this process has the lock of `file`, which goes with its being closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_begun(raw: Any) -> bool:
    try:
        raw.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            return False
        raise
    return True


def _look_for(done: Callable[[], bool], *, until: float) -> bool:
    while not done():
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def prepare(engine: Engine, line: Line, *, synchronous: str) -> None:
    """Have every connection of `engine` work as this module says."""

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
        if connection.get_execution_options().get(WRITES, False):
            line.begin(connection)
        else:
            connection.exec_driver_sql("BEGIN")
