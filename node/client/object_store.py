"""Putting a file into the object store of a run, at a URL that its coordinator named.

The request is always the same: one PUT of one file, with its length and its SHA-256 in headers. It goes only where
`node.client.ssrf` lets it, no redirect is followed, nothing of the answer is used but its status, and no URL is logged
or put into an error: its query is as good as a password.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from node.client.http import ExchangeLimits, describe, printable
from node.client.ssrf import FarResolver, Reach, TooNear, reach_of
from node.errors import BadReply, UploadStoreAway

MAX_ANSWER_BYTES: Final = 64 * 1024
_PIECE_BYTES: Final = 256 * 1024
_WHO: Final = "The run's object store"


async def put_into_store(
    url: str, body: Path, *, body_bytes: int, sha256: str, least: Reach, limits: ExchangeLimits
) -> None:
    """One attempt; raises UploadStoreAway, and BadReply for a URL that is not to be called.

    `sha256` is hexadecimal; `least` is how far the store has to be away. The deadline is that of an upload.
    """
    target = _checked(url, least=least)
    seconds = limits.reply_seconds + body_bytes / limits.least_upload_bytes_per_second
    try:
        async with asyncio.timeout(seconds):
            status = await _put(target, body, body_bytes, sha256, least=least, limits=limits)
    except TimeoutError as error:
        raise UploadStoreAway(f"{_WHO} did not take the file within {seconds:.0f} s.") from error
    except TooNear as error:
        raise _too_near(str(error)) from error
    except aiohttp.InvalidURL:
        raise _no_url() from None
    except (aiohttp.ClientError, OSError) as error:
        # aiohttp's own errors quote the URL, and whoever logs a traceback would log it.
        of_network = isinstance(error, aiohttp.ClientConnectorError) or not isinstance(error, aiohttp.ClientError)
        why = describe(error) if of_network else type(error).__name__
        raise UploadStoreAway(f"{_WHO} cannot be reached: {why}.") from None
    if not 200 <= status < 300:
        raise UploadStoreAway(f"{_WHO} does not take the file (HTTP {status}).")


async def _put(url: URL, body: Path, body_bytes: int, sha256: str, *, least: Reach, limits: ExchangeLimits) -> int:
    headers = {
        "Content-Length": str(body_bytes),
        "x-amz-checksum-sha256": base64.b64encode(bytes.fromhex(sha256)).decode(),
        "x-amz-sdk-checksum-algorithm": "SHA256",
    }
    connector = aiohttp.TCPConnector(resolver=FarResolver(least), use_dns_cache=False)
    file = await asyncio.to_thread(body.open, "rb")
    try:
        async with (
            aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers={"Accept-Encoding": "identity", "User-Agent": "swarmproof"},
                skip_auto_headers=("Content-Type",),
            ) as session,
            session.put(
                url, data=_pieces(file) if body_bytes else None, headers=headers, allow_redirects=False
            ) as response,
        ):
            await response.content.read(MAX_ANSWER_BYTES)
            return response.status
    finally:
        file.close()


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


def _checked(url: str, *, least: Reach) -> URL:
    try:
        parts = urlsplit(url)
        host, sound = parts.hostname or "", parts.scheme in {"http", "https"} and parts.port != 0
    except ValueError:
        host, sound = "", False
    if (
        not (sound and host and url.isascii() and url.isprintable())
        or parts.username
        or parts.password
        or parts.fragment
    ):
        raise _no_url()
    reach = reach_of(host)
    if reach is not None and reach < least:  # a name is looked at when it is resolved
        raise _too_near(host)
    return URL(url, encoded=True)  # as it was signed


def _no_url() -> BadReply:
    return BadReply("The coordinator names something as its object store that is no URL.", code="bad_store_url")


def _too_near(host: str) -> BadReply:
    return BadReply(
        f"The coordinator names {printable(host)!r} as its object store, which is nearer to this machine than the "
        "coordinator is: it is not called.",
        code="store_too_near",
    )
