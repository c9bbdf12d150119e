"""HTTP client for hostile peers: every read has a byte limit, a deadline and a minimum rate.

Redirects, cookies, environment proxies and content encodings are off. The caller verifies what arrives. Chunks use
`shardcast.fetch.raw_http` where possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp

from shardcast.errors import Malformed, NotServed, NoVersionYet, TooSlow, Unreachable
from shardcast.fetch.raw_http import ConnectionPool, RawConnection, RawRequest, ResponseHead
from shardcast.manifest import DEFAULT_LIMITS, KIB, Limits

_ENVELOPE_OVERHEAD_BYTES = 1024
_PROGRESS_CHECK_S = 0.25
"""How often a chunk's progress is compared with the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Timeouts for one response. `min_bytes_per_s` counts from the first byte, after `rate_grace_s`."""

    connect_s: float = 5.0
    response_s: float = 10.0
    idle_s: float = 10.0
    total_s: float = 120.0
    rate_grace_s: float = 5.0
    min_bytes_per_s: float = 8 * KIB


DEFAULT_TRANSPORT_LIMITS = TransportLimits()


class Transport:
    """HTTP client to any number of peers, bound to one event loop; close it there."""

    def __init__(
        self, *, limits: Limits = DEFAULT_LIMITS, patience: TransportLimits = DEFAULT_TRANSPORT_LIMITS
    ) -> None:
        self._limits = limits
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None
        self._pool = ConnectionPool()
        self._needs_aiohttp = set[str]()

    async def close(self) -> None:
        await self._pool.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def head(self, url: str, *, after: int, wait_s: float) -> bytes:
        """Fetch the peer's newest head, waiting up to `wait_s` for a version above `after`.

        On timeout the current head is returned all the same: its age is what reveals a freeze.
        """
        query = f"?wait={max(0.0, wait_s):.3f}" + (f"&after={after}" if after >= 0 else "")
        body = _Body(self._limits.max_head_bytes + _ENVELOPE_OVERHEAD_BYTES)
        found = await self._get(f"{url}/v1/head{query}", body, wait_s=wait_s)
        if not found and not await self._get(f"{url}/v1/head", body):
            raise NoVersionYet(f"{url} has no version yet")
        return bytes(body.grown)

    async def manifest(self, url: str, digest: str) -> bytes:
        return await self._fetch_envelope(f"{url}/v1/manifests/{digest}")

    async def version(self, url: str, version: int) -> bytes:
        """Fetch the manifest envelope of a version by number."""
        return await self._fetch_envelope(f"{url}/v1/versions/{version}")

    async def chunk(self, url: str, name: str, index: int, *, into: memoryview, wait_s: float) -> None:
        """Fill `into` with an unverified chunk of payload `name`, waiting up to `wait_s` for the peer to have it."""
        address = f"{url}/v1/payloads/{name}/{index}?wait={max(0.0, wait_s):.3f}"
        response = await self._fetch_raw(url, address, into, within_s=wait_s + self._patience.response_s)
        if response is not None:
            size = _bounded_length(response.length, len(into)) if _has_body(address, response.status) else 0
        else:
            body = _Body(len(into), into)
            size = body.size if await self._get(address, body, wait_s=wait_s) else 0
        if size != len(into):
            raise Malformed(f"{url} sent {size} bytes of {len(into)}", code="wrong_length")

    async def _fetch_raw(self, url: str, address: str, into: memoryview, *, within_s: float) -> ResponseHead | None:
        """Fetch through a raw connection; return the response head, `into` being filled for a 200 of that length.

        Returns None for a URL or response that needs aiohttp. The response must begin within `within_s`.
        """
        request = None if url in self._needs_aiohttp else RawRequest.for_url(address)
        if request is None:
            return None
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            connection = self._pool.acquire_idle(request)
            is_new = connection is None
            with _typed_errors(address):
                if connection is None:
                    async with asyncio.timeout(min(self._patience.connect_s, within_s)):
                        connection = await self._pool.connect(request)
                try:
                    await self._wait_for_response(connection, connection.send(request, into), deadline)
                finally:
                    self._pool.release(request, connection)
            if connection.is_unsupported:
                self._needs_aiohttp.add(url)
                return None
            if connection.is_whole:
                return connection.response
            if is_new or not connection.is_silent:  # a server may close a connection just as it is used again
                raise Unreachable(f"{address}: the connection was closed before the end of the answer")

    async def _wait_for_response(
        self, connection: RawConnection, finished: asyncio.Future[None], deadline: float
    ) -> None:
        """Wait for the end of a response within the limits."""
        loop, patience = asyncio.get_running_loop(), self._patience
        started, received = 0.0, -1
        async with asyncio.timeout_at(deadline) as timeout:
            while not finished.done():
                await asyncio.wait([finished], timeout=_PROGRESS_CHECK_S)
                if finished.done() or connection.response is None:
                    continue
                now = loop.time()
                started = started or now
                if connection.received > received:
                    received = connection.received
                    timeout.reschedule(min(now + patience.idle_s, started + patience.total_s))
                _refuse_slow(received, now - started, patience)

    async def _fetch_envelope(self, address: str) -> bytes:
        body = _Body(self._limits.max_manifest_bytes + _ENVELOPE_OVERHEAD_BYTES)
        if not await self._get(address, body):
            raise Malformed("response is empty where a manifest was requested", code="wrong_length")
        return bytes(body.grown)

    async def _get(self, address: str, body: _Body, *, wait_s: float = 0.0) -> bool:
        """Read the body of a 200 into `body`; return False for a 204, raise a typed error for anything else."""
        loop = asyncio.get_running_loop()
        with _typed_errors(address):
            async with asyncio.timeout(wait_s + self._patience.response_s) as deadline:
                async with self._open_session().get(address, allow_redirects=False) as response:
                    if not _has_body(address, response.status):
                        return False
                    await _read(response, body, self._patience, deadline, loop)
                    return True

    def _open_session(self) -> aiohttp.ClientSession:
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
    """At most `max_bytes` of a response body: in the caller's reused `buffer`, or in `grown`."""

    def __init__(self, max_bytes: int, buffer: memoryview | None = None) -> None:
        self.max_bytes, self.size, self.grown = max_bytes, 0, bytearray()
        self._buffer = buffer

    def add(self, piece: bytes) -> None:
        end = self.size + len(piece)
        if end > self.max_bytes:
            raise Malformed(f"response exceeds the limit of {self.max_bytes} bytes", code="oversized")
        if self._buffer is None:
            self.grown += piece
        else:
            self._buffer[self.size : end] = piece
        self.size = end


