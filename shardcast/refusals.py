"""How a server says no: a status, and a code for programs with a sentence for people."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import hdrs, web

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def refusal(status: int, code: str, message: str) -> web.Response:
    """The answer to what is refused, as JSON."""
    body = msgspec.json.encode({"code": code, "message": message})
    return web.Response(status=status, body=body, content_type="application/json")


def without_expectations(answer: Answer) -> Answer:
    """`answer`, but 417 to every request that has an Expect header: there is no body here to hold back for it.

    aiohttp meets expectations before its application does anything. It quotes an unknown one, which fails where that
    is no text, and it does so itself where no route matches: of `CONNECT`, `OPTIONS *` or `/%0a` none can.
    """

    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        response = refusal(417, "bad_request", "this server meets no expectations: leave Expect out")
        # What was to follow it must not be taken for the next request.
        response.force_close()
        return response

    def choose(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        # Not awaited here, so that a failure of aiohttp's own is not taken for one of this package.
        return refuse(request) if hdrs.EXPECT in request.headers else answer(request)

    return choose
