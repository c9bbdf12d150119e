"""A link with a speed, by a TCP proxy before a node: `python -m benchmarks.broadcasting.throttle`.

It is neutral as to what passes. What a node sends to all its connections together goes through one token bucket, as
through one uplink; what it is sent passes freely. Requests: {"target": port, "bytes_per_s": rate or null} makes a link
and is answered with its {"port"}; {"sent": port} is answered with the {"bytes"} that left the node through the link of
that port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from benchmarks.broadcasting.lines import requests, say

PIECE_BYTES = 64 * 1024
BURST_S = 0.01
"""Lateness of a piece that the link still makes up for: the resolution of the event loop's clock."""

_BUFFER_BYTES = 256 * 1024
_SHORTEST_SLEEP_S = 0.001


class Uplink:
    """A token bucket that empties at `bytes_per_s`; None never waits. Pieces pass in the order in which they came."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.sent_bytes = 0

    async def pass_on(self, size_bytes: int) -> None:
        """Wait until a piece of `size_bytes` has gone."""
        self.sent_bytes += size_bytes
        if self._bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - BURST_S) + size_bytes / self._bytes_per_s
        if self._free_at - now > _SHORTEST_SLEEP_S:
            await asyncio.sleep(self._free_at - now)


class Link:
    """Accepts connections on loopback and passes them on to the port `target`."""

    def __init__(self, target: int, bytes_per_s: float | None) -> None:
        self._target = target
        self.uplink = Uplink(bytes_per_s)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._open = {asyncio.create_task(self._accept())}

    async def close(self) -> None:
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            task = asyncio.create_task(self._connect(connection))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _connect(self, reader: socket.socket) -> None:
        """Forward until either end closes; what is under way is then lost, as on a line."""
        node = socket.socket()
        node.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        with reader, node:
            for end in (reader, node):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_connect(node, ("127.0.0.1", self._target))
                pumps = [
                    asyncio.create_task(_pump(reader, node, Uplink(None))),
                    asyncio.create_task(_pump(node, reader, self.uplink)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: socket.socket, sink: socket.socket, uplink: Uplink) -> None:
    loop, piece = asyncio.get_running_loop(), memoryview(bytearray(PIECE_BYTES))
    while received := await loop.sock_recv_into(source, piece):
        await uplink.pass_on(received)
        await loop.sock_sendall(sink, piece[:received])


async def serve() -> None:
    links: dict[int, Link] = {}
    say(ready=True)
    async for request in requests():
        if "sent" in request:
            say(bytes=links[request["sent"]].uplink.sent_bytes)
        else:
            link = Link(request["target"], request["bytes_per_s"])
            links[link.port] = link
            say(port=link.port)
    for link in links.values():
        await link.close()


if __name__ == "__main__":
    asyncio.run(serve())
