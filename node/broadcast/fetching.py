"""`swarmproof fetch`: fetch the newest version from untrusted sources, and place its file.

The state folder keeps the last version for deltas, partial downloads, and the newest version ever seen.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from node.client.http import Backoff, printable
from node.errors import ConfigError
from node.runtime.signals import race
from shardcast import Client, Report
from shardcast.errors import Equivocation, NetworkFault, PeerFault, ShardcastError
from shardcast.files import as_local_fault, sync_folder
from shardcast.manifest import Head

log = logging.getLogger(__name__)

KEEP_VERSIONS = 1
ANSWER_SECONDS = 5.0
SECOND_LOOK_SECONDS = 0.5
"""Extra time for the other sources to announce a newer version than the first answer's."""
FOLLOW_SECONDS = 10.0
FOLLOW_BACKOFF = Backoff()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """Settings of a fetch; `output` None leaves the file in the state folder."""

    sources: tuple[str, ...]
    run_id: str
    publisher_key: bytes
    state: Path
    output: Path | None = None
    follow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedVersion:
    """A fetched version; `way` says whether it was held already, or fetched by deltas or in full."""

    version: int
    manifest_digest: str
    path: str
    size_bytes: int
    transferred_bytes: int
    way: Literal["held", "delta", "full"]
    seconds: float


class View(Protocol):
    """Observer of fetches (`node.broadcast.view`)."""

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Context manager around one fetch; yields its progress callback."""

    def here(self, result: FetchedVersion) -> None:
        """Report a version that is in place."""


async def run_fetch(settings: FetchSettings, *, view: View, stop: asyncio.Event) -> None:
    """Fetch the newest version, or with `follow` every one; raises Stopped once `stop` is set, or ShardcastError."""
    if settings.output is not None and not settings.output.parent.is_dir():
        raise ConfigError(f"There is no folder {settings.output.parent}; make it, or name another with -o.")
    async with Client(
        settings.run_id, settings.publisher_key, settings.sources, settings.state, keep=KEEP_VERSIONS
    ) as client:
        if settings.follow:
            await _follow(client, settings, view, stop)
        else:
            await _get(client, await race(_newest(client, settings), stop), settings, view, stop)


async def _newest(client: Client, settings: FetchSettings) -> Head:
    head = await client.wait_head(timeout_s=ANSWER_SECONDS)
    assert head is not None, "every version is above -1"
    if len(settings.sources) > 1:
        try:
            return await client.wait_head(after=head.version, timeout_s=SECOND_LOOK_SECONDS) or head
        except Equivocation:
            raise
        except ShardcastError as error:
            log.debug("no second look: %s", error)
    return head


async def _follow(client: Client, settings: FetchSettings, view: View, stop: asyncio.Event) -> None:
    """Fetch every new version; after the first one, retry transient faults and invalid data."""
    newest, failures = -1, 0
    while True:
        try:
            head = await race(client.wait_head(after=newest, timeout_s=FOLLOW_SECONDS), stop)
            if head is not None:
                await _get(client, head, settings, view, stop)
                newest = head.version
            failures = 0
        except (NetworkFault, PeerFault) as error:
            if isinstance(error, Equivocation) or (isinstance(error, PeerFault) and newest < 0):
                raise
            if not failures:
                log.warning("waiting for a source (%s)", printable(str(error)))
            failures += 1
            await race(asyncio.sleep(FOLLOW_BACKOFF.delay(failures)), stop)


async def _get(client: Client, head: Head, settings: FetchSettings, view: View, stop: asyncio.Event) -> None:
    started, before = time.monotonic(), replace(client.fetched)
    with view.fetching(head.version) as report:
        path = await race(client.fetch(head, progress=report), stop)
    if settings.output is not None:
        # Not cancellable, so that the output is whole or untouched.
        await asyncio.to_thread(place, path, settings.output)
    after = client.fetched
    view.here(
        FetchedVersion(
            version=head.version,
            manifest_digest=head.manifest_digest,
            path=str(settings.output or path),
            size_bytes=path.stat().st_size,
            transferred_bytes=after.bytes_in - before.bytes_in,
            way="full" if after.in_full > before.in_full else "delta" if after.by_delta > before.by_delta else "held",
            seconds=round(time.monotonic() - started, 3),
        )
    )


def place(source: Path, target: Path) -> None:
    """Replace `target` atomically with a copy of `source`; raises LocalFault.

    A copy and not a hard link, so that edits of the output do not reach the state folder. Filesystems with
    reflinks share the blocks.
    """
    temporary = target.with_name(f".{target.name[:32]}.{secrets.token_hex(4)}")
    try:
        try:
            _copy(source, temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
    except OSError as error:
        raise as_local_fault(error, target) from error


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("xb") as write:
        try:
            while os.copy_file_range(read.fileno(), write.fileno(), 2**30):
                pass
        except OSError as error:
            if write.tell():
                raise
            log.debug("not copied by the kernel: %s", error)
            shutil.copyfileobj(read, write, 2**20)
        write.flush()
        os.fsync(write.fileno())
