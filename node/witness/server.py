"""HTTP of a witness (c2sp.org/tlog-witness): POST /add-checkpoint, GET /{origin hash}/checkpoint, GET /health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import hdrs, web

from node.protocol.checkpoints import MAX_ADD_BYTES
from node.witness.state import TEXT_TYPE, WitnessRefusal, WitnessState
from shardcast.errors import LocalFault
from shardcast.rate_limit import TokenBuckets, network_of
from shardcast.serve.listener import ServerLimits, listen

logger = logging.getLogger(__name__)

BODY_SECONDS: Final = 10.0
LIMITS: Final = ServerLimits(max_connections=512, max_connections_per_address=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessSettings:
    """Where a witness listens, and how often one address may ask it."""

    host: str
    port: int
    requests_per_minute: int


async def run_witness(
    state: WitnessState, settings: WitnessSettings, *, stop: asyncio.Event, serving: Callable[[int], None]
) -> None:
    """Serve until `stop` is set; `serving` is called with the bound port. Raises LocalFault."""
    listener = await listen(
        make_witness_app(state, requests_per_minute=settings.requests_per_minute),
        host=settings.host,
        port=settings.port,
        limits=LIMITS,
    )
    try:
        serving(listener.port)
        await stop.wait()
    finally:
        await listener.stop()


def make_witness_app(state: WitnessState, *, requests_per_minute: int) -> web.Application:
    """Return the application; requests beyond the rate are 429 before their body is read."""
    buckets = TokenBuckets(per_minute=requests_per_minute)

    @web.middleware
    async def limit(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        wait_s = buckets.take(network_of(request.remote or ""), now=time.monotonic())
        if wait_s:
            headers = {hdrs.RETRY_AFTER: str(wait_s)}
            return web.Response(status=429, text="Too many requests from this address.\n", headers=headers)
        return await handler(request)

    async def add(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            return web.Response(status=408, text=f"The body took more than {BODY_SECONDS:.0f} s.\n")
        try:
            line = await asyncio.to_thread(state.add, body)
        except WitnessRefusal as refused:
            return web.Response(status=refused.status, text=refused.body, content_type=refused.content_type)
        except LocalFault as error:
            logger.error("nothing is signed until a checkpoint can be kept: %s", error)  # noqa: TRY400
            return web.Response(status=503, text="This witness cannot keep what it signs.\n")
        return web.Response(body=line, content_type=TEXT_TYPE, charset="utf-8")

    async def newest(request: web.Request) -> web.Response:
        note = state.newest(request.match_info["origin"])
        if note is None:
            return web.Response(status=404, text="Nothing of that log was signed here.\n")
        return web.Response(body=note, content_type=TEXT_TYPE, charset="utf-8")

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application(middlewares=[limit], client_max_size=MAX_ADD_BYTES)
    app.router.add_post("/add-checkpoint", add)
    app.router.add_get("/{origin:[0-9a-f]{64}}/checkpoint", newest)
    app.router.add_get("/health", health)
    return app
