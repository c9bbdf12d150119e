"""Upload of a file to the run's object store, at a presigned URL from its coordinator.

One PUT with length and SHA-256 in headers, only where the SSRF guard (`node.client.ssrf`) allows, without redirects;
only the status of the answer is used. No URL is logged or quoted in an error: its query is a credential.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from node.client.http import ExchangeLimits, describe, new_session, printable, read_pieces
from node.client.ssrf import Reach, SsrfBlocked, SsrfGuardResolver, reach_of
from node.errors import BadReply, StoreUnavailable

MAX_ANSWER_BYTES: Final = 64 * 1024
_WHO: Final = "The run's object store"


async def put_file(url: str, body: Path, *, body_bytes: int, sha256: str, least: Reach, limits: ExchangeLimits) -> None:
    """Upload once, within an upload's deadline; raises StoreUnavailable, or BadReply for a forbidden URL.

    `sha256` is hexadecimal; `least` is the nearest reach allowed.
    """
    target = _checked(url, least=least)
    seconds = limits.reply_seconds + body_bytes / limits.least_upload_bytes_per_second
    try:
        # Closed here: aiohttp does not close an aborted generator, and nobody closes a file whose opening is given up.
        with await asyncio.to_thread(body.open, "rb") as file:
            async with asyncio.timeout(seconds):
                status = await _put(target, file, body_bytes, sha256, least=least, limits=limits)
    except TimeoutError as error:
        raise StoreUnavailable(f"{_WHO} did not take the file within {seconds:.0f} s.") from error
    except SsrfBlocked as error:
        raise _too_near(str(error)) from error
    except aiohttp.InvalidURL:
        raise _no_url() from None
    except (aiohttp.ClientError, OSError) as error:
        # aiohttp's errors quote the URL, which a logged traceback would leak: hence `from None`.
        of_network = isinstance(error, aiohttp.ClientConnectorError) or not isinstance(error, aiohttp.ClientError)
        why = describe(error) if of_network else type(error).__name__
        raise StoreUnavailable(f"{_WHO} cannot be reached: {why}.") from None
    if not 200 <= status < 300:
        raise StoreUnavailable(f"{_WHO} does not take the file (HTTP {status}).")


async def _put(url: URL, file: BinaryIO, body_bytes: int, sha256: str, *, least: Reach, limits: ExchangeLimits) -> int:
    headers = {
        "Content-Length": str(body_bytes),
        "x-amz-checksum-sha256": base64.b64encode(bytes.fromhex(sha256)).decode(),
        "x-amz-sdk-checksum-algorithm": "SHA256",
    }
    async with (
        new_session(limits, SsrfGuardResolver(least)) as session,
        session.put(
            url,
            data=read_pieces(file) if body_bytes else None,
            headers=headers,
            skip_auto_headers=("Content-Type",),
            allow_redirects=False,
        ) as response,
    ):
        await response.content.read(MAX_ANSWER_BYTES)
        return response.status


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
    if reach is not None and reach < least:  # names are checked by the resolver
        raise _too_near(host)
    return URL(url, encoded=True)  # re-encoding would invalidate its signature


def _no_url() -> BadReply:
    return BadReply("The coordinator names something as its object store that is no URL.", code="bad_store_url")


def _too_near(host: str) -> BadReply:
    return BadReply(
        f"The coordinator names {printable(host)!r} as its object store, which is nearer to this machine than the "
        "coordinator is: it is not called.",
        code="store_too_near",
    )
