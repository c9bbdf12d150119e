"""HTTP clients of a node: raw responses from whoever sits at the other end or in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from benchmarks.fuzzing.http import http_mutator
from benchmarks.fuzzing.loopback import Loop
from benchmarks.fuzzing.target import Harness, Target
from benchmarks.fuzzing.targets.broadcast import head, manifest
from benchmarks.fuzzing.targets.messages import (
    DIGEST,
    ERROR_REPLIES,
    LEASE_REPLIES,
    LEASE_REQUESTS,
    NODE_KEY,
    RUN_ID,
    RUN_KEY,
)
from node.client.api import CoordinatorClient
from node.client.http import Backoff, ExchangeLimits
from node.doctor.coordinator import check_coordinator
from node.errors import CoordinatorFault
from shardcast.errors import LocalFault, NetworkFault, PeerFault
from shardcast.fetch.transport import Transport, TransportLimits
from shardcast.manifest import seal_head, seal_manifest
from shardcast.wire import encode

SECONDS = 0.1
"""Patience with a reply that never ends: a tenth of a second is much for one from this very process."""

LENGTH = 64


def _reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/octet-stream", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Answering:
    """A server that reads a request's head and answers with the bytes that it was given, then closes."""

    def __init__(self, stack: ExitStack) -> None:
        self.loop = Loop(stack)
        self.reply = b""
        self.url = self.loop.run(self._start(stack))

    async def _start(self, stack: ExitStack) -> str:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        stack.callback(server.close)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.reply)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has had enough
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    def ask(self, data: bytes, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return what `call` makes of `data`; raise faults in its own callbacks as well."""
        self.reply = data

        async def calling() -> Any:
            return await call()

        try:
            return self.loop.run(calling())
        finally:
            faults, self.loop.faults = self.loop.faults, []
            assert not faults, faults[0]


def _coordinator(stack: ExitStack) -> Harness:
    """Feed replies to a worker that asks for work; a signed POST, read with a limit."""
    server = Answering(stack)
    limits = ExchangeLimits(connect_seconds=1.0, reply_seconds=SECONDS)
    never = Backoff(first_seconds=1e3, max_seconds=1e3)

    async def lease() -> None:
        async with CoordinatorClient(
            server.url, run_id=RUN_ID, key=NODE_KEY, limits=limits, backoff=never, clock=time.time
        ) as client:
            await client.lease(LEASE_REQUESTS[1], patience_seconds=0.0)

    seeds = [_reply(encode(reply)) for reply in LEASE_REPLIES]
    refusals = [_reply(encode(reply), "401 Unauthorized", "Retry-After: 5") for reply in ERROR_REPLIES]
    busy = _reply(encode(ERROR_REPLIES[0]), "429 Too Many Requests", "Retry-After: 300")
    run = lambda data: server.ask(data, lease)  # noqa: E731
    return Harness(seeds, run, (CoordinatorFault,), http_mutator(), hostile=[*refusals, busy])


def _broadcast(stack: ExitStack) -> Harness:
    """Feed replies to a client of relays, which asks for a head, a manifest and a chunk in turn."""
    server = Answering(stack)
    patience = TransportLimits(connect_s=1.0, response_s=SECONDS, idle_s=SECONDS, total_s=SECONDS, rate_grace_s=SECONDS)

    async def fetch() -> None:
        transport = Transport(patience=patience)
        try:
            data = bytearray(LENGTH)
            await transport.chunk(server.url, DIGEST, 0, into=memoryview(data), wait_s=0.0)
            await transport.head(server.url, after=-1, wait_s=0.0)
            await transport.manifest(server.url, DIGEST)
        finally:
            await transport.close()

    seeds = [_reply(bytes(LENGTH)), _reply(bytes(LENGTH), "200 OK", "Connection: close")]
    others = [
        _reply(seal_head(head(), RUN_KEY)),
        _reply(seal_manifest(manifest(), RUN_KEY).envelope),
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n" + bytes(64) + b"\r\n0\r\n\r\n",
    ]

    def run(data: bytes) -> None:
        try:
            server.ask(data, fetch)
        except LocalFault as error:
            raise AssertionError(f"a peer's reply is taken for this machine's fault: {error}") from error

    return Harness(seeds, run, (PeerFault, NetworkFault), http_mutator(), hostile=others)


def _doctor(stack: ExitStack) -> Harness:
    """Feed replies to the doctor, of which the status and the date count."""
    server = Answering(stack)

    async def check() -> str:
        checks = await asyncio.to_thread(check_coordinator, server.url, seconds=SECONDS)
        return " ".join(f"{one.name} {one.level}" for one in checks)

    dates = ("Sun, 06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:37 -0000", "Thu, 1 Jan 1 0:0 +9999", "-", "1 2 3")
    seeds = [_reply(b"ok\n", "200 OK", f"Date: {date}") for date in dates]
    return Harness(seeds, lambda data: server.ask(data, check), (), http_mutator())


TARGETS = (
    Target("replies.coordinator", "whoever answers as the coordinator", 10, _coordinator),
    Target("replies.broadcast", "whoever answers as a relay", 10, _broadcast),
    Target("replies.doctor", "whoever answers as the coordinator", 3, _doctor),
)
