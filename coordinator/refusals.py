"""What the coordinator answers when it refuses: an ErrorReply with the status of its code."""

from __future__ import annotations

import time

from fastapi import Response

from coordinator.limits import TooManyRequests
from node.protocol.messages import ErrorReply
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import encode

INTERNAL_ERROR = "internal_error"
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
    Reason.DUPLICATE_SUBMISSION: 409,
    Reason.OVERSIZED_BODY: 413,
    Reason.BODY_MISMATCH: 422,
    Reason.TOO_MANY_REQUESTS: 429,
}
_RETRY_AFTER_SECONDS = 5
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
    reply = ErrorReply(
        code=INTERNAL_ERROR,
        message="Something went wrong in the coordinator; try again later.",
        server_time=int(time.time()),
    )
    return Response(encode(reply), status_code=500, media_type=_JSON, headers={"Connection": "close"})
