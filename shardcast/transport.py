"""Fetching from peers that may be hostile: every read has a byte limit, a deadline and a minimum rate.

Redirects, cookies, proxies from the environment and content encodings are off: a peer gets to send bytes,
and nothing else. What arrives is verified by the caller. Chunks come the short way of `shardcast.links` where they can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp

from shardcast.errors import Malformed, NotServed, NoVersionYet, TooSlow, Unreachable
from shardcast.links import Answer, Link, Pool, Request
from shardcast.manifest import DEFAULT_LIMITS, KIB, Limits

_ENVELOPE_OVERHEAD_BYTES = 1024
_LOOK_S = 0.25
"""How often a chunk's progress is compared with the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Patience with one answer. `min_bytes_per_s` counts from the first byte, after `rate_grace_s`."""

    connect_s: float = 5.0
    answer_s: float = 10.0
    idle_s: float = 10.0
    total_s: float = 120.0
    rate_grace_s: float = 5.0
    min_bytes_per_s: float = 8 * KIB


DEFAULT_TRANSPORT_LIMITS = TransportLimits()


class Transport:
    """HTTP to any number of peers from one event loop; close it there too."""

    def __init__(
        self, *, limits: Limits = DEFAULT_LIMITS, patience: TransportLimits = DEFAULT_TRANSPORT_LIMITS
    ) -> None:
        self._limits = limits
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None
        self._pool = Pool()
        self._odd = set[str]()

    async def close(self) -> None:
        await self._pool.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def head(self, url: str, *, after: int, wait_s: float) -> bytes:
        """The newest head the peer shows, waiting up to `wait_s` for a version above `after`.

        After that time the peer's current head is returned all the same: its age is what shows a freeze.
        """
        query = f"?wait={max(0.0, wait_s):.3f}" + (f"&after={after}" if after >= 0 else "")
        body = _Body(self._limits.max_head_bytes + _ENVELOPE_OVERHEAD_BYTES)
        found = await self._get(f"{url}/v1/head{query}", body, wait_s=wait_s)
        if not found and not await self._get(f"{url}/v1/head", body):
            raise NoVersionYet(f"{url} has no version yet")
        return bytes(body.grown)

    async def manifest(self, url: str, digest: str) -> bytes:
        return await self._envelope(f"{url}/v1/manifests/{digest}")

    async def version(self, url: str, version: int) -> bytes:
        """The manifest envelope of a version by its number."""
        return await self._envelope(f"{url}/v1/versions/{version}")

    async def chunk(self, url: str, name: str, index: int, *, into: memoryview, wait_s: float) -> None:
        """Fill `into` with what is said to be a chunk of payload `name`; `wait_s` if the peer waits for it, too."""
        address = f"{url}/v1/payloads/{name}/{index}?wait={max(0.0, wait_s):.3f}"
        answer = await self._plain(url, address, into, within_s=wait_s + self._patience.answer_s)
        if answer is not None:
            size = _expected(answer.length, len(into)) if _is_filled(address, answer.status) else 0
        else:
            body = _Body(len(into), into)
            size = body.size if await self._get(address, body, wait_s=wait_s) else 0
        if size != len(into):
            raise Malformed(f"{url} sent {size} bytes of {len(into)}", code="wrong_length")

    async def _plain(self, url: str, address: str, into: memoryview, *, within_s: float) -> Answer | None:
        """The head of an answer that begins `within_s`; `into` is filled if it is a 200 of that length.

        None for a URL or an answer that is not plain: aiohttp has to ask.
        """
        request = None if url in self._odd else Request.of(address)
        if request is None:
            return None
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            link = self._pool.taken(request)
            is_new = link is None
            with _typed_errors(address):
                if link is None:
                    async with asyncio.timeout(min(self._patience.connect_s, within_s)):
                        link = await self._pool.connected(request)
                try:
                    await self._follow(link, link.ask(request, into), deadline)
                finally:
                    self._pool.give_back(request, link)
            if link.is_odd:
                self._odd.add(url)
                return None
            if link.is_whole:
                return link.answer
            if is_new or not link.is_silent:  # a server may close a connection just as it is used again
                raise Unreachable(f"{address}: the connection was closed before the end of the answer")

    async def _follow(self, link: Link, ended: asyncio.Future[None], deadline: float) -> None:
        """Wait for the end of an answer, as long as the limits allow."""
        loop, patience = asyncio.get_running_loop(), self._patience
        started, received = 0.0, -1
        async with asyncio.timeout_at(deadline) as limit:
            while not ended.done():
                await asyncio.wait([ended], timeout=_LOOK_S)
                if ended.done() or link.answer is None:
                    continue
                now = loop.time()
                started = started or now
                if link.received > received:
                    received = link.received
                    limit.reschedule(min(now + patience.idle_s, started + patience.total_s))
                _refuse_slow(received, now - started, patience)

    async def _envelope(self, address: str) -> bytes:
        body = _Body(self._limits.max_manifest_bytes + _ENVELOPE_OVERHEAD_BYTES)
        if not await self._get(address, body):
            raise Malformed("an empty answer where a manifest was asked for", code="wrong_length")
        return bytes(body.grown)

    async def _get(self, address: str, body: _Body, *, wait_s: float = 0.0) -> bool:
        """Put the body of a 200 into `body`; False for a 204. Everything else is a typed error."""
        loop = asyncio.get_running_loop()
        with _typed_errors(address):
            async with asyncio.timeout(wait_s + self._patience.answer_s) as deadline:
                async with self._opened().get(address, allow_redirects=False) as response:
                    if not _is_filled(address, response.status):
                        return False
                    await _read(response, body, self._patience, deadline, loop)
                    return True

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._patience.connect_s),
                headers={"User-Agent": "shardcast/1", "Accept-Encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
                read_bufsize=256 * KIB,
                max_line_size=KIB,
                max_field_size=4 * KIB,
            )
        return self._session


