"""Requests to one node, and their answers: /veriswarm/control/1, one stream for each (docs/protocol.md, section 14).

A stream carries one frame there and one back, so that no answer can be taken for another's. Who the other side is says
the connection (Noise), and is handed to the handler with the bytes; everything else is the handler's to judge.
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

PROTOCOL: Final = "/veriswarm/control/1"
REQUEST_SECONDS: Final = 10.0
"""In which a request must have arrived, once its stream is open."""

ANSWER_SECONDS: Final = 100.0
"""In which it is answered; a challenge takes longest, and a circuit through a relay does not last much longer."""

PER_PEER: Final = 2
AT_ONCE: Final = 8
"""Requests of one peer, and requests that the handler has. A stream that only stays open is one of its peer's."""

Handler = Callable[[bytes, bytes], Awaitable[bytes]]
"""On asyncio: from the public key of the peer and its request to the reply. Raises nothing."""


class ControlServer:
    """Answers with the handler that it was given last; without one it ends every stream at once."""

    def __init__(self) -> None:
        self._handler: tuple[Handler, asyncio.AbstractEventLoop] | None = None
        self._open: Counter[bytes] = Counter()
        self._handled = trio.Semaphore(AT_ONCE)

    def set_handler(self, handler: Handler | None, loop: asyncio.AbstractEventLoop) -> None:
        """From any thread; `loop` is where the handler runs."""
        self._handler = None if handler is None else (handler, loop)

    async def serve(self, stream: INetStream) -> None:
        """One request of one peer."""
        node, handler = node_of(stream), self._handler
        if handler is None or self._open[node] >= PER_PEER:
            await reset(stream)
            return
        self._open[node] += 1
        try:
            await self._answer(node, stream, *handler)
        except Exception as error:  # noqa: BLE001  (one request's end, whatever it was, ends nothing else)
            log.debug("no answer to %s: %s", peer_id_of(node), describe(error))
            await reset(stream)
        finally:
            self._open[node] -= 1
            self._open += Counter()  # without those of whom none is open

    async def _answer(self, node: bytes, stream: INetStream, handler: Handler, loop: asyncio.AbstractEventLoop) -> None:
        with trio.fail_after(REQUEST_SECONDS):
            data = await read_frame(stream, max_bytes=MAX_REQUEST_BYTES, idle_seconds=REQUEST_SECONDS)
        if data is None:
            await reset(stream)
            return
        with trio.fail_after(ANSWER_SECONDS):
            async with self._handled:
                reply = await on_asyncio(loop, lambda: handler(node, data))
        await write_frame(stream, reply)
        await stream.close()


async def ask(
    host: IHost, node: bytes, data: bytes, *, addresses: Sequence[Address], dial_seconds: float
) -> tuple[bytes, float]:
    """What the node with this public key answers to `data`, and the seconds from the request to the reply's last byte.

    `addresses` are tried where there is no connection to it. Raises NetworkDown: `not_found`, `unreachable`,
    `no_control` or `no_answer`.
    """
    name = peer_id_of(node)
    await _reach(host, node, addresses, dial_seconds)
    try:
        with trio.fail_after(dial_seconds):
            stream = await host.new_stream(peer_of(node), [TProtocol(PROTOCOL)])
    except Exception as error:
        raise NetworkDown(f"{name} takes no requests: it is no worker, or an older one.", code="no_control") from error
    began = trio.current_time()
    try:
        await write_frame(stream, data)
        reply = await read_frame(stream, max_bytes=MAX_REPLY_BYTES, idle_seconds=ANSWER_SECONDS)
        seconds = trio.current_time() - began
    except Exception as error:
        raise NetworkDown(f"{name} did not answer ({describe(error)}).", code="no_answer") from error
    finally:
        await reset(stream)
    if reply is None:
        raise NetworkDown(f"{name} ended the stream without an answer.", code="no_answer")
    return reply, seconds


async def _reach(host: IHost, node: bytes, addresses: Sequence[Address], dial_seconds: float) -> None:
    if peer_of(node) in host.get_network().connections:
        return
    failures = []
    for address in addresses:
        try:
            await reach(host, address, seconds=dial_seconds)
            return
        except Exception as error:  # noqa: BLE001  (libp2p raises of many kinds; the next address may be better)
            failures.append(f"{address.host}:{address.port}: {describe(error)}")
    name = peer_id_of(node)
    if not failures:
        raise NetworkDown(f"Nobody here knows where {name} is.", code="not_found")
    raise NetworkDown(f"{name} cannot be reached ({'; '.join(failures)}).", code="unreachable")
