"""The outermost layer of the HTTP service: every request is counted, and every address has its share."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from coordinator.http.errors import refuse
from coordinator.http.metrics import Metrics
from coordinator.http.rate_limits import AddressLimiter
from node.protocol.reasons import Reason, Refusal
from node.runtime.logs import bound

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

MAX_QUERY_BYTES = 512
"""Ours have less than a hundred. One that fills a head takes 5 ms to be taken apart."""

UNANSWERED = 499
"""For the figures alone, as nginx has it: nobody was sent any status, and nothing failed here."""

_METHODS = frozenset(("GET", "POST", "PUT"))


class RequestMiddleware:
    """Count, limit and log every HTTP request, as plain ASGI middleware.

    Starlette's own kind costs as much as routing and refusing together.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, addresses: AddressLimiter) -> None:
        self._app, self._metrics, self._addresses = app, metrics, addresses

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
            _check_form(scope)
            await self._app(scope, receive, note_status)
        except asyncio.CancelledError:  # this process ends, or whoever asked has gone
            status = UNANSWERED
            raise
        except Refusal as refusal:
            self._metrics.refused(refusal.reason)
            await refuse(refusal)(scope, receive, note_status)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            seconds = time.perf_counter() - started
            self._metrics.request_seconds.labels(method, route, status).observe(seconds)
            if log.isEnabledFor(logging.DEBUG):
                # Whom and what it is about, as far as it got: who signed it, and what its path names.
                about = {**scope.get("state", {}), **scope.get("path_params", {})}
                with bound(node=about.get("node"), lease=about.get("lease_id"), submission=about.get("submission")):
                    log.debug("%s %s: %d after %.3f s", method, route, status, seconds)


def _check_form(scope: Scope) -> None:
    """Refuse long queries, and a body with a length and chunks: a proxy may take its rest for another request."""
    if len(scope["query_string"]) > MAX_QUERY_BYTES:
        raise Refusal(Reason.BAD_REQUEST, f"A query has at most {MAX_QUERY_BYTES} bytes.")
    names = {name for name, _ in scope["headers"]}
    if b"content-length" in names and b"transfer-encoding" in names:
        raise Refusal(Reason.BAD_REQUEST, "A body has Content-Length or Transfer-Encoding.")


def address_of(scope: Scope) -> str:
    """Where the request comes from, as far as it is known."""
    client = scope.get("client")
    return client[0] if client else ""
