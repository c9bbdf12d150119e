"""Error responses: a status, a stable code for programs, and a sentence for people."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import hdrs, web

RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def refusal(status: int, code: str, message: str) -> web.Response:
    """Build a JSON error response."""
    body = msgspec.json.encode({"code": code, "message": message})
    return web.Response(status=status, body=body, content_type="application/json")


def without_expectations(handler: RequestHandler) -> RequestHandler:
    """Wrap `handler` to respond 417 to every request with an Expect header: no body is accepted here.

    aiohttp evaluates Expect before the application runs: it quotes an unknown expectation, which fails for bytes that
    are not text, also where no route matches (`CONNECT`, `OPTIONS *`, `/%0a`).
    """

    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        response = refusal(417, "bad_request", "Expect is not supported: remove the header")
        # A body that follows must not be parsed as the next request.
        response.force_close()
        return response

    def choose(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        # Not awaited here, so that aiohttp's own failures are not attributed to this package.
        return refuse(request) if hdrs.EXPECT in request.headers else handler(request)

    return choose
