"""Bounded HTTP exchanges with an untrusted server.

Replies have a size limit and a deadline; nothing is decompressed, redirected or kept in a cookie. Network faults are
Unavailable, protocol violations BadReply; retrying is the caller's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal
from urllib.parse import urlsplit

import aiohttp
from blake3 import blake3
from msgspec import UNSET, UnsetType

from node.client.ssrf import Reach, SsrfGuardResolver, reach_of
from node.errors import BadReply, ConfigError, Unavailable
from node.protocol.messages import SlotName

MAX_PRINTED: Final = 300
_PIECE_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLimits:
    """Deadlines of one exchange; an upload gets its size over the least rate on top of `reply_seconds`."""

    connect_seconds: float = 10.0
    reply_seconds: float = 30.0
    least_upload_bytes_per_second: float = 16 * 1024
    max_retry_after_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff with jitter."""

    first_seconds: float = 0.25
    max_seconds: float = 15.0

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after `failures` consecutive failures (1 for the first)."""
        ceiling = min(self.max_seconds, self.first_seconds * 2.0 ** min(failures - 1, 32))
        return ceiling * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An HTTP request; `wait_seconds` is the long-poll time that the server was asked for.

    A body that is `elsewhere` (in the run's object store) is signed and not sent. `signed` asks for an
    Authorization header, whose claim names `slot`.
    """

    method: Literal["GET", "POST", "PUT"]
    path: str
    query: Mapping[str, str] | None = None
    body: bytes | Path = b""
    max_reply_bytes: int
    wait_seconds: float = 0.0
    elsewhere: bool = False
    signed: bool = False
    slot: SlotName | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP reply; `retry_after_seconds` is None unless Retry-After gave a number."""

    status: int
    body: bytes
    retry_after_seconds: float | None


class Exchange:
    """HTTP client of one server; `in_flight` counts its open requests."""

    def __init__(self, url: str, *, limits: ExchangeLimits) -> None:
        self.url = checked_url(url)
        self.limits = limits
        self.in_flight = 0
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._resolver = SsrfGuardResolver()

    @property
    def reach(self) -> Reach:
        """The farthest reach that the server's host has resolved to; INTERNET if unknown."""
        literal = reach_of(urlsplit(self.url).hostname or "")
        if literal is not None:
            return literal
        return Reach.INTERNET if self._resolver.farthest is None else self._resolver.farthest

    async def close(self) -> None:
        """Close the connections; nothing can be sent afterwards."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def send(self, request: Request, *, body_bytes: int, headers: Mapping[str, str]) -> Reply:
        """Send once, without retries; raises Unavailable or BadReply."""
        seconds = self.limits.reply_seconds + request.wait_seconds
        seconds += body_bytes / self.limits.least_upload_bytes_per_second
        self.in_flight += 1
        try:
            async with asyncio.timeout(seconds):
                return await self._send(request, body_bytes, headers)
        except TimeoutError as error:
            raise Unavailable(f"no answer within {seconds:.0f} s", code="timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(describe(error)) from error
        finally:
            self.in_flight -= 1

    async def _send(self, request: Request, body_bytes: int, headers: Mapping[str, str]) -> Reply:
        if self._is_closed:
            raise Unavailable("the client is closed", code="closed")
        if self._session is None:
            self._session = new_session(self.limits, self._resolver)
        async with self._session.request(
            request.method,
            self.url + request.path,
            params=request.query,
            data=_pieces(request.body) if body_bytes else None,
            headers={**headers, "Content-Length": str(body_bytes)} if body_bytes else headers,
            # A refusal then arrives before the body is sent, instead of a reset connection.
            expect100=body_bytes > 0 and request.method == "PUT",
            allow_redirects=False,
        ) as response:
            body = await self._read(response, request.max_reply_bytes)
            return Reply(response.status, body, self._retry_after(response))

    async def _read(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > max_bytes:
                raise BadReply(f"{self.url} sends more than the {max_bytes} bytes allowed here.", code="oversized")
        return bytes(body)

    def _retry_after(self, response: aiohttp.ClientResponse) -> float | None:
        text = response.headers.get("Retry-After", "")
        if not (text.isascii() and text.isdigit()):
            return None
        return min(float(text[:9]), self.limits.max_retry_after_seconds)


def new_session(limits: ExchangeLimits, resolver: SsrfGuardResolver) -> aiohttp.ClientSession:
    """Open a session without cookies, decompression or a total timeout; requests carry their own deadlines."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=resolver),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity", "User-Agent": "swarmproof"},
    )


def checked_url(url: str) -> str:
    """Return `url` without a trailing slash; raises ConfigError unless it is a plain http(s) URL."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(f"{printable(url)!r} is no URL of a server; give one such as http://192.0.2.1:8000")
    return url.rstrip("/")


def page_of(coordinator: str, node: str) -> str:
    """Return the address of a node's page at the coordinator with this URL."""
    return f"{coordinator.rstrip('/')}/nodes/{node}"


def valid_urls(urls: Iterable[str]) -> tuple[str, ...]:
    """Return the valid ones of an untrusted list of URLs, without duplicates."""
    sound = []
    for url in urls:
        with contextlib.suppress(ConfigError):
            sound.append(checked_url(url))
    return tuple(dict.fromkeys(sound))


def printable(text: str) -> str:
    """Return up to MAX_PRINTED characters of untrusted text, control characters replaced by "?"."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_PRINTED])


def measure_body(body: bytes | Path) -> tuple[str, int]:
    """Return the BLAKE3 (hexadecimal) and the length in bytes of a body."""
    hasher = blake3(body) if isinstance(body, bytes) else blake3().update_mmap(body)
    return hasher.hexdigest(), len(body) if isinstance(body, bytes) else body.stat().st_size


async def _pieces(body: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(body, bytes):
        yield body
        return
    with await asyncio.to_thread(body.open, "rb") as file:
        async for piece in read_pieces(file):
            yield piece


async def read_pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield a file's content in pieces, read outside the event loop."""
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


def describe(error: Exception) -> str:
    """Describe a network error in a few words, safe to print."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno).lower()
    return printable(str(error)) or type(error).__name__
