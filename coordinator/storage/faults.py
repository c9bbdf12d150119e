"""Database errors for code outside `coordinator.storage`.

DatabaseFault           any database error
├── DatabaseAway        unusable now: full, locked, stopped, unreachable
└── DatabaseConflict    a row violates a constraint
"""

from __future__ import annotations

import errno
import sqlite3
from typing import TypeAlias

from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from coordinator.errors import StoreAway

DatabaseFault: TypeAlias = DBAPIError
DatabaseAway: TypeAlias = OperationalError
DatabaseConflict: TypeAlias = IntegrityError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_PASSING = (*_FULL, *_FORBIDDEN, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)
_SQLITE = {
    sqlite3.SQLITE_BUSY: "the database is locked by another process: see which one hangs",
    sqlite3.SQLITE_IOERR: "the database's disk fails: look at it, and at the system's log",
    sqlite3.SQLITE_FULL: "the database's disk is full: free some space",
    sqlite3.SQLITE_CANTOPEN: "the database cannot be opened: see that its folder is there, and its rights",
    sqlite3.SQLITE_READONLY: "the database is read-only: mount its disk writable, or mend its rights",
}
# PostgreSQL: connection errors, out of disk, memory or connections, shutdown or startup, lock timeout, deadlock,
# serialisation failure, standby server (Appendix A of its manual).
_AWAY_SQLSTATES = ("08", "53", "57P", "55P03", "40P01", "40001", "25006", "25P03", "58030")


class LockHeld(Exception):
    """A transaction would have waited for a lock where it may not: nothing of it is done."""


def is_lock_held(error: Exception) -> bool:
    """Return whether PostgreSQL waited for a lock as long as it may."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) == "55P03"


def is_away(error: Exception) -> bool:
    """Return whether the error is a temporary fault of the disk or the database, not of the statement."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _SQLITE
    if isinstance(error, DBAPIError):
        state = getattr(error.orig, "sqlstate", None)
        # Without a state, the server was not reached or the connection was lost.
        return isinstance(error, OperationalError) if state is None else state.startswith(_AWAY_SQLSTATES)
    return isinstance(error, OSError) and error.errno in _PASSING


def trouble_of(error: Exception) -> str:
    """Return what a process waits for after an error of `advice`, without names of files: anybody may see it."""
    if isinstance(error, DBAPIError):
        return "database_away"
    if isinstance(error, StoreAway):
        return "store_away"
    number = error.errno if isinstance(error, OSError) else None
    code = getattr(error, "code", None)
    if number in _FULL or code == "disk_full":
        return "disk_full"
    if number == errno.EROFS or code == "read_only":
        return "read_only"
    return "no_access" if number in _FORBIDDEN or code == "no_access" else "disk_fails"


def advice(error: Exception) -> str:
    """Return in one line what an error of the disk, the database or the object store is, and what to do about it."""
    if isinstance(error, DBAPIError):
        code = getattr(error.orig, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in _SQLITE:
            return _SQLITE[code & 0xFF]
        return f"the database is away ({_first_line(error.orig)}): see that it runs and can be reached"
    if isinstance(error, OSError) and not isinstance(error, StoreAway):
        return _of_disk(error)
    return _first_line(error)


def _of_disk(error: OSError) -> str:
    name, why = error.filename or "the disk", error.strerror or _first_line(error)
    if error.errno in _FULL:
        return f"{name} cannot be written ({why}): free some space"
    if error.errno == errno.EROFS:
        return f"{name} is on a read-only disk: mount it writable"
    if error.errno in _FORBIDDEN:
        return f"{name} is not this user's to use ({why}): mend its owner or rights"
    return f"{name} fails ({why}): look at the disk, and at the system's log"


def _first_line(error: object) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
