"""HTTP/1.1 client for hostile servers: GET requests, and only the simplest responses.

A response is read when it has one status line, a short head and one Content-Length, uncompressed; anything else (an
interim or chunked response, two lengths, a head above MAX_HEAD_BYTES) is malformed and ends the connection. Nothing a
server sends is read without a limit, and the body of a chunk, where a broadcast spends its CPU time, is written by the
kernel into the caller's buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Self

import aiohappyeyeballs

from shardcast.errors import Unreachable
from shardcast.manifest import KIB
from shardcast.urls import split_url

MAX_HEAD_BYTES = 4 * KIB
MAX_FIELDS = 64
IDLE_S = 15.0
"""How long an idle connection is kept."""
_NEXT_ADDRESS_S = 0.25
"""When a host's next address is tried beside the one before it (RFC 8305)."""

_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t ]*([\t\x20-\x7e\x80-\xff]*)")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_UNSUPPORTED_FIELDS = {b"transfer-encoding", b"content-encoding", b"upgrade"}
_OK, _NO_CONTENT = 200, 204
_LOOKUPS = 2
"""Names looked up at once. A server of names may hang for half a minute: that must hold up nothing but lookups."""

MayConnect = Callable[[str, int, str], bool]
"""Whether a connection to a URL's host and port is allowed at an IP address that the host resolved to."""


def anywhere(_host: str, _port: int, _address: str) -> bool:
    """Allow every address: for URLs that this machine's own operator gave."""
    return True


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A GET of a plain URL: host, port, whether over TLS, and request bytes."""

    host: str
    port: int
    tls: bool
    data: bytes

    @classmethod
    def for_url(cls, url: str) -> Self | None:
        """Build the request; None for a URL that `shardcast.urls` does not take."""
        parts = split_url(url)
        if parts is None:
            return None
        head = f"GET {parts.target} HTTP/1.1\r\nHost: {parts.authority}\r\n"
        head += "User-Agent: shardcast/1\r\nAccept-Encoding: identity\r\n\r\n"
        return cls(parts.host, parts.port, parts.tls, head.encode())


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Parsed response head (RFC 9112): `length` in bytes; `keep` if the connection may be reused."""

    status: int
    length: int
    keep: bool


def read_head(head: bytes) -> ResponseHead | None:
    """Parse a response head without its final empty line; None if it is not one that is read."""
    first, *fields = head.split(b"\r\n")
    line = _STATUS.fullmatch(first)
    if line is None or len(fields) > MAX_FIELDS:
        return None
    status = int(line[1])
    framing = _read_framing(fields)
    if framing is None:
        # The connection is closed unread: a proxy may frame its own refusals as it likes.
        return None if status in {_OK, _NO_CONTENT} else ResponseHead(status, 0, keep=False)
    length, keep = framing
    if length is None and status != _NO_CONTENT:
        return None if status == _OK else ResponseHead(status, 0, keep=False)
    return ResponseHead(status, length or 0, keep)


def _read_framing(fields: list[bytes]) -> tuple[int | None, bool] | None:
    """Return the Content-Length and whether the connection may be kept; None for fields that are not read."""
    length, keep = None, True
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
    return length, keep


