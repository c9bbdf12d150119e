"""A server that gives prepared replies, and a client of it: for tests of what a node makes of replies."""

from __future__ import annotations

from contextlib import asynccontextmanager

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.coordinator_client import CoordinatorClient
from node.exchange import Backoff
from node.protocol.messages import ErrorReply
from node.protocol.run import run_id_of
from shardcast.wire import encode

RUN_KEY = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
NODE_KEY = Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\3" * 32)
RUN_ID = run_id_of(RUN_KEY.public_key().public_bytes_raw())
QUICK = Backoff(first_seconds=0.01, max_seconds=0.05)


def refusal(status, code, *, headers=None, server_time=0, message="No.", submission=None):
    reply = ErrorReply(code=code, message=message, server_time=server_time, submission=submission)
    return web.Response(status=status, body=encode(reply), headers=headers)


def answers(*replies):
    """A handler that gives one reply after the other and then repeats the last; `seen` counts the requests."""

    async def handler(request):
        handler.seen.append(request)
        handler.bodies.append(await request.read())
        reply = replies[min(len(handler.seen), len(replies)) - 1]
        return reply() if callable(reply) else web.Response(body=reply)

    handler.seen, handler.bodies = [], []
    return handler


@asynccontextmanager
async def serving(handler, **client_arguments):
    """A real server that answers everything with `handler`, and a client of it."""
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        defaults = {"run_id": RUN_ID, "key": NODE_KEY, "backoff": QUICK}
        async with CoordinatorClient(url, **(defaults | client_arguments)) as client:
            yield client
    finally:
        await runner.cleanup()