def _has_body(address: str, status: int) -> bool:
    """Return whether a response has a body: a 200 does, a 204 does not; raise NotServed otherwise."""
    if status == 503:
        raise NotServed(f"{address} does not have it yet", code="not_yet")
    if status not in {200, 204}:
        raise NotServed(f"{address} responds with status {status}", code="not_served")
    return status == 200


def _bounded_length(declared: int, max_bytes: int) -> int:
    if declared > max_bytes:
        raise Malformed(f"response declares {declared} bytes, limit {max_bytes}", code="oversized")
    return declared


def _refuse_slow(size: int, seconds: float, patience: TransportLimits) -> None:
    if size < patience.min_bytes_per_s * (seconds - patience.rate_grace_s):
        raise TooSlow(f"transfer rate of {size / seconds:.0f} bytes/s is below the minimum")


async def _read(
    response: aiohttp.ClientResponse,
    body: _Body,
    patience: TransportLimits,
    deadline: asyncio.Timeout,
    loop: asyncio.AbstractEventLoop,
) -> None:
    _bounded_length(response.content_length or 0, body.max_bytes)
    started = loop.time()
    deadline.reschedule(started + min(patience.idle_s, patience.total_s))
    async for piece in response.content.iter_any():
        body.add(piece)
        now = loop.time()
        _refuse_slow(body.size, now - started, patience)
        deadline.reschedule(min(now + patience.idle_s, started + patience.total_s))


@contextmanager
def _typed_errors(address: str) -> Iterator[None]:
    """Convert aiohttp's errors to ours, by whose fault they are."""
    try:
        yield
    except TimeoutError as error:
        raise TooSlow(f"{address} did not respond in time") from error
    except aiohttp.InvalidURL as error:  # usually supplied by others: a LocalFault would end the whole fetch
        raise Unreachable(f"{address} is not a URL") from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        raise Unreachable(f"{address}: {error or type(error).__name__}") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise Malformed(f"{address} does not speak HTTP: {error}") from error
