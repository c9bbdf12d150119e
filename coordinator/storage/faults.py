"""How the database fails, for code outside `coordinator.storage`: which errors it raises, and which of them will pass.

DatabaseFault           anything that the database refuses or cannot do
├── DatabaseAway        it cannot be used now: full, locked, stopped, out of reach
└── DatabaseConflict    a row contradicts one that is there
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
# Of PostgreSQL: connection exceptions, out of disk or memory or connections, shut down or starting, somebody else's
# lock or a deadlock that this request lost, and a server that is a standby (Appendix A of its manual).
_AWAY_SQLSTATES = ("08", "53", "57P", "55P03", "40P01", "40001", "25006", "25P03", "58030")


def is_away(error: Exception) -> bool:
    """Return whether the disk or the database cannot be used now, and nothing is wrong with what was asked of it."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _AWAY
    if isinstance(error, DBAPIError):
        state = getattr(error.orig, "sqlstate", None)
        # One without a state never reached a server, or lost it.
        return isinstance(error, OperationalError) if state is None else state.startswith(_AWAY_SQLSTATES)
    return isinstance(error, OSError) and error.errno in _NO_ROOM
