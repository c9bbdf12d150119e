"""Relay: follow upstreams, verify mirror_deltas before it is visible, and serve it downstream at once.

A new head is shown as soon as its manifest is verified; requests for chunks still on their way wait for them. Nobody
trusts a relay and it trusts no upstream: it forwards the publisher's envelopes byte for byte. When every upstream is
away it serves what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from shardcast.errors import Equivocation, LocalFault, NoVersionYet, PeerFault, ShardcastError, Stale
from shardcast.fetch.download import DEFAULT_DOWNLOAD_LIMITS, DownloadLimits
from shardcast.fetch.fetcher import Fetcher, Watch, no_watch
from shardcast.fetch.hedging import first_accepted
from shardcast.fetch.raw_http import MayConnect, anywhere
from shardcast.fetch.source import DEFAULT_SOURCE_LIMITS, SourceLimits
from shardcast.fetch.sources import Sources
from shardcast.fetch.transport import DEFAULT_TRANSPORT_LIMITS, Transport, TransportLimits
from shardcast.manifest import DEFAULT_LIMITS, Head, Limits, SignedManifest, open_head
from shardcast.serve.listener import DEFAULT_SERVER_LIMITS, Listener, ServerLimits, listen
from shardcast.serve.server import NO_CONTENTS, make_app
from shardcast.serve.state import Announced, ServedState
from shardcast.store.disk import RoomCheck
from shardcast.store.versions import KEPT_DELTAS, Store
from shardcast.trust import TrustedState, load_seen, save_fraud_proof, save_seen

logger = logging.getLogger(__name__)


class Relay:
    """A relay of one run. `start` binds and begins to follow, `stop` ends both; `watch` observes downloads."""

    def __init__(
        self,
        upstreams: Iterable[str],
        *,
        store_dir: Path | str,
        run_id: str,
        publisher_key: bytes,
        keep: int | None = 3,
        keep_deltas: int = KEPT_DELTAS,
        quota_bytes: int | None = None,
        threads: int | None = None,
        poll_s: float = 5.0,
        limits: Limits = DEFAULT_LIMITS,
        download_limits: DownloadLimits = DEFAULT_DOWNLOAD_LIMITS,
        source_limits: SourceLimits = DEFAULT_SOURCE_LIMITS,
        transport_limits: TransportLimits = DEFAULT_TRANSPORT_LIMITS,
        server_limits: ServerLimits = DEFAULT_SERVER_LIMITS,
        watch: Watch = no_watch,
        may_connect: MayConnect = anywhere,
        clock: Callable[[], float] = time.time,
    ) -> None:
        root = Path(store_dir)
        self._root, self._state_path, self._poll_s, self._clock = root, root / "state.json", poll_s, clock
        self._server_limits, self._watch_fetch = server_limits, watch
        self._sources = Sources(upstreams, limits=source_limits)
        self._transport = Transport(limits=limits, patience=transport_limits, may_connect=may_connect)
        self._store = Store(
            root,
            run_id=run_id,
            keep=keep,
            keep_deltas=keep_deltas,
            keep_base=True,
            quota_bytes=quota_bytes,
            limits=limits,
        )
        try:
            self._trust = TrustedState(
                run_id=run_id, publisher_key=publisher_key, limits=limits, seen=load_seen(self._state_path)
            )
        except LocalFault:
            self._store.close()
            raise
        self._room = RoomCheck(root, versions=2 if keep is None else keep + 1, quota_bytes=quota_bytes)
        self._fetcher = Fetcher(
            self._store,
            sources=self._sources,
            transport=self._transport,
            archived=self._archived,
            mirror_deltas=True,
            threads=threads,
            limits=download_limits,
        )
        self._saved_version = self._trust.version
        self._shown: tuple[Head, bytes] | None = None
        self._adopting = asyncio.Lock()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._downloads: dict[int, asyncio.Task[None]] = {}
        self._completed = set[int]()
        self._listener: Listener | None = None
        self._served = ServedState(
            store=self._store,
            role="relay",
            run_id=run_id,
            head=self._head,
            upstreams=self.upstreams,
            fetched=self._fetcher.fetched,
        )

    async def start(
        self, host: str = "127.0.0.1", port: int = 0, *, contents: Mapping[str, ServedState] = NO_CONTENTS
    ) -> int:
        """Serve what is held and `contents` by digest, follow the upstreams, and return the bound port."""
        self._show_remembered_head()
        self._served.open()
        self._listener = await listen(
            make_app(self._served, self._server_limits, contents), host=host, port=port, limits=self._server_limits
        )
        self._resume_downloads()
        self._watch_upstreams()
        return self._listener.port

    async def stop(self) -> None:
        """Cancel every task and close every connection; verified data stays on disk."""
        tasks = [*self._watchers.values(), *self._downloads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetcher.close()
        if self._listener is not None:
            await self._listener.stop()
        await self._transport.close()
        self._store.close()

    def upstreams(self) -> list[dict[str, object]]:
        """Return one row per upstream: state, quarantine reason, success rate, bandwidth, bytes."""
        return self._sources.status(time.monotonic())

    def set_upstreams(
        self, urls: Iterable[str], *, stripes: Iterable[Iterable[str]] = (), last_resort: Iterable[str] = ()
    ) -> None:
        """Replace the upstreams; those that stay keep their measurements.

        `stripes` lists the candidate URLs of each stripe, as planned by `shardcast.tree`; `last_resort` those that are
        asked where the others come to nothing.
        """
        self._sources.set_urls(urls, stripes=stripes, last_resort=last_resort)
        for url in [url for url in self._watchers if url not in self._sources.urls]:
            self._watchers.pop(url).cancel()
        self._watch_upstreams()

    def newest_whole(self) -> int | None:
        """Return the newest version held in full; None before the first."""
        return next((signed.manifest.version for signed, _ in self._store.whole_results()), None)

    # -- heads

    def _head(self) -> Announced | None:
        return None if self._shown is None else Announced(self._shown[0].version, self._shown[1])

    def _show_remembered_head(self) -> None:
        """Show the last head again after a restart; readers judge its age themselves."""
        seen = self._trust.seen
        if seen is None or self._store.by_digest(seen.manifest_digest) is None:
            return
        with contextlib.suppress(PeerFault):  # signed by a key the run no longer uses
            head = open_head(seen.head, run_id=self._trust.run_id, publisher_key=self._trust.publisher_key)
            self._shown = (head, seen.head)

    def _watch_upstreams(self) -> None:
        for url in self._sources.urls:
            if url not in self._watchers:
                self._watchers[url] = asyncio.create_task(self._watch(url))

    async def _watch(self, url: str) -> None:
        idle_polls = 0
        while True:
            polled_at = time.monotonic()
            progressed = failed = False
            try:
                progressed = await self._poll(url)
            except NoVersionYet as error:
                logger.debug("upstream %s: %s", url, error)
            except ShardcastError as error:
                failed = True
                self._note_failure(url, error)
            self._resume_downloads()
            # A peer that answers a long poll at once without news must not make this loop spin.
            if progressed or not (failed or time.monotonic() - polled_at < self._poll_s / 2):
                idle_polls = 0
                continue
            idle_polls = min(idle_polls + 1, 16)
            await asyncio.sleep(min(self._poll_s, 0.05 * 2**idle_polls) * random.uniform(0.5, 1.5))

    def _note_failure(self, url: str, error: ShardcastError) -> None:
        logger.warning("upstream %s: %s (%s)", url, error, error.code)
        if isinstance(error, Equivocation) and self._trust.fraud is not None:
            save_fraud_proof(self._root, self._trust.version, self._trust.fraud)
        # A relay that lags shows an old head in good faith, and a full disk here is not the peer's doing.
        if not isinstance(error, Stale | LocalFault):
            self._sources.failed(url, error, time.monotonic())

    async def _poll(self, url: str) -> bool:
        """Poll once for a newer head; return whether one was adopted."""
        shown_version = -1 if self._shown is None else self._shown[0].version
        data = await self._transport.head(url, after=shown_version, wait_s=self._poll_s)
        self._sources.answered(url)
        self._served.traffic.bytes_in += len(data)
        async with self._adopting:
            return await self._adopt(url, data)

    async def _adopt(self, url: str, data: bytes) -> bool:
        """Show a newer head once its manifest is held; whoever showed it first need not send the manifest."""
        head = self._trust.accept_head(data, self._clock())
        if self._trust.version > self._saved_version and self._trust.seen is not None:
            await asyncio.to_thread(save_seen, self._state_path, self._trust.seen)
            self._saved_version = self._trust.version
        if self._shown is not None and self._shown[0].version == head.version:
            if head.issued_at > self._shown[0].issued_at:
                self._shown = (head, data)
            return False
        if self._store.by_digest(head.manifest_digest) is None:
            signed = await self._manifest(url, head.manifest_digest)
            await asyncio.to_thread(self._store.add_manifest, signed)
        self._shown = (head, data)
        self._served.announce()
        return True

    async def _manifest(self, shown_by: str, digest: str) -> SignedManifest:
        """Fetch the manifest of a head, first from the upstream that showed it."""

        async def ask(url: str) -> SignedManifest:
            envelope = await self._transport.manifest(url, digest)
            self._served.traffic.bytes_in += len(envelope)
            return self._trust.accept_manifest(envelope, self._clock(), digest)

        others = (url for url in self._sources.usable(time.monotonic()) if url != shown_by)
        return await first_accepted((shown_by, *others), ask, failed=self._note_failure)

    # -- chunks

    def _resume_downloads(self) -> None:
        """Keep one download per held version that lacks chunks; cancel those of dropped versions."""
        for version, task in list(self._downloads.items()):
            if task.done() or self._store.get(version) is None:
                task.cancel()
                del self._downloads[version]
        held = self._store.versions()
        for signed in held:
            version = signed.manifest.version
            # Complete the newest version; of older ones only what was begun.
            unknown = signed is held[-1] and version not in self._completed
            if version not in self._downloads and (unknown or not self._store.is_whole(version)):
                self._downloads[version] = asyncio.create_task(self._download(signed))

    async def _download(self, signed: SignedManifest) -> None:
        version = signed.manifest.version
        try:
            await asyncio.to_thread(self._store.add_manifest, signed)
            self._room.note(signed.manifest.full.payload_bytes)
            with self._watch_fetch(version) as report:
                await self._fetcher.complete(signed, report)
            self._completed.add(version)
            logger.info("version %d fetched completely", version)
        except ShardcastError as error:  # the watchers retry it
            logger.warning("version %d not fetched completely: %s (%s); will retry", version, error, error.code)

    async def _archived(self, version: int) -> SignedManifest:
        """Fetch the manifest of an old version from the first upstream that has it."""

        async def ask(url: str) -> SignedManifest:
            return self._trust.accept_archived(await self._transport.version(url, version), version)

        return await first_accepted(self._sources.usable(time.monotonic()), ask, failed=self._note_failure)
