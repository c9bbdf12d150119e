"""Content: files named by the digests of their bytes, which travel beside a run's versions and never change.

A digest alone does not tell a bad chunk from a good one before the whole file is here. So each file is the only version
of a line of its own: the run's key signs its manifest for an id that is derived from the run's id and the digest, and
it is served below `/content/{digest}` by whoever serves the run. Manifests, chunks, sources and quarantine are those of
versions; heads, deltas and expiry are not needed, as there is nothing newer to wait for.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast.client import Client
from shardcast.errors import LocalFault, Malformed
from shardcast.fetch.raw_http import MayConnect, anywhere
from shardcast.files import as_local_fault
from shardcast.manifest import Limits
from shardcast.origin import DeltaSettings, Origin
from shardcast.serve.server import content_path
from shardcast.serve.state import ServedState
from shardcast.wire import derive

CONTENT_VERSION = 0
MANIFEST_LIFETIME_S = 10 * 365 * 86400


def content_line(run_id: str, digest: str) -> str:
    """Return the id that the manifest of content `digest` names in place of `run_id`."""
    return derive("shardcast/1 content", bytes.fromhex(run_id), bytes.fromhex(digest)).hex()


def file_digest(path: Path) -> str:
    """Return the BLAKE3 digest of a file; raises LocalFault."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, blake3).hexdigest()  # type: ignore[arg-type]  # lacks what is not used
    except OSError as error:
        raise as_local_fault(error, path) from error


def publish_content(
    path: Path,
    *,
    digest: str,
    folder: Path,
    key: Ed25519PrivateKey,
    run_id: str,
    name: str | None = None,
    threads: int | None = None,
) -> Origin:
    """Sign the file at `path` as content of run `run_id`; idempotent. Serve it with `OriginServer(contents=...)`.

    `folder` keeps a copy; the log calls it `name`. Raises LocalFault, with code "wrong_content" if the file's digest is
    another.
    """
    if file_digest(path) != digest:
        raise LocalFault(f"{path} is not the file with digest {digest[:16]}…", code="wrong_content")
    origin = Origin(
        folder / digest,
        key,
        content_line(run_id, digest),
        manifest_lifetime_s=MANIFEST_LIFETIME_S,
        deltas=DeltaSettings(enabled=False),
        content_name=name or f"content {digest[:16]}…",
        threads=threads,
    )
    try:
        origin.publish(path, version=CONTENT_VERSION)
    except BaseException:
        origin.close()
        raise
    return origin


class ContentClient:
    """Client of one file, bound to one event loop; use `async with`, or call `close()`.

    Args: `size_bytes` is the file's size, which bounds what is downloaded; `sources` are those of the run. Verified
    bytes are kept in a folder of the file's own below `folder`.
    """

    def __init__(
        self,
        digest: str,
        *,
        size_bytes: int,
        run_id: str,
        publisher_key: bytes,
        sources: Iterable[str],
        folder: Path,
        threads: int | None = None,
        may_connect: MayConnect = anywhere,
    ) -> None:
        self.digest, self.size_bytes = digest, size_bytes
        self._client = Client(
            content_line(run_id, digest),
            publisher_key,
            [self._url(url) for url in sources],
            folder / digest,
            keep=1,
            threads=threads,
            limits=Limits(max_payload_bytes=size_bytes),
            may_connect=may_connect,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    def set_sources(
        self, urls: Iterable[str], *, stripes: Iterable[Iterable[str]] = (), last_resort: Iterable[str] = ()
    ) -> None:
        """Replace the sources, which are those of the run, as `Client.set_sources` does."""
        self._client.set_sources(
            map(self._url, urls),
            stripes=[[self._url(url) for url in stripe] for stripe in stripes],
            last_resort=map(self._url, last_resort),
        )

    def offer(self) -> ServedState:
        """Return what a relay serves of this file, while it arrives, for the `contents` of its server."""
        return self._client.offer()

    async def fetch(self, *, timeout_s: float | None = None) -> Path:
        """Fetch the file unless it is held, verify its digest, and return its path.

        Raises ShardcastError: Malformed "wrong_content" where the run's key signed another file for this digest.
        """
        path = await self._fetch(timeout_s)
        if not await asyncio.to_thread(self._is_right, path):
            self._client.drop(CONTENT_VERSION)  # damaged on this disk, perhaps
            path = await self._fetch(timeout_s)
            if not await asyncio.to_thread(self._is_right, path):
                self._client.drop(CONTENT_VERSION)
                raise Malformed(f"the run's key signed another file as {self.digest[:16]}…", code="wrong_content")
        return path

    async def _fetch(self, timeout_s: float | None) -> Path:
        held = self._client.manifest_digest(CONTENT_VERSION)
        return await self._client.fetch_archived(CONTENT_VERSION, manifest_digest=held, timeout_s=timeout_s)

    def _is_right(self, path: Path) -> bool:
        """Return whether `path` is the file; one that somebody has removed is not. Raises LocalFault."""
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError:
            return False
        except OSError as error:
            raise as_local_fault(error, path) from error
        return size_bytes == self.size_bytes and file_digest(path) == self.digest

    def _url(self, source: str) -> str:
        return source + content_path(self.digest)
