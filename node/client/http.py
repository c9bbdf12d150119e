"""One bounded HTTP exchange with a server that nobody vouches for.

A reply has a size and a time in which it must arrive; nothing is decompressed, redirected or kept in a
cookie. What the network did is Unavailable, what the server did wrong is BadReply; whether to try again is
the caller's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import aiohttp
from blake3 import blake3

from node.client.ssrf import Reach, RememberingResolver, reach_of
from node.errors import BadReply, ConfigError, Unavailable

MAX_PRINTED: Final = 300
_PIECE_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLimits:
    """Deadlines of one exchange. An upload gets `reply_seconds`, and its size over the least rate on top."""

    connect_seconds: float = 10.0
    reply_seconds: float = 30.0
    least_upload_bytes_per_second: float = 16 * 1024
    max_retry_after_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential with jitter, so that a thousand workers do not return in the same second."""

    first_seconds: float = 0.25
    max_seconds: float = 15.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after `failures` failures in a row (1 for the first)."""
        ceiling = min(self.max_seconds, self.first_seconds * 2.0 ** min(failures - 1, 32))
        return ceiling * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to send; `wait_seconds` is how long the server was asked to hold the answer back.

    A body that is `elsewhere` is signed for, and not sent: the run's object store has it. Whoever sends
    it signs what is `signed`.
    """

    method: Literal["GET", "POST", "PUT"]
    path: str
    query: Mapping[str, str] | None = None
    body: bytes | Path = b""
    max_reply_bytes: int
    wait_seconds: float = 0.0
    elsewhere: bool = False
    signed: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. `retry_after_seconds` is None unless the server gave a number of seconds."""

    status: int
    body: bytes
    retry_after_seconds: float | None


class Exchange:
    """HTTP with one server, from the first request until `close`. `in_flight` counts the requests under way."""

    def __init__(self, url: str, *, limits: ExchangeLimits) -> None:
        self.url = checked_url(url)
        self.limits = limits
        self.in_flight = 0
        self._session: aiohttp.ClientSession | None = None
        self._resolver: RememberingResolver | None = None

    @property
    def reach(self) -> Reach:
        """How far away the server is, or seemed to be once."""
        literal = reach_of(urlsplit(self.url).hostname or "")
        if literal is not None:
            return literal
        farthest = self._resolver.farthest if self._resolver is not None else None
        return Reach.INTERNET if farthest is None else farthest

    async def close(self) -> None:
        """End its connections; nothing can be sent any more."""
        if self._session is not None:
            await self._session.close()

    async def send(self, request: Request, *, body_bytes: int, headers: Mapping[str, str]) -> Reply:
        """One attempt, no more; raises Unavailable or BadReply."""
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
        if self._session is None:
            self._resolver = RememberingResolver()
            self._session = _session(self.limits, self._resolver)
        async with self._session.request(
            request.method,
            self.url + request.path,
            params=request.query,
            data=_pieces(request.body) if body_bytes else None,
            headers={**headers, "Content-Length": str(body_bytes)} if body_bytes else headers,
            # A refusal then arrives before a body that nobody would read, instead of a reset connection.
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


def _session(limits: ExchangeLimits, resolver: RememberingResolver) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=resolver),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity", "User-Agent": "swarmproof"},
    )


def checked_url(url: str) -> str:
    """`url` without a slash at its end, if it is one that a node may call; raises ConfigError."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(f"{printable(url)!r} is no URL of a server; give one such as http://192.0.2.1:8000")
    return url.rstrip("/")


def sound_urls(urls: Iterable[str]) -> tuple[str, ...]:
    """Those of `urls` that may be called: one bad entry in a stranger's list must not spoil the others."""
    sound = []
    for url in urls:
        with contextlib.suppress(ConfigError):
            sound.append(checked_url(url))
    return tuple(dict.fromkeys(sound))


def printable(text: str) -> str:
    """A peer's text without control characters, so that it cannot drive the reader's terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_PRINTED])


def measure_body(body: bytes | Path) -> tuple[str, int]:
    """BLAKE3 (hexadecimal) and length in bytes of what is to be sent."""
    hasher = blake3(body) if isinstance(body, bytes) else blake3().update_mmap(body)
    return hasher.hexdigest(), len(body) if isinstance(body, bytes) else body.stat().st_size


async def _pieces(body: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(body, bytes):
        yield body
        return
    file = await asyncio.to_thread(body.open, "rb")
    try:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece
    finally:
        file.close()


def describe(error: Exception) -> str:
    """What the network did, in a few words."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno).lower()
    return printable(str(error)) or type(error).__name__
