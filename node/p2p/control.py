"""Control requests to one node: /swarmproof/control/1, one stream per request (docs/protocol.md, section 14).

A stream carries one frame each way, so replies cannot be mixed up. The connection (Noise) authenticates the peer, whose
key is passed to the handler with the bytes; everything else is for the handler to check.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol

from node.errors import NetworkDown
from node.p2p.circuits import reach
from node.p2p.frames import read_frame, write_frame
from node.p2p.host import node_of, peer_of, reset
from node.p2p.thread import describe, on_asyncio
from node.protocol.control import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from node.protocol.peers import Address, peer_id_of

log = logging.getLogger(__name__)

PROTOCOL: Final = "/swarmproof/control/1"
REQUEST_SECONDS: Final = 10.0
"""Deadline for a request to arrive once its stream is open."""

REPLY_SECONDS: Final = 100.0
"""Deadline for the reply; a challenge takes longest, and a relay circuit lasts little longer."""

PER_PEER: Final = 2
MAX_CONCURRENT: Final = 8
"""Concurrent requests per peer, and in the handler. An idle open stream counts against its peer."""

Handler = Callable[[bytes, bytes], Awaitable[bytes]]
"""Coroutine function on asyncio: (peer's public key, request) to reply. Must not raise."""


class ControlServer:
    """Serves requests with the current handler; without one it resets every stream."""

    def __init__(self) -> None:
        self._handler: tuple[Handler, asyncio.AbstractEventLoop] | None = None
        self._open: Counter[bytes] = Counter()
        self._handled = trio.Semaphore(MAX_CONCURRENT)

    def set_handler(self, handler: Handler | None, loop: asyncio.AbstractEventLoop) -> None:
        """Set the handler and the event loop it runs on; thread-safe."""
        self._handler = None if handler is None else (handler, loop)

    async def serve(self, stream: INetStream) -> None:
        """Serve one request of one peer."""
        node, handler = node_of(stream), self._handler
        if handler is None or self._open[node] >= PER_PEER:
            await reset(stream)
            return
        self._open[node] += 1
        try:
            await self._handle(node, stream, *handler)
        except Exception as error:  # noqa: BLE001  (a failed request must not end the server)
            log.debug("request of %s failed: %s", peer_id_of(node), describe(error))
            await reset(stream)
        finally:
            self._open[node] -= 1
            self._open += Counter()  # drops zero counts

    async def _handle(self, node: bytes, stream: INetStream, handler: Handler, loop: asyncio.AbstractEventLoop) -> None:
        with trio.fail_after(REQUEST_SECONDS):
            data = await read_frame(stream, max_bytes=MAX_REQUEST_BYTES, idle_seconds=REQUEST_SECONDS)
        if data is None:
            await reset(stream)
            return
        with trio.fail_after(REPLY_SECONDS):
            async with self._handled:
                reply = await on_asyncio(loop, lambda: handler(node, data))
        await write_frame(stream, reply)
        await stream.close()


async def send_request(
    host: IHost, node: bytes, data: bytes, *, addresses: Sequence[Address], dial_seconds: float
) -> tuple[bytes, float]:
    """Send `data` to a node; return its reply and the seconds from the request to the reply's last byte.

    `addresses` are dialled if there is no connection. Raises NetworkDown: `not_found`, `unreachable`, `no_control` or
    `no_answer`.
    """
    name = peer_id_of(node)
    await _connect_any(host, node, addresses, dial_seconds)
    try:
        with trio.fail_after(dial_seconds):
            stream = await host.new_stream(peer_of(node), [TProtocol(PROTOCOL)])
    except Exception as error:
        raise NetworkDown(
            f"{name} does not accept control requests: it is not a worker, or an older version.", code="no_control"
        ) from error
    began = trio.current_time()
    try:
        await write_frame(stream, data)
        reply = await read_frame(stream, max_bytes=MAX_REPLY_BYTES, idle_seconds=REPLY_SECONDS)
        seconds = trio.current_time() - began
    except Exception as error:
        raise NetworkDown(f"{name} did not respond ({describe(error)}).", code="no_answer") from error
    finally:
        await reset(stream)
    if reply is None:
        raise NetworkDown(f"{name} closed the stream without a reply.", code="no_answer")
    return reply, seconds


async def _connect_any(host: IHost, node: bytes, addresses: Sequence[Address], dial_seconds: float) -> None:
    if peer_of(node) in host.get_network().connections:
        return
    failures = []
    for address in addresses:
        try:
            await reach(host, address, seconds=dial_seconds)
            return
        except Exception as error:  # noqa: BLE001  (libp2p raises many kinds; the next address may work)
            failures.append(f"{address.host}:{address.port}: {describe(error)}")
    name = peer_id_of(node)
    if not failures:
        raise NetworkDown(f"No address is known for {name}.", code="not_found")
    raise NetworkDown(f"{name} cannot be reached ({'; '.join(failures)}).", code="unreachable")
