"""HTTP/1.1 of one connection with as little work as it takes: the cores are the coordinator's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

_END_OF_HEAD = b"\r\n\r\n"
_CONTINUE = 100


@dataclass(frozen=True, slots=True)
class Answer:
    """A response."""

    status: int
    body: bytes
    retry_after_seconds: float = 0.0


class Connection(asyncio.Protocol):
    """A kept-alive connection from an address of loopback of its own, opened again when the server has closed it."""

    def __init__(self, port: int, source: str) -> None:
        self._port, self._source = port, source
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._waiting: asyncio.Future[None] | None = None

    async def send(self, method: str, path: str, *, body: bytes = b"", authorization: str = "") -> Answer:
        """Send one request and return its answer. Raise OSError. A PUT waits for 100 Continue, as a worker does."""
        transport = self._transport
        if transport is None or transport.is_closing():
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(
                lambda: self, "127.0.0.1", self._port, local_addr=(self._source, 0)
            )
            self._transport = transport
        self._received.clear()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nUser-Agent: swarmproof\r\n"
        if authorization:
            head += f"Authorization: {authorization}\r\n"
        if method == "GET":
            transport.write(f"{head}\r\n".encode("ascii"))
            return await self._answer()
        head += f"Content-Length: {len(body)}\r\n"
        if method == "POST":
            transport.write(f"{head}\r\n".encode("ascii") + body)
            return await self._answer()
        transport.write(f"{head}Expect: 100-continue\r\n\r\n".encode("ascii"))
        answer = await self._answer()
        if answer.status != _CONTINUE:
            return answer
        transport.write(body)
        return await self._answer()

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    async def _answer(self) -> Answer:
        while (end := self._received.find(_END_OF_HEAD)) < 0:
            await self._more()
        head = bytes(self._received[:end]).decode("latin-1").lower()
        lines = head.split("\r\n")
        status = int(lines[0].split(" ", 2)[1])
        fields = dict(line.split(": ", 1) for line in lines[1:])
        start = end + len(_END_OF_HEAD)
        stop = start + int(fields.get("content-length", 0))
        while len(self._received) < stop:
            await self._more()
        body = bytes(self._received[start:stop])
        del self._received[:stop]
        if fields.get("connection") == "close":
            self.close()
        return Answer(status, body, float(fields.get("retry-after", 0)))

    async def _more(self) -> None:
        if self._transport is None:
            raise ConnectionResetError("the coordinator closed the connection")
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    def data_received(self, data: bytes) -> None:
        """Implement asyncio.Protocol."""
        self._received += data
        self._wake()

    def connection_lost(self, _: Exception | None) -> None:
        """Implement asyncio.Protocol."""
        self._transport = None
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