class RawConnection(asyncio.BufferedProtocol):
    """One connection, with one request at a time."""

    transport: asyncio.Transport
    expiry: asyncio.TimerHandle

    def __init__(self) -> None:
        self._head, self._head_size = bytearray(MAX_HEAD_BYTES), 0
        self._into: memoryview | None = None
        self._unfilled = memoryview(b"")
        self._max_bytes = 0
        self.body = memoryview(b"")
        self.finished: asyncio.Future[None] | None = None

    def send(self, request: RawRequest, *, into: memoryview | None = None, max_bytes: int = 0) -> asyncio.Future[None]:
        """Send a request; the returned future is done when the response was read or never will be.

        The body of a 200 is read if it fills `into` exactly or, without `into`, has at most `max_bytes`. Then
        `is_whole`: head parsed and such a body in `body`. `is_malformed`: head not to be read. `is_silent`: nothing
        received.
        """
        self.response: ResponseHead | None = None
        self.received = self._head_size = 0
        self.is_malformed = self.is_whole = self.is_reusable = False
        self.is_silent = True
        self._into, self._max_bytes, self.body = into, max_bytes, memoryview(b"")
        self.finished = asyncio.get_running_loop().create_future()
        self.transport.write(request.data)
        return self.finished

    def take_body(self) -> memoryview:
        """Hand out the body; a connection that waits for its next use must not keep megabytes."""
        body, self.body = self.body, memoryview(b"")
        return body

    def end(self, *, reusable: bool = False) -> None:
        """Release the caller's buffer, and close the connection unless it is reusable."""
        self._into, self._unfilled = None, memoryview(b"")
        if not self.is_whole:
            self.body = memoryview(b"")
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
        self.is_whole = False

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
        self.is_malformed = response is None
        rest = memoryview(self._head)[end + 4 : self._head_size]
        if response is None or response.status != 200 or not self._is_wanted(response.length):
            self.is_whole = response is not None
            self.end(reusable=response is not None and response.keep and response.length == len(rest))
            return
        self.body = memoryview(bytearray(response.length)) if self._into is None else self._into
        size = min(len(rest), response.length)
        self.body[:size] = rest[:size]
        self._advance(self.body[size:], reusable=len(rest) == size)

    def _is_wanted(self, length: int) -> bool:
        return length <= self._max_bytes if self._into is None else length == len(self._into)

    def _advance(self, unfilled: memoryview, *, reusable: bool = True) -> None:
        """Note that only `unfilled` of the body is still to come; finish when it is empty."""
        assert self.response is not None
        self._unfilled, self.received = unfilled, self.response.length - len(unfilled)
        if not unfilled:
            self.is_whole = True
            self.end(reusable=reusable and self.response.keep)


class ConnectionPool:
    """Connections of one event loop, kept for `IDLE_S` while unused; only to addresses that `may_connect` allows."""

    def __init__(self, *, may_connect: MayConnect = anywhere) -> None:
        self._idle: list[tuple[RawRequest, RawConnection]] = []
        self._may_connect = may_connect
        self._tls: ssl.SSLContext | None = None
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="lookup")

    def acquire_idle(self, request: RawRequest) -> RawConnection | None:
        """Take the most recently used idle connection to the request's host; None if there is none."""
        self._idle = [entry for entry in self._idle if not entry[1].transport.is_closing()]
        for position in reversed(range(len(self._idle))):
            earlier, link = self._idle[position]
            if (earlier.tls, earlier.host, earlier.port) == (request.tls, request.host, request.port):
                del self._idle[position]
                link.expiry.cancel()
                return link
        return None

    async def connect(self, request: RawRequest) -> RawConnection:
        """Open a new connection. Raises OSError, or Unreachable "not_allowed" if no address of the host is allowed."""
        loop = asyncio.get_running_loop()
        found = await self._addresses(request.host, request.port)
        allowed = [info for info in found if self._may_connect(request.host, request.port, str(info[4][0]))]
        if not allowed:
            raise Unreachable(
                f"{request.host} is nearer to this machine than whoever named it; it is not called", code="not_allowed"
            )
        sock = await aiohappyeyeballs.start_connection(allowed, happy_eyeballs_delay=_NEXT_ADDRESS_S)
        tls = self._tls_context() if request.tls else None
        try:
            _, link = await loop.create_connection(
                RawConnection, sock=sock, ssl=tls, server_hostname=request.host.rstrip(".") if tls else None
            )
        except BaseException:
            with contextlib.suppress(OSError):
                sock.close()
            raise
        return link

    def release(self, request: RawRequest, link: RawConnection) -> None:
        """Return a connection after a response: keep it if reusable, else close it."""
        if not link.is_reusable:
            link.end()
            return
        self._idle.append((request, link))
        link.expiry = asyncio.get_running_loop().call_later(IDLE_S, link.end)

    async def close(self) -> None:
        for _, link in self._idle:
            link.expiry.cancel()
            link.end()
        self._idle.clear()
        self._lookups.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)  # lets asyncio close the sockets

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    async def _addresses(self, host: str, port: int) -> Sequence[aiohappyeyeballs.AddrInfoType]:
        """Resolve a host; an IP address is not looked up."""
        try:
            literal = ipaddress.ip_address(host)
        except ValueError:
            look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            return await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        if literal.version == 4:
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]
        return [(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port, 0, 0))]
