"""Chunk download over plain HTTP straight into the caller's buffer, where a broadcast spends its CPU time.

aiohttp copies each piece of a body three times; here the kernel writes it into place. Only the simplest response is
parsed: HTTP/1.1 in the clear, a short head, one Content-Length. Anything else is reported as unsupported, and the
caller repeats the request with aiohttp.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from dataclasses import dataclass
from typing import Self

from shardcast.manifest import KIB

MAX_HEAD_BYTES = 4 * KIB
MAX_FIELDS = 64
_MAX_PORT = 65535
IDLE_S = 15.0
"""How long an idle connection is kept."""
_NEXT_ADDRESS_S = 0.25
"""When a host's next address is tried beside the one before it (RFC 8305)."""

_URL = re.compile(r"http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?((?:/[A-Za-z0-9._~-]+)+(?:\?[a-z0-9.=]*)?)")
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t ]*([\t\x20-\x7e\x80-\xff]*)")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_UNSUPPORTED_FIELDS = {b"transfer-encoding", b"content-encoding", b"upgrade"}


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A GET of a plain URL: host, port and request bytes."""

    host: str
    port: int
    data: bytes

    @classmethod
    def for_url(cls, url: str) -> Self | None:
        """Build the request; None unless every character of `url` may be sent unescaped."""
        parts = _URL.fullmatch(url)
        if parts is None or int((parts[2] or ":80")[1:]) > _MAX_PORT:
            return None
        host, port, target = parts[1], parts[2] or "", parts[3]
        head = (
            f"GET {target} HTTP/1.1\r\nHost: {host}{port}\r\nUser-Agent: shardcast/1\r\nAccept-Encoding: identity\r\n"
        )
        return cls(host.strip("[]"), int(port[1:] or 80), head.encode() + b"\r\n")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Parsed response head (RFC 9112): `length` in bytes; `keep` if the connection may be reused."""

    status: int
    length: int
    keep: bool


def read_head(head: bytes) -> ResponseHead | None:
    """Parse a response head without its final empty line; None if it is unsupported."""
    first, *fields = head.split(b"\r\n")
    status, length, keep = _STATUS.fullmatch(first), None, True
    if status is None or len(fields) > MAX_FIELDS:
        return None
    for field in fields:
        parts = _FIELD.fullmatch(field)
        if parts is None or (name := parts[1].lower()) in _UNSUPPORTED_FIELDS:
            return None
        value = parts[2].rstrip(b"\t ")
        if name == b"content-length":
            if length is not None or _LENGTH.fullmatch(value) is None:
                return None
            length = int(value)
        elif name == b"connection":
            keep = keep and value.lower() == b"keep-alive"
    return None if length is None else ResponseHead(int(status[1]), length, keep)


class RawConnection(asyncio.BufferedProtocol):
    """One connection, with one request at a time."""

    transport: asyncio.Transport
    expiry: asyncio.TimerHandle

    def __init__(self) -> None:
        self._head, self._head_size = bytearray(MAX_HEAD_BYTES), 0
        self._into = self._unfilled = memoryview(b"")
        self.finished: asyncio.Future[None] | None = None

    def send(self, request: RawRequest, into: memoryview) -> asyncio.Future[None]:
        """Send a request; the returned future is done when the response was read or never will be.

        Then `is_whole`: head parsed and, for a 200 of the expected length, body in `into`. `is_unsupported`: head could
        not be parsed. `is_silent`: nothing received.
        """
        self.response: ResponseHead | None = None
        self.received = self._head_size = 0
        self.is_unsupported = self.is_whole = self.is_reusable = False
        self.is_silent = True
        self._into = into
        self.finished = asyncio.get_running_loop().create_future()
        self.transport.write(request.data)
        return self.finished

    def end(self, *, reusable: bool = False) -> None:
        """Release the caller's buffer, and close the connection unless it is reusable."""
        self._into = self._unfilled = memoryview(b"")
        self._head_size = 0
        self.is_reusable = reusable
        if not reusable:
            self.transport.abort()
        if self.finished is not None and not self.finished.done():
            self.finished.set_result(None)

    # -- asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, _: int) -> memoryview:
        return self._unfilled or memoryview(self._head)[self._head_size :]

    def buffer_updated(self, size: int) -> None:
        if self._unfilled:
            self._advance(self._unfilled[size:])
        elif self.finished is None or self.finished.done():
            self.end()  # unsolicited data
        else:
            self._head_size, self.is_silent = self._head_size + size, False
            self._read_head()

    def connection_lost(self, _: Exception | None) -> None:
        self.end()

    # -- parsing

    def _read_head(self) -> None:
        end = self._head.find(b"\r\n\r\n", 0, self._head_size)
        if end < 0 and self._head_size < MAX_HEAD_BYTES:
            return
        self.response = response = read_head(bytes(self._head[: max(0, end)]))
        self.is_unsupported = response is None
        body = memoryview(self._head)[end + 4 : self._head_size]
        if response is None or response.status != 200 or response.length != len(self._into):
            self.is_whole = response is not None
            self.end(reusable=response is not None and response.keep and response.length == len(body))
            return
        size = min(len(body), response.length)
        self._into[:size] = body[:size]
        self._advance(self._into[size:], reusable=len(body) == size)

    def _advance(self, unfilled: memoryview, *, reusable: bool = True) -> None:
        """Note that only `rest` of the chunk is still to come; finish when it is empty."""
        assert self.response is not None
        self._unfilled, self.received = unfilled, self.response.length - len(unfilled)
        if not unfilled:
            self.is_whole = True
            self.end(reusable=reusable and self.response.keep)


class ConnectionPool:
    """Connections of one event loop, kept for `IDLE_S` while unused."""

    def __init__(self) -> None:
        self._idle: list[tuple[str, int, RawConnection]] = []

    def acquire_idle(self, request: RawRequest) -> RawConnection | None:
        """Take the most recently used idle connection to the request's host; None if there is none."""
        self._idle = [entry for entry in self._idle if not entry[2].transport.is_closing()]
        for position in reversed(range(len(self._idle))):
            host, port, link = self._idle[position]
            if (host, port) == (request.host, request.port):
                del self._idle[position]
                link.expiry.cancel()
                return link
        return None

    async def connect(self, request: RawRequest) -> RawConnection:
        """Open a new connection. Raises OSError."""
        # Only a name can have several addresses to race; asyncio's race loses its socket when cancelled as it is won.
        delay = None if _is_address(request.host) else _NEXT_ADDRESS_S
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(RawConnection, request.host, request.port, happy_eyeballs_delay=delay)
        return link

    def release(self, request: RawRequest, link: RawConnection) -> None:
        """Return a connection after a response: keep it if reusable, else close it."""
        if not link.is_reusable:
            link.end()
            return
        self._idle.append((request.host, request.port, link))
        link.expiry = asyncio.get_running_loop().call_later(IDLE_S, link.end)

    async def close(self) -> None:
        for _, _, link in self._idle:
            link.expiry.cancel()
            link.end()
        self._idle.clear()
        await asyncio.sleep(0)  # lets asyncio close the sockets
