"""What the coordinator answers when it refuses: an ErrorReply with the status of its code."""

from __future__ import annotations

import errno
import sqlite3
import time

from fastapi import Response
from sqlalchemy.exc import DBAPIError, OperationalError

from coordinator.limits import TooManyRequests
from node.protocol.messages import ErrorReply
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import encode

INTERNAL_ERROR, UNAVAILABLE = "internal_error", "unavailable"
STATUS = {
    Reason.BAD_REQUEST: 400,
    Reason.BAD_SIGNATURE: 401,
    Reason.REPLAYED_REQUEST: 401,
    Reason.CLOCK_SKEW: 401,
    Reason.WRONG_RUN: 401,
    Reason.UNKNOWN_IDENTITY: 401,
    Reason.BANNED: 403,
    Reason.FOREIGN_LEASE: 403,
    Reason.UNKNOWN_LEASE: 404,
    Reason.NOT_FOUND: 404,
    Reason.EXPIRED_LEASE: 409,
    Reason.STALE_POLICY: 409,
    Reason.UPLOAD_FIRST: 409,
    Reason.DUPLICATE_SUBMISSION: 409,
    Reason.KEY_IN_USE: 409,
    Reason.OVERSIZED_BODY: 413,
    Reason.BODY_MISMATCH: 422,
    Reason.TOO_MANY_REQUESTS: 429,
}
_RETRY_AFTER_SECONDS = 5
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)
_AWAY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)
# Of PostgreSQL: connection exceptions, out of disk or memory or connections, shut down or starting, somebody else's
# lock or a deadlock that this request lost, and a server that is a standby (Appendix A of its manual).
_AWAY_SQLSTATES = ("08", "53", "57P", "55P03", "40P01", "40001", "25006", "25P03", "58030")
_JSON = "application/json"


def error_body(refusal: Refusal) -> bytes:
    """The ErrorReply of a refusal."""
    return encode(
        ErrorReply(
            code=refusal.reason.value,
            message=str(refusal),
            server_time=int(time.time()),
            submission=refusal.submission,
        )
    )


def refuse(refusal: Refusal) -> Response:
    """The answer to a request that is refused."""
    # A body that was refused unread must not be taken for the next request.
    headers = {"Connection": "close"}
    if refusal.reason is Reason.TOO_MANY_REQUESTS:
        seconds = refusal.retry_after_seconds if isinstance(refusal, TooManyRequests) else _RETRY_AFTER_SECONDS
        headers["Retry-After"] = str(seconds)
    return Response(error_body(refusal), status_code=STATUS[refusal.reason], media_type=_JSON, headers=headers)


def apologise() -> Response:
    """The answer when something unforeseen went wrong in here: what it was is for the log alone."""
    return _no_refusal(INTERNAL_ERROR, "Something went wrong in the coordinator; try again later.", status=500)


def is_away(error: Exception) -> bool:
    """Whether the disk or the database cannot be used now, and nothing is wrong with what was asked of it."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _AWAY
    if isinstance(error, DBAPIError):
        state = getattr(error.orig, "sqlstate", None)
        # One without a state never reached a server, or lost it.
        return isinstance(error, OperationalError) if state is None else state.startswith(_AWAY_SQLSTATES)
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def out_of_service() -> Response:
    """The answer while the disk is full, or the database or the store is away: asking again is all there is to do."""
    return _no_refusal(
        UNAVAILABLE, "The coordinator's disk, database or object store is away; try again later.", status=503
    )


def _no_refusal(code: str, message: str, *, status: int) -> Response:
    reply = ErrorReply(code=code, message=message, server_time=int(time.time()))
    headers = {"Connection": "close", "Retry-After": str(_RETRY_AFTER_SECONDS)}
    return Response(encode(reply), status_code=status, media_type=_JSON, headers=headers)
