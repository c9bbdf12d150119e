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

DatabaseFault: TypeAlias = DBAPIError
DatabaseAway: TypeAlias = OperationalError
DatabaseConflict: TypeAlias = IntegrityError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)
_AWAY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)
# PostgreSQL: connection errors, out of disk, memory or connections, shutdown or startup, lock timeout, deadlock,
# serialisation failure, standby server (Appendix A of its manual).
_AWAY_SQLSTATES = ("08", "53", "57P", "55P03", "40P01", "40001", "25006", "25P03", "58030")


def is_away(error: Exception) -> bool:
    """Return whether the error is a temporary fault of the disk or the database, not of the statement."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _AWAY
    if isinstance(error, DBAPIError):
        state = getattr(error.orig, "sqlstate", None)
        # Without a state, the server was not reached or the connection was lost.
        return isinstance(error, OperationalError) if state is None else state.startswith(_AWAY_SQLSTATES)
    return isinstance(error, OSError) and error.errno in _NO_ROOM
