"""A relay that lies: `python -m benchmarks.broadcasting.hostile URL` passes on what a relay says, each chunk changed.

It flips a bit of the first byte of every chunk, and leaves heads and manifests as they are: so it looks well, answers
at once, and only who checks a chunk finds out.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
from aiohttp import web

from benchmarks.broadcasting.lines import requests, say

SIGNED_PATHS = ("/v1/head", "/v1/versions/", "/v1/manifests/")


class Liar:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def answer(self, request: web.Request) -> web.Response:
        async with self._session.get(f"{self._url}{request.path_qs}") as honest:
            body = bytearray(await honest.read())
            if body and honest.status == 200 and not request.path.startswith(SIGNED_PATHS):
                body[0] ^= 1
            return web.Response(body=bytes(body), status=honest.status, content_type=honest.content_type)


async def serve(url: str) -> None:
    app = web.Application()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        app.router.add_get("/{path:.*}", Liar(url, session).answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        say(port=runner.addresses[0][1])
        async for _ in requests():
            pass
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
