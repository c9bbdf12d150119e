"""Requests to hostile peers: every read has a byte limit, a deadline and a minimum rate.

There are no redirects, cookies, environment proxies or content encodings. The caller verifies what arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardcast.errors import Malformed, NotServed, NoVersionYet, TooSlow, Unreachable
from shardcast.fetch.raw_http import ConnectionPool, MayConnect, RawConnection, RawRequest, ResponseHead, anywhere
from shardcast.manifest import DEFAULT_LIMITS, KIB, Limits

_ENVELOPE_OVERHEAD_BYTES = 1024
_PROGRESS_CHECK_S = 0.25
"""How often a response's progress is compared with the limits."""


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

Progress = Callable[[int], None]
"""Called now and then with the bytes of the body received so far."""


class Transport:
    """HTTP client to any number of peers, bound to one event loop; close it there.

    `may_connect` decides which addresses it connects to.
    """

    def __init__(
        self,
        *,
        limits: Limits = DEFAULT_LIMITS,
        patience: TransportLimits = DEFAULT_TRANSPORT_LIMITS,
        may_connect: MayConnect = anywhere,
    ) -> None:
        self._limits = limits
        self._patience = patience
        self._pool = ConnectionPool(may_connect=may_connect)

    async def close(self) -> None:
        await self._pool.close()

    async def head(self, url: str, *, after: int, wait_s: float) -> bytes:
        """Fetch the peer's newest head, waiting up to `wait_s` for a version above `after`.

        On timeout the current head is returned all the same: its age is what reveals a freeze.
        """
        query = f"?wait={max(0.0, wait_s):.3f}" + (f"&after={after}" if after >= 0 else "")
        most = self._limits.max_head_bytes + _ENVELOPE_OVERHEAD_BYTES
        found = await self._get(f"{url}/v1/head{query}", most, wait_s=wait_s)
        if found is None:
            found = await self._get(f"{url}/v1/head", most)
        if found is None:
            raise NoVersionYet(f"{url} has no version yet")
        return found

    async def manifest(self, url: str, digest: str) -> bytes:
        return await self._fetch_envelope(f"{url}/v1/manifests/{digest}")

    async def version(self, url: str, version: int) -> bytes:
        """Fetch the manifest envelope of a version by number."""
        return await self._fetch_envelope(f"{url}/v1/versions/{version}")

    async def chunk(
        self, url: str, name: str, index: int, *, into: memoryview, wait_s: float, progress: Progress | None = None
    ) -> None:
        """Fill `into` with an unverified chunk of payload `name`, waiting up to `wait_s` for the peer to have it."""
        address = f"{url}/v1/payloads/{name}/{index}?wait={max(0.0, wait_s):.3f}"
        within_s = wait_s + self._patience.response_s
        response, _ = await self._request(address, into=into, within_s=within_s, progress=progress)
        size = _body_size(address, response, len(into))
        if size != len(into):
            raise Malformed(f"{url} sent {size or 0} bytes of {len(into)}", code="wrong_length")

    async def _fetch_envelope(self, address: str) -> bytes:
        body = await self._get(address, self._limits.max_manifest_bytes + _ENVELOPE_OVERHEAD_BYTES)
        if not body:
            raise Malformed("response is empty where a manifest was requested", code="wrong_length")
        return body

    async def _get(self, address: str, max_bytes: int, *, wait_s: float = 0.0) -> bytes | None:
        """Return the body of a 200, None for a 204; raise a typed error for anything else."""
        within_s = wait_s + self._patience.response_s
        response, body = await self._request(address, max_bytes=max_bytes, within_s=within_s)
        return None if _body_size(address, response, max_bytes) is None else bytes(body)

    async def _request(
        self,
        address: str,
        *,
        within_s: float,
        into: memoryview | None = None,
        max_bytes: int = 0,
        progress: Progress | None = None,
    ) -> tuple[ResponseHead | None, memoryview]:
        """Send a request and read its response, which must begin within `within_s`."""
        request = RawRequest.for_url(address)
        if request is None:  # usually supplied by others: a LocalFault would end the whole fetch
            raise Unreachable(f"{address} is not a URL")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while True:
            connection = self._pool.acquire_idle(request)
            is_new = connection is None
            with _typed_errors(address):
                if connection is None:
                    async with asyncio.timeout(min(self._patience.connect_s, within_s)):
                        connection = await self._pool.connect(request)
                try:
                    finished = connection.send(request, into=into, max_bytes=max_bytes)
                    await self._wait_for_response(connection, finished, deadline - loop.time(), progress)
                finally:
                    self._pool.release(request, connection)
            if connection.is_malformed:
                raise Malformed(f"{address} sent a response that is not read: not HTTP/1.1 with one Content-Length")
            if connection.is_whole:
                return connection.response, connection.take_body()
            if is_new or not connection.is_silent:  # a server may close a connection just as it is used again
                raise Unreachable(f"{address}: the connection was closed before the end of the response")

    async def _wait_for_response(
        self, connection: RawConnection, finished: asyncio.Future[None], within_s: float, progress: Progress | None
    ) -> None:
        """Wait for the end of a response within the limits; raises TimeoutError.

        The peer is held to time that was looked at: a pause of this process, however long, counts as two checks.
        """
        loop, patience = asyncio.get_running_loop(), self._patience
        left_s, transfer_s, received, checked = within_s, 0.0, -1, loop.time()
        while not finished.done():
            await asyncio.wait([finished], timeout=max(0.0, min(_PROGRESS_CHECK_S, left_s)))
            now = loop.time()
            passed_s, checked = min(now - checked, 2 * _PROGRESS_CHECK_S), now
            left_s -= passed_s
            if connection.response is not None and not finished.done():
                transfer_s += passed_s
                if connection.received > received:
                    received = connection.received
                    left_s = min(patience.idle_s, patience.total_s - transfer_s)
                    if progress is not None:
                        progress(received)
                _refuse_slow(received, transfer_s, patience)
            if left_s <= 0 and not finished.done():
                raise TimeoutError


def _body_size(address: str, response: ResponseHead | None, max_bytes: int) -> int | None:
    """Return the size in bytes of a 200's body, None for a 204; raise NotServed or Malformed otherwise."""
    assert response is not None
    if response.status == 503:
        raise NotServed(f"{address} does not have it yet", code="not_yet")
    if response.status == 404:
        why = "it is no longer kept there, or this is no origin and no relay"
        raise NotServed(f"{address} is not there (status 404): {why}", code="not_served")
    if response.status not in {200, 204}:
        raise NotServed(f"{address} responds with status {response.status}", code="not_served")
    if response.length > max_bytes:
        raise Malformed(f"response declares {response.length} bytes, limit {max_bytes}", code="oversized")
    return response.length if response.status == 200 else None


def _refuse_slow(size: int, seconds: float, patience: TransportLimits) -> None:
    if size < patience.min_bytes_per_s * (seconds - patience.rate_grace_s):
        raise TooSlow(f"transfer rate of {size / seconds:.0f} bytes/s is below the minimum")


@contextmanager
def _typed_errors(address: str) -> Iterator[None]:
    """Convert the network's errors to ours."""
    try:
        yield
    except TimeoutError as error:
        raise TooSlow(f"{address} did not respond in time") from error
    except (OSError, UnicodeError) as error:  # a host name's label may be too long to encode
        raise Unreachable(f"{address}: {error or type(error).__name__}") from error
