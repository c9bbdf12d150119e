"""Chunks over plain HTTP, received straight into their buffers: that is where a broadcast's CPU time goes.

aiohttp copies each piece of a body three times. Here the kernel writes it to its place. Only the plainest answer
is read: HTTP/1.1 in the clear, a short head, one Content-Length. Everything else is called odd, for aiohttp to ask
again and to judge.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Self

from shardcast.manifest import KIB

MAX_HEAD_BYTES = 4 * KIB
MAX_FIELDS = 64
_MAX_PORT = 65535
KEEP_S = 15.0
"""How long a connection is kept that nobody uses."""

_URL = re.compile(r"http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?((?:/[A-Za-z0-9._~-]+)+(?:\?[a-z0-9.=]*)?)")
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t ]*([\t\x20-\x7e\x80-\xff]*)")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_ODD_FIELDS = {b"transfer-encoding", b"content-encoding", b"upgrade"}


@dataclass(frozen=True, slots=True)
class Request:
    """A GET of a plain URL: whom to connect to, and what to send."""

    host: str
    port: int
    data: bytes

    @classmethod
    def of(cls, url: str) -> Self | None:
        """None unless every character of `url` may stand in a request as it is."""
        parts = _URL.fullmatch(url)
        if parts is None or int((parts[2] or ":80")[1:]) > _MAX_PORT:
            return None
        host, port, target = parts[1], parts[2] or "", parts[3]
        head = (
            f"GET {target} HTTP/1.1\r\nHost: {host}{port}\r\nUser-Agent: shardcast/1\r\nAccept-Encoding: identity\r\n"
        )
        return cls(host.strip("[]"), int(port[1:] or 80), head.encode() + b"\r\n")


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of a plain answer (RFC 9112); `length` in bytes, `keep` if its sender takes another request."""

    status: int
    length: int
    keep: bool


def read_head(head: bytes) -> Answer | None:
    """A head without the empty line that ends it; None unless it is plain."""
    first, *fields = head.split(b"\r\n")
    status, length, keep = _STATUS.fullmatch(first), None, True
    if status is None or len(fields) > MAX_FIELDS:
        return None
    for field in fields:
        parts = _FIELD.fullmatch(field)
        if parts is None or (name := parts[1].lower()) in _ODD_FIELDS:
            return None
        value = parts[2].rstrip(b"\t ")
        if name == b"content-length":
            if length is not None or _LENGTH.fullmatch(value) is None:
                return None
            length = int(value)
        elif name == b"connection":
            keep = keep and value.lower() == b"keep-alive"
    return None if length is None else Answer(int(status[1]), length, keep)


class Link(asyncio.BufferedProtocol):
    """One connection, with one request at a time."""

    transport: asyncio.Transport
    expiry: asyncio.TimerHandle

    def __init__(self) -> None:
        self._head, self._head_size = bytearray(MAX_HEAD_BYTES), 0
        self._into = self._rest = memoryview(b"")
        self.ended: asyncio.Future[None] | None = None

    def ask(self, request: Request, into: memoryview) -> asyncio.Future[None]:
        """What is returned is done once the answer was read, or will not be; the attributes say what there is.

        `is_whole`: a plain head, and if it is a 200 of that length, all of the body, in `into`. `is_odd`: a head that
        is not plain. `is_silent`: nothing at all.
        """
        self.answer: Answer | None = None
        self.received = self._head_size = 0
        self.is_odd = self.is_whole = self.is_reusable = False
        self.is_silent = True
        self._into = into
        self.ended = asyncio.get_running_loop().create_future()
        self.transport.write(request.data)
        return self.ended

    def end(self, *, reusable: bool = False) -> None:
        """Write to the caller's buffer no more; read nothing more either, unless another request may follow."""
        self._into = self._rest = memoryview(b"")
        self._head_size = 0
        self.is_reusable = reusable
        if not reusable:
            self.transport.abort()
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, _: int) -> memoryview:
        return self._rest or memoryview(self._head)[self._head_size :]

    def buffer_updated(self, size: int) -> None:
        if self._rest:
            self._take(self._rest[size:])
        elif self.ended is None or self.ended.done():
            self.end()  # more than was asked for
        else:
            self._head_size, self.is_silent = self._head_size + size, False
            self._read_head()

    def connection_lost(self, _: Exception | None) -> None:
        self.end()

    # -- inside

    def _read_head(self) -> None:
        end = self._head.find(b"\r\n\r\n", 0, self._head_size)
        if end < 0 and self._head_size < MAX_HEAD_BYTES:
            return
        self.answer = answer = read_head(bytes(self._head[: max(0, end)]))
        self.is_odd = answer is None
        body = memoryview(self._head)[end + 4 : self._head_size]
        if answer is None or answer.status != 200 or answer.length != len(self._into):
            self.is_whole = answer is not None
            self.end(reusable=answer is not None and answer.keep and answer.length == len(body))
            return
        size = min(len(body), answer.length)
        self._into[:size] = body[:size]
        self._take(self._into[size:], reusable=len(body) == size)

    def _take(self, rest: memoryview, *, reusable: bool = True) -> None:
        """`rest` of the chunk is still to come."""
        assert self.answer is not None
        self._rest, self.received = rest, self.answer.length - len(rest)
        if not rest:
            self.is_whole = True
            self.end(reusable=reusable and self.answer.keep)


class Pool:
    """Connections for one event loop, kept for `KEEP_S` when nobody uses them."""

    def __init__(self) -> None:
        self._idle: list[tuple[str, int, Link]] = []

    def taken(self, request: Request) -> Link | None:
        """The one that was used last; None if there is none."""
        self._idle = [each for each in self._idle if not each[2].transport.is_closing()]
        for at in reversed(range(len(self._idle))):
            host, port, link = self._idle[at]
            if (host, port) == (request.host, request.port):
                del self._idle[at]
                link.expiry.cancel()
                return link
        return None

    async def connected(self, request: Request) -> Link:
        """A new one. Raises OSError."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(Link, request.host, request.port, happy_eyeballs_delay=0.25)
        return link

    def give_back(self, request: Request, link: Link) -> None:
        if not link.is_reusable:
            link.end()
            return
        self._idle.append((request.host, request.port, link))
        link.expiry = asyncio.get_running_loop().call_later(KEEP_S, link.end)

    async def close(self) -> None:
        for _, _, link in self._idle:
            link.expiry.cancel()
            link.end()
        self._idle.clear()
        await asyncio.sleep(0)  # in which asyncio closes the sockets