class _Body:
    """At most `most` bytes of an answer: in `room`, which a caller uses again and again, or in `grown`."""

    def __init__(self, most: int, room: memoryview | None = None) -> None:
        self.most, self.size, self.grown = most, 0, bytearray()
        self._room = room

    def add(self, piece: bytes) -> None:
        end = self.size + len(piece)
        if end > self.most:
            raise Malformed(f"more than the {self.most} bytes that are allowed", code="oversized")
        if self._room is None:
            self.grown += piece
        else:
            self._room[self.size : end] = piece
        self.size = end


def _is_filled(address: str, status: int) -> bool:
    """Whether an answer has what was asked for: a 200 does, a 204 has nothing, anything else is an error."""
    if status == 503:
        raise NotServed(f"{address} does not have it yet", code="not_yet")
    if status not in {200, 204}:
        raise NotServed(f"{address} answers {status}", code="not_served")
    return status == 200


def _expected(declared: int, most: int) -> int:
    if declared > most:
        raise Malformed(f"{declared} bytes announced where at most {most} are allowed", code="oversized")
    return declared


def _refuse_slow(size: int, seconds: float, patience: TransportLimits) -> None:
    if size < patience.min_bytes_per_s * (seconds - patience.rate_grace_s):
        raise TooSlow(f"{size / seconds:.0f} bytes/s, below the minimum")


async def _read(
    response: aiohttp.ClientResponse,
    body: _Body,
    patience: TransportLimits,
    deadline: asyncio.Timeout,
    loop: asyncio.AbstractEventLoop,
) -> None:
    _expected(response.content_length or 0, body.most)
    started = loop.time()
    deadline.reschedule(started + min(patience.idle_s, patience.total_s))
    async for piece in response.content.iter_any():
        body.add(piece)
        now = loop.time()
        _refuse_slow(body.size, now - started, patience)
        deadline.reschedule(min(now + patience.idle_s, started + patience.total_s))


@contextmanager
def _typed_errors(address: str) -> Iterator[None]:
    """aiohttp's errors as ours, by whose fault they are."""
    try:
        yield
    except TimeoutError as error:
        raise TooSlow(f"{address} did not answer in time") from error
    except aiohttp.InvalidURL as error:  # most are somebody else's: a fault of this machine would end the whole fetch
        raise Unreachable(f"{address} is not a URL") from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        raise Unreachable(f"{address}: {error or type(error).__name__}") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise Malformed(f"{address} does not speak HTTP: {error}") from error
