"""The worker's policies: follow the newest and keep those that may still be leased.

Every file was verified against the run's signature by `shardcast.client`. Work is derived from the manifest digest that
came with it, whatever a coordinator says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.client.http import Backoff, printable
from node.client.ssrf import not_nearer
from node.joining.session import RunSession
from node.policy.arrival import ArrivingPolicies
from node.protocol.messages import RelayList
from node.relay.advice import Serving, serving_url, source_url, sources_of
from node.runtime.signals import Stopped, race
from node.worker.events import NO_OBSERVER, EventKind, Observer
from shardcast import Client, Fetched, Head, ServedState, ServerLimits, VersionProgress
from shardcast.errors import NoVersionYet, ShardcastError
from shardcast.urls import valid_sources

log = logging.getLogger(__name__)

HEAD_WAIT_SECONDS = 30.0
NO_POLICY_PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class HeldPolicy:
    """A verified policy on disk; `path` exists while it is a whole file."""

    manifest_digest: str
    path: Path


def policy_client(session: RunSession, *, folder: Path, threads: int | None) -> Client:
    """Return the client of the run's policies, a context manager, which keeps in `folder` those that may be leased."""
    descriptor = session.descriptor
    return Client(
        session.join.run_id,
        session.run_key,
        valid_sources(descriptor.relays),
        folder,
        keep=descriptor.spec.batch.max_async + 1,
        rewind=descriptor.spec.batch.max_async + 1,
        threads=threads,
        reader=ArrivingPolicies(descriptor.spec.model.dtype),
        may_connect=not_nearer(lambda: session.client.reach),
    )


class PolicyFeed:
    """Downloads each new policy as it is announced, and sets `arrived` whenever one is complete."""

    def __init__(
        self, broadcast: Client, *, backoff: Backoff, arrived: asyncio.Event, observer: Observer = NO_OBSERVER
    ) -> None:
        self.downloading: tuple[int, VersionProgress | None] | None = None
        self._arrived = arrived
        self._broadcast, self._observer = broadcast, observer
        self._backoff = backoff
        self._held: dict[int, HeldPolicy] = {}
        self._away_since: float | None = None
        self._said_waiting = False
        self._advice = RelayList(relays=())
        self._sources_changed = asyncio.Event()

    def use_relays(self, advice: RelayList, *, own: str | None = None, last_resort: Iterable[str] = ()) -> None:
        """Fetch from these relays from now on (URLs already validated), except this node's `own`.

        `last_resort` are the operator's, for when those come to nothing.
        """
        if advice != self._advice:
            urls, stripes = sources_of(advice, own=own)
            self._broadcast.set_sources(urls, stripes=stripes, last_resort=last_resort)
            self._advice = advice
            self._sources_changed.set()

    async def serve(self, serving: Serving, limits: ServerLimits, contents: Mapping[str, ServedState]) -> str:
        """Serve fetched policies and `contents`, the run's datasets, to others; return the public URL."""
        port = await self._broadcast.serve(serving.host, serving.port, limits=limits, contents=contents)
        url = source_url(serving.public_url or serving_url(serving.host, port))
        log.info("serving policies at %s", url)
        return url

    def sources(self) -> list[dict[str, Any]]:
        """Return one row per source, with what it sends in bytes per second."""
        return self._broadcast.sources_status()

    @property
    def fetched(self) -> Fetched:
        """The bytes transferred since the start, and those of the policies."""
        return self._broadcast.fetched

    def status(self) -> dict[str, Any] | None:
        """Return what is being fetched and its progress, ready for JSON; None while nothing is."""
        if self.downloading is None:
            return None
        version, progress = self.downloading
        return {
            "version": version,
            "done_bytes": progress.done_bytes if progress else 0,
            "total_bytes": progress.total_bytes if progress else None,
            "bytes_per_s": round(progress.bytes_per_s) if progress else 0,
            "sources": progress.sources if progress else 0,
            "seconds_left": progress.seconds_left if progress else None,
        }

    def versions(self) -> tuple[int, ...]:
        """Return the versions on disk, newest first; the broadcast client deletes old ones."""
        self._held = {version: held for version, held in self._held.items() if self._broadcast.has(version)}
        return tuple(sorted(self._held, reverse=True))

    def get(self, version: int) -> HeldPolicy | None:
        """Return the policy of a version, None if it is not held."""
        return self._held.get(version)

    async def file(self, version: int) -> Path | None:
        """Return the whole file of a version, computed again where only a delta is kept; None if it is not held.

        Raises ShardcastError. The file stays until the next policy is here.
        """
        if (held := self._held.get(version)) is None:
            return None
        return await self._broadcast.fetch_archived(version, manifest_digest=held.manifest_digest)

    def drop(self, version: int) -> None:
        """Take no more work for a version, because this machine cannot load it."""
        self._held.pop(version, None)

    async def follow(self) -> None:
        """Fetch every new version, retrying forever; never returns."""
        newest, failures = -1, 0
        while True:
            self._sources_changed.clear()
            try:
                waiting = self._broadcast.wait_head(after=newest, timeout_s=HEAD_WAIT_SECONDS)
                head = await race(waiting, self._sources_changed)
                if head is not None:
                    await self._fetch(head)
                    newest = head.version
                self._note_back()
                failures = 0
            except NoVersionYet:
                if not self._said_waiting:
                    log.info("the run has no policy yet; waiting for the first")
                self._said_waiting = True
                await asyncio.sleep(NO_POLICY_PAUSE_SECONDS)
            except ShardcastError as error:
                failures += 1
                self._note_away(error)
                with contextlib.suppress(Stopped):
                    await race(asyncio.sleep(self._backoff.delay(failures)), self._sources_changed)
            except Stopped:
                continue
            finally:
                self.downloading = None

    async def _fetch(self, head: Head) -> None:
        started, before = time.monotonic(), self.fetched.bytes_in

        self.downloading = head.version, None
        self._observer.notify(EventKind.FETCHING, policy=head.version)
        with self._observer.fetching(head.version) as report:

            def note(progress: VersionProgress) -> None:
                self.downloading = head.version, progress
                if report is not None:
                    report(progress)

            path = await self._broadcast.fetch(head, progress=note)
        self._held[head.version] = HeldPolicy(manifest_digest=head.manifest_digest, path=path)
        size, got = path.stat().st_size, self.fetched.bytes_in - before
        seconds = time.monotonic() - started
        log.info(
            "policy %d is here: %.1f MB (%.1f MB transferred) in %.1f s", head.version, size / 1e6, got / 1e6, seconds
        )
        self._observer.notify(
            EventKind.FETCHED, policy=head.version, bytes=size, transferred_bytes=got, seconds=round(seconds, 3)
        )
        self._arrived.set()

    def _note_away(self, error: ShardcastError) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            if error.code == "no_sources":
                log.warning("the run has no relay yet, and no trainer that others can reach; retrying until it has")
            else:
                log.warning("no relay serves the newest policy (%s); retrying until one does", printable(str(error)))

    def _note_back(self) -> None:
        if self._away_since is not None:
            log.warning("relays serve again after %.0f s", time.monotonic() - self._away_since)
            self._away_since = None
