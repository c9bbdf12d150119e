"""TCP proxy between the nodes and the coordinator: it can be cut, and stops an upload half-way.

It changes nothing that it passes on. What it notes of it is what the nodes were told: which submission the
coordinator has acknowledged under which lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

from node.protocol.reasons import Refusal
from node.protocol.requests import read_authorization
from shardcast.wire import digest

PIECE_BYTES = 64 * 1024
Moment = Literal["body", "answer"]
"""When an upload is held: with half of its body gone, or when it is stored and its answer is on the way."""

_PUT = re.compile(rb"PUT /v1/submissions/([0-9a-f]{64}) HTTP/1\.1\r\n")
_AUTHORIZATION = re.compile(rb"(?i)\r\nauthorization: ([^\r\n]+)\r\n")
_ACCEPTED = re.compile(rb"(?:HTTP/1\.1 100 [^\r\n]*\r\n\r\n)?HTTP/1\.1 202 ")


@dataclass(slots=True)
class Trap:
    """Holds the next upload at a moment: `sprung` says that it is held, `cut` ends its connection."""

    moment: Moment
    sprung: threading.Event = field(default_factory=threading.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Line:
    """One connection; `upload` is the (lease, submission) whose answer is awaited."""

    ends: tuple[socket.socket, socket.socket]
    upload: tuple[str, str] | None = None
    body_began: bool = False


class CoordinatorProxy:
    """Listens on `port` of loopback and passes everything on to the port `target`, in a thread of its own."""

    def __init__(self, port: int, *, target: int) -> None:
        self.acknowledged: dict[str, str] = {}
        """The lease of every submission that the coordinator has answered with 202."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self._listener.setblocking(False)
        self._lines: set[_Line] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._trap: Trap | None = None
        self._is_shut = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="coordinator proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()

    def cut(self) -> int:
        """Reset every connection; returns how many there were."""
        return self._call(self._cut)

    def shut(self, *, shut: bool) -> None:
        """Set whether new connections are reset at once."""

        def set_shut() -> int:
            self._is_shut = shut
            return 0

        self._call(set_shut)

    def trap(self, moment: Moment) -> Trap:
        """Hold the next upload at this moment."""
        trap = Trap(moment)

        def lay() -> int:
            self._trap = trap
            return 0

        self._call(lay)
        return trap

    def release(self, trap: Trap) -> None:
        """End the connection that is held, or lay no trap any more."""

        def let_go() -> int:
            trap.released.set()
            if self._trap is trap:
                self._trap = None
            return 0

        self._call(let_go)

    def _call(self, work: Callable[[], int]) -> int:
        async def done() -> int:
            return work()

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(timeout=30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            self._cut()
            for task in (accepting, *self._tasks):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(accepting, *self._tasks, return_exceptions=True))
            self._loop.close()

    def _cut(self) -> int:
        for line in self._lines:
            for end in line.ends:
                _reset(end)
        return len(self._lines)

    async def _accept(self) -> None:
        while True:
            connection, _ = await self._loop.sock_accept(self._listener)
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, node: socket.socket) -> None:
        with node, socket.socket() as coordinator:
            for end in (node, coordinator):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._is_shut:
                _reset(node)
                return
            line = _Line((node, coordinator))
            with contextlib.suppress(OSError):
                await self._loop.sock_connect(coordinator, ("127.0.0.1", self._target))
                self._lines.add(line)
                pumps = [self._loop.create_task(pump) for pump in (self._up(line), self._down(line))]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._lines.discard(line)
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)

    async def _up(self, line: _Line) -> None:
        """Forward from the node to the coordinator."""
        node, coordinator = line.ends
        while piece := await self._loop.sock_recv(node, PIECE_BYTES):
            if (upload := _upload(piece)) is not None:
                line.upload, line.body_began = upload, False
            elif line.upload is not None and not line.body_began:
                line.body_began = True
                if self._trap is not None and self._trap.moment == "body":
                    await self._loop.sock_sendall(coordinator, piece[: len(piece) // 2])
                    await self._hold(self._trap)
                    return
            await self._loop.sock_sendall(coordinator, piece)

    async def _down(self, line: _Line) -> None:
        """Forward from the coordinator to the node."""
        node, coordinator = line.ends
        while piece := await self._loop.sock_recv(coordinator, PIECE_BYTES):
            if line.upload is not None and _ACCEPTED.match(piece):
                lease, submission = line.upload
                self.acknowledged[submission], line.upload = lease, None
                if self._trap is not None and self._trap.moment == "answer":
                    await self._hold(self._trap)
                    return
            await self._loop.sock_sendall(node, piece)

    async def _hold(self, trap: Trap) -> None:
        self._trap = None
        trap.sprung.set()
        await trap.released.wait()


def _upload(piece: bytes) -> tuple[str, str] | None:
    """Return the lease and the submission's id where an upload begins; clients send its head in one piece."""
    found, said = _PUT.match(piece), _AUTHORIZATION.search(piece)
    if found is None or said is None:
        return None
    with contextlib.suppress(Refusal):
        return found[1].decode(), digest(read_authorization(said[1].decode("latin-1")))
    return None


def _reset(end: socket.socket) -> None:
    """Close a connection as a router does that forgot it: with a reset, and what is under way is lost."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
