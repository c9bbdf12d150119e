"""Error responses: an ErrorReply with a stable code for every refusal and failure."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from coordinator.errors import StorageFault
from coordinator.http.rate_limits import OverloadRefusal, TooManyRequests
from coordinator.storage.faults import DatabaseAway, advice, is_away
from node.protocol.messages import ErrorReply
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import encode

if TYPE_CHECKING:
    from starlette.types import Scope

log = logging.getLogger(__name__)

INTERNAL_ERROR, UNAVAILABLE = "internal_error", "unavailable"
ERROR_LOG_SECONDS = 10.0
"""Minimum time between two log lines about an unavailable disk or database."""

BODY_RECEIVED = "swarmproof.body_received"
"""Key of a scope's extensions: the request has arrived to its end."""

MOST_KEPT_SECONDS = 5
"""The longest Retry-After for which an overloaded coordinator keeps a connection: it has few of them, and new nodes,
which come again after longer, would hold those of workers."""

_RETRY_AFTER_SECONDS = 5
_JSON = "application/json"


def error_body(refusal: Refusal) -> bytes:
    """Encode a refusal as an ErrorReply."""
    return encode(
        ErrorReply(
            code=refusal.reason.value,
            message=str(refusal),
            server_time=int(time.time()),
            submission=refusal.submission,
        )
    )


def refusal_response(refusal: Refusal, scope: Scope) -> Response:
    """Return the response to the refused request of `scope`, with Retry-After for rate limits."""
    headers = {}
    if refusal.reason is Reason.TOO_MANY_REQUESTS:
        seconds = refusal.retry_after_seconds if isinstance(refusal, TooManyRequests) else _RETRY_AFTER_SECONDS
        headers["Retry-After"] = str(seconds)
    if not _keeps_connection(refusal, scope):
        headers["Connection"] = "close"
    return Response(error_body(refusal), status_code=refusal.reason.status or 500, media_type=_JSON, headers=headers)


def _keeps_connection(refusal: Refusal, scope: Scope) -> bool:
    """Whether the client may retry on the same connection, which saves both sides a new one.

    Not after an unread body, which must not be parsed as the next request, and not after a client's own fault or flood:
    new connections are accepted a few at a time.
    """
    is_short = isinstance(refusal, OverloadRefusal) and refusal.retry_after_seconds <= MOST_KEPT_SECONDS
    return is_short and BODY_RECEIVED in scope.get("extensions", ())


def internal_error() -> Response:
    """Return a 500 without details, which are logged only."""
    return _server_error(INTERNAL_ERROR, "Something went wrong in the coordinator; try again later.", status=500)


def unavailable() -> Response:
    """Return the 503 for an unusable disk, database or object store."""
    return _server_error(
        UNAVAILABLE, "The coordinator's disk, database or object store is away; try again later.", status=503
    )


def _server_error(code: str, message: str, *, status: int) -> Response:
    reply = ErrorReply(code=code, message=message, server_time=int(time.time()))
    headers = {"Connection": "close", "Retry-After": str(_RETRY_AFTER_SECONDS)}
    return Response(encode(reply), status_code=status, media_type=_JSON, headers=headers)


def _methods_of(request: Request, routers: Iterable[APIRouter]) -> list[str]:
    """Return the methods of all routes of the request's path: Starlette names those of the first one alone."""
    # An application's own list holds the routes of the routers that it includes, or, in later FastAPI, the routers.
    routes = [*request.app.routes, *(route for router in routers for route in router.routes)]
    found = [each for each in routes if isinstance(each, Route) and each.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in found for method in route.methods or ()})


def add_error_handlers(app: FastAPI, *, routers: Iterable[APIRouter], count: Callable[[Reason], None]) -> None:
    """Answer every error of `app` with an ErrorReply; call `count` with each refusal's reason.

    `routers` are those that `app` includes, all without a prefix.
    """

    @app.exception_handler(Refusal)
    async def _refused(request: Request, refusal: Refusal) -> Response:
        count(refusal.reason)
        return refusal_response(refusal, request.scope)

    @app.exception_handler(404)
    async def _unknown(request: Request, _error: Exception) -> Response:
        return refusal_response(
            Refusal(Reason.NOT_FOUND, f"Nothing at {request.scope['path'][:100]!r}."), request.scope
        )

    @app.exception_handler(405)
    async def _wrong_method(request: Request, _error: Exception) -> Response:
        refusal = Refusal(Reason.METHOD_NOT_ALLOWED, f"{request.method[:10]} is not taken here.")
        response = refusal_response(refusal, request.scope)
        response.headers["Allow"] = ", ".join(_methods_of(request, routers))
        return response

    @app.exception_handler(ClientDisconnect)
    async def _disconnected(_request: Request, _error: Exception) -> Response:
        return Response(status_code=400)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, _error: Exception) -> Response:
        refusal = Refusal(Reason.BAD_REQUEST, "A parameter is missing or is not what it must be.")
        return refusal_response(refusal, request.scope)

    logged_at = -math.inf

    @app.exception_handler(OSError)
    @app.exception_handler(DatabaseAway)
    async def _away(_request: Request, error: Exception) -> Response:
        nonlocal logged_at
        if not is_away(error):
            raise error
        if time.monotonic() - logged_at >= ERROR_LOG_SECONDS:
            logged_at = time.monotonic()
            log.error("disk, database or object store unavailable, answering 503: %s", advice(error))
        return unavailable()

    @app.exception_handler(StorageFault)
    async def _damaged(_request: Request, error: Exception) -> Response:
        log.error("request refused, stored state is damaged: %s; see `swarmproof check --data RUN`", error)
        return internal_error()

    @app.exception_handler(Exception)
    async def _unforeseen(_request: Request, _error: Exception) -> Response:
        # Starlette re-raises it once this is sent, and uvicorn logs it.
        return internal_error()
