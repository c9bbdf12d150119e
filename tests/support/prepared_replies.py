"""A server that gives prepared replies, and a client of it: for tests of what a node makes of replies."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from node.client.api import CoordinatorClient
from node.client.http import Backoff
from node.keys.identity import node_id
from node.protocol.admission import Outcome
from node.protocol.messages import MESSAGE_VERSION, RECEIPT_DOMAIN, ErrorReply, Lease, Receipt, Registration
from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, Descriptor, EnvironmentSpec, RunSpec, run_id_of
from shardcast.envelope import seal
from shardcast.wire import encode

RUN_KEY = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
NODE_KEY = Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\3" * 32)
RUN_ID = run_id_of(RUN_KEY.public_key().public_bytes_raw())
QUICK = Backoff(first_seconds=0.01, max_seconds=0.05)


DESCRIPTOR = Descriptor(
    run_id=RUN_ID,
    spec=RunSpec(name="test", environments=(EnvironmentSpec(name="arithmetic"),)),
    version=1,
    endpoints=(),
    relays=(),
    peers=(),
    head=None,
    revoked=(),
    issued_at=1,
    expires_at=2**40,
)
LEASE = Lease(lease_id="a" * 64, version=1, manifest_digest="b" * 64, slot=3, expires_at=2**40)
REGISTRATION = Registration(software="swarmproof", engine="torch", instance="0f" * 16, name="here")


def sealed_descriptor(descriptor=DESCRIPTOR, key=RUN_KEY):
    return seal(encode(descriptor), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=key)


def sealed_receipt(key=RUN_KEY, **changes):
    receipt = Receipt(
        run_id=RUN_ID,
        submission="c" * 64,
        node=node_id(NODE_KEY),
        version=1,
        slot=3,
        outcome=Outcome.ADMITTED,
        reason=None,
        detail="",
        tokens=5,
        log_index=2,
        leaf_hash="d" * 64,
    )
    receipt = structs.replace(receipt, **changes)
    return seal(encode(receipt), domain=RECEIPT_DOMAIN, version=MESSAGE_VERSION, key=key)


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
async def served(handler, *, port=0):
    """A real server that answers everything with `handler`; yields its URL."""
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(*handlers, **client_arguments):
    """A server for each of `handlers`, and a client that knows them in this order."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(handler)) for handler in handlers]
        defaults = {"run_id": RUN_ID, "key": NODE_KEY, "backoff": QUICK}
        yield await stack.enter_async_context(CoordinatorClient(urls, **(defaults | client_arguments)))
