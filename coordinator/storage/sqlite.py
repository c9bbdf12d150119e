"""Concurrent writers of one SQLite file: fair locks between threads and between processes, and group fsync.

SQLite runs with a write-ahead log. Writers use BEGIN IMMEDIATE, so that no two deadlock upgrading a read lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, Engine, ExceptionContext, event
from sqlalchemy.exc import OperationalError

from coordinator.errors import StorageFault
from coordinator.storage.faults import LockHeld

BUSY_TIMEOUT_MS = 30_000
POLL_SECONDS = 0.001
WRITES = "swarmproof_write"
"""Execution option of a connection whose transaction begins with the write lock."""


FILE_MODE = 0o640
"""Of the database and what SQLite keeps beside it, whatever the umask: it has nodes' addresses and every verdict."""


def protect(path: Path) -> None:
    """Create the database file, readable by owner and group alone; take what is more from an existing one.

    SQLite gives its -wal and -shm the same mode. What cannot be changed (another user's file, a read-only disk) is
    left as it is, for SQLite to open or refuse.
    """
    with contextlib.suppress(OSError):
        # Not opened if it exists: closing it again would drop the locks that SQLite holds in this process.
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE))
            path.chmod(FILE_MODE)
        for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            if file.exists() and (mode := stat.S_IMODE(file.stat().st_mode)) & ~FILE_MODE:
                file.chmod(mode & FILE_MODE)


class FairLock:
    """FIFO lock between the writers of this process, not re-entrant; times out with SQLite's own "locked" error.

    Competing for SQLite's lock by polling would starve some threads for seconds.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._locked = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._locked:
                self._locked = True
                return
            granted = threading.Event()
            self._waiting.append(granted)
        acquired = False
        try:
            acquired = granted.wait(BUSY_TIMEOUT_MS / 1000)
        finally:
            if not acquired:  # timeout, or a signal handler raised
                self._give_up(granted)
        if not acquired:
            raise OperationalError("BEGIN IMMEDIATE", None, sqlite3.OperationalError("database is locked"))

    @contextlib.contextmanager
    def if_free(self) -> Iterator[None]:
        """Hold the lock for the block; raises LockHeld at once where another thread has it."""
        with self._mutex:
            if self._locked:
                raise LockHeld
            self._locked = True
        try:
            yield
        finally:
            self.__exit__()

    def _give_up(self, granted: threading.Event) -> None:
        with self._mutex:
            if granted in self._waiting:
                self._waiting.remove(granted)
                return
        self.__exit__()  # granted meanwhile: pass it on

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._locked = False


class GroupSync:
    """Group commit: one fsync of a file for all callers that arrived before it began.

    A failure is permanent: the kernel drops pages that it could not write, and the next fsync would succeed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counting, self._syncing = threading.Lock(), threading.Lock()
        self._requested = self._synced = 0
        self._failure: OSError | None = None

    def sync(self) -> None:
        """Wait until everything written before the call is on disk; raises StorageFault."""
        with self._counting:
            self._requested += 1
            own = self._requested
        with self._syncing:
            if self._synced >= own:
                return
            covered = self._requested
            with self._path.open("rb") as file:
                self._fsync(file)
            self._synced = covered

    def _fsync(self, file: IO[bytes]) -> None:
        try:
            if self._failure is None:
                os.fsync(file.fileno())
        except OSError as error:
            self._failure = error
        if self._failure is not None:
            raise StorageFault(f"{self._path} could not be written: check the disk, and restart") from self._failure


class ProcessLock:
    """File lock that gives the writing processes turns.

    SQLite's own busy handler sleeps up to 100 ms between attempts, so that a busy writer starves others for seconds.
    Here the process with the file lock polls SQLite's lock every millisecond, the others poll the file lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin_if_free(self, connection: Connection) -> None:
        """Execute BEGIN IMMEDIATE; raises LockHeld where another process writes or is next, or where it fails."""
        with self._path.open("ab", buffering=0) as file:
            if not _try_flock(file):
                raise LockHeld
            _begin_now(connection, "BEGIN IMMEDIATE")

    def begin(self, connection: Connection) -> None:
        """Execute BEGIN IMMEDIATE; raises OperationalError without a lock within BUSY_TIMEOUT_MS."""
        raw: Any = connection.connection.dbapi_connection
        deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
        raw.execute("PRAGMA busy_timeout=0")
        try:
            with self._path.open("a") as file:
                # A stopped process may hold the file lock until the deadline; then try without.
                _poll(lambda: _try_flock(file), deadline=deadline)
                try:
                    begun = _poll(lambda: _try_begin(raw), deadline=deadline)
                except sqlite3.OperationalError:
                    begun = False
                if not begun:
                    connection.exec_driver_sql("BEGIN IMMEDIATE")  # raises SQLAlchemy's error
        finally:
            with contextlib.suppress(sqlite3.ProgrammingError):  # closed, because it was read-only
                raw.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")


def _try_flock(file: IO[Any]) -> bool:
    """Try to lock `file`, until it is closed; return whether this process has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_begin(raw: Any) -> bool:
    try:
        raw.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            return False
        raise
    return True


def _poll(done: Callable[[], bool], *, deadline: float) -> bool:
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def prepare(engine: Engine, lock: ProcessLock, *, synchronous: str, waits: bool = True) -> None:
    """Configure the connections of `engine`; write transactions begin by `lock`.

    Without `waits`, its transactions raise LockHeld at their begin where they would wait for a lock, and move nothing
    from the write-ahead log into the database at their end.
    """
    waiting = (f"busy_timeout={BUSY_TIMEOUT_MS}",) if waits else ("busy_timeout=0", "wal_autocheckpoint=0")

    @event.listens_for(engine, "connect")
    def _connect(raw: Any, _record: Any) -> None:
        raw.isolation_level = None  # _begin executes BEGIN
        cursor = raw.cursor()
        for setting in (*waiting, "journal_mode=WAL", f"synchronous={synchronous}", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {setting}")
        cursor.close()

    @event.listens_for(engine, "handle_error")
    def _handle_error(context: ExceptionContext) -> None:
        # A connection that was opened while the file could not be written would stay read-only when it can be again.
        code = getattr(context.original_exception, "sqlite_errorcode", 0)
        context.is_disconnect = context.is_disconnect or code & 0xFF == sqlite3.SQLITE_READONLY

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get(WRITES, False):
            (lock.begin if waits else lock.begin_if_free)(connection)
        elif waits:
            connection.exec_driver_sql("BEGIN")
        else:  # it begins to read now, and not at its first statement
            _begin_now(connection, "BEGIN", "SELECT 1 FROM sqlite_schema LIMIT 1")


def _begin_now(connection: Connection, *statements: str) -> None:
    """Begin a transaction; raises LockHeld where it cannot, for whatever reason: whoever waits for one is told."""
    raw: Any = connection.connection.dbapi_connection
    try:
        for statement in statements:
            raw.execute(statement).fetchall()
    except sqlite3.OperationalError as error:
        raw.rollback()
        raise LockHeld from error
