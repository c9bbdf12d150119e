"""Outermost ASGI middleware: request metrics, rate limit per address, load shedding, and the length of queries."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from coordinator.http.errors import refusal_response
from coordinator.http.load_shedding import LoadShedder
from coordinator.http.metrics import Metrics
from coordinator.http.rate_limits import AddressLimiter
from node.protocol.reasons import Reason, Refusal
from node.runtime.logs import bound

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

MAX_QUERY_BYTES = 512
"""The API's have less than a hundred; parsing one as large as a head takes 5 ms."""

UNANSWERED = 499
"""Metrics label, as in nginx, of a request that was cancelled before a response."""

_METHODS = frozenset(("GET", "POST", "PUT"))


class RequestMiddleware:
    """Counts, limits and logs every HTTP request. Starlette's middleware class would double a refusal's cost."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, addresses: AddressLimiter, shedder: LoadShedder) -> None:
        self._app, self._metrics, self._addresses, self._shedder = app, metrics, addresses, shedder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._addresses.check(address_of(scope), now=time.monotonic())
            self._shedder.check(scope["method"], scope["path"])
            _check_query(scope)
            await self._app(scope, receive, note_status)
        except asyncio.CancelledError:  # shutdown, or the client disconnected
            status = UNANSWERED
            raise
        except Refusal as refusal:
            self._metrics.refused(refusal.reason)
            await refusal_response(refusal, scope)(scope, receive, note_status)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            seconds = time.perf_counter() - started
            self._metrics.request_seconds.labels(method, route, status).observe(seconds)
            if log.isEnabledFor(logging.DEBUG):
                # The signer and the path parameters, as far as the request got.
                fields = {**scope.get("state", {}), **scope.get("path_params", {})}
                with bound(node=fields.get("node"), lease=fields.get("lease_id"), submission=fields.get("submission")):
                    log.debug("%s %s: %d after %.3f s", method, route, status, seconds)


def _check_query(scope: Scope) -> None:
    if len(scope["query_string"]) > MAX_QUERY_BYTES:
        raise Refusal(Reason.BAD_REQUEST, f"A query has at most {MAX_QUERY_BYTES} bytes.")


def address_of(scope: Scope) -> str:
    """Return the client's IP address, "" if it is unknown."""
    client = scope.get("client")
    return client[0] if client else ""
