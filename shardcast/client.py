"""Fetching client: wait for a version and download it from several untrusted sources at once.

`<state_dir>/state.json` holds the highest version seen, so that a restart opens no way for a rollback. A file
`<state_dir>/versions/<version>-<digest16>.bin` was checked chunk by chunk before it got its name; `digest16` is the
start of the manifest digest (`shardcast.store.versions`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from shardcast.errors import (
    Equivocation,
    LocalFault,
    NotServed,
    NoVersionYet,
    PeerFault,
    ShardcastError,
    Stale,
    TooSlow,
)
from shardcast.fetch.download import DEFAULT_DOWNLOAD_LIMITS, DownloadLimits
from shardcast.fetch.fetcher import Fetched, Fetcher, VersionProgress
from shardcast.fetch.head_poll import HeadPoll
from shardcast.fetch.hedging import first_accepted
from shardcast.fetch.raw_http import MayConnect, anywhere
from shardcast.fetch.source import DEFAULT_SOURCE_LIMITS, SourceLimits
from shardcast.fetch.sources import Sources
from shardcast.fetch.transport import DEFAULT_TRANSPORT_LIMITS, Transport, TransportLimits
from shardcast.manifest import DEFAULT_LIMITS, Head, Limits, SignedManifest
from shardcast.serve.listener import DEFAULT_SERVER_LIMITS, Listener, ServerLimits, listen
from shardcast.serve.server import NO_CONTENTS, make_app
from shardcast.serve.state import Announced, ServedState
from shardcast.store.disk import RoomCheck
from shardcast.store.rewind import Rewinds
from shardcast.store.threads import threads_or_all
from shardcast.store.versions import KEPT_DELTAS, ResultReader, Store
from shardcast.trust import TrustedState, load_seen, save_fraud_proof, save_seen

logger = logging.getLogger(__name__)


class Client:
    """Client of one run, bound to one event loop; use `async with`, or call `close()`.

    Of the `keep` versions that were used last each is a whole file; with `rewind` only the newest `spare` and the last
    that was fetched are, and the others of that many newest ones are deltas back from it (`shardcast.store.rewind`)
    where those are smaller. `reader` is shown what is written of them. `threads` hash and apply deltas; None takes
    every core. `may_connect` decides which addresses it connects to, e.g. where strangers name the sources.
    """

    def __init__(
        self,
        run_id: str,
        publisher_key: bytes,
        sources: Iterable[str],
        state_dir: Path | str,
        *,
        keep: int = 3,
        rewind: int = 0,
        spare: int = 1,
        threads: int | None = None,
        poll_s: float = 10.0,
        reader: ResultReader | None = None,
        limits: Limits = DEFAULT_LIMITS,
        download_limits: DownloadLimits = DEFAULT_DOWNLOAD_LIMITS,
        source_limits: SourceLimits = DEFAULT_SOURCE_LIMITS,
        transport_limits: TransportLimits = DEFAULT_TRANSPORT_LIMITS,
        may_connect: MayConnect = anywhere,
        clock: Callable[[], float] = time.time,
    ) -> None:
        root = Path(state_dir)
        self._root, self._poll_s, self._clock = root, poll_s, clock
        self._sources = Sources(sources, limits=source_limits)
        self._transport = Transport(limits=limits, patience=transport_limits, may_connect=may_connect)
        self._store = Store(root, run_id=run_id, keep=keep, keep_deltas=rewind, limits=limits)
        self._store.reader = reader
        try:
            self._trust = TrustedState(
                run_id=run_id, publisher_key=publisher_key, limits=limits, seen=load_seen(root / "state.json")
            )
            self._rewinds: Rewinds | None = None
            if rewind:
                self._rewinds = Rewinds(self._store, keep=rewind, spare=spare, threads=threads_or_all(threads))
        except BaseException:
            self._store.close()
            raise
        self._room = RoomCheck(root, versions=1 + (spare if rewind else keep))
        self._fetcher = Fetcher(
            self._store,
            sources=self._sources,
            transport=self._transport,
            archived=self._archived,
            mirror_deltas=False,
            threads=threads,
            rewinds=self._rewinds,
            limits=download_limits,
        )
        self._saved_version = self._trust.version
        self._last_logged_code: dict[str, str] = {}
        self._heads = HeadPoll(self._sources, self._ask_head, poll_s=poll_s)
        self._served: ServedState | None = None
        self._listener: Listener | None = None
        self._shown: Announced | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._fetcher.close()
        if self._listener is not None:
            await self._listener.stop()
        await self._transport.close()
        self._store.close()

    async def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: ServerLimits = DEFAULT_SERVER_LIMITS,
        contents: Mapping[str, ServedState] = NO_CONTENTS,
    ) -> int:
        """Serve fetched data to others as a relay does, while it arrives; return the bound port.

        `contents` are served beside it, by digest.
        """
        app = make_app(self.offer(), limits, contents)
        self._listener = await listen(app, host=host, port=port, limits=limits)
        return self._listener.port

    def offer(self) -> ServedState:
        """Return what a server in this event loop offers of what is fetched, while it arrives.

        From now on deltas are fetched and kept as well.
        """
        served = ServedState(
            store=self._store,
            role="worker",
            run_id=self._trust.run_id,
            head=lambda: self._shown,
            upstreams=self.sources_status,
            fetched=self.fetched,
        )
        served.open()
        self._served, self._fetcher.mirror_deltas = served, True
        self._store.keep_deltas = max(KEPT_DELTAS, self._store.keep_deltas or 0)
        return served

    def _announce_if_held(self, signed: SignedManifest) -> None:
        """Announce the newest head to downstream peers once its manifest is held."""
        seen = self._trust.seen
        if self._served is not None and seen is not None and seen.manifest_digest == signed.digest:
            self._shown = Announced(seen.version, seen.head)
            self._served.announce()

    def set_sources(
        self, urls: Iterable[str], *, stripes: Iterable[Iterable[str]] = (), last_resort: Iterable[str] = ()
    ) -> None:
        """Replace the sources; those that stay keep their measurements.

        `stripes` lists the candidate URLs of each stripe, as planned by `shardcast.tree`; `last_resort` those that are
        asked where the others come to nothing, e.g. the operator's own.
        """
        self._sources.set_urls(urls, stripes=stripes, last_resort=last_resort)

    @property
    def fetched(self) -> Fetched:
        """Return the transfer counters since the start."""
        return self._fetcher.fetched

    def has(self, version: int) -> bool:
        """Return whether a version that was fetched can be had again without the network."""
        is_rewound = self._rewinds is not None and self._rewinds.has(version)
        return self._store.whole_result(version) is not None or is_rewound

    def manifest_digest(self, version: int) -> str | None:
        """Return the digest of the manifest held for a version, None without one."""
        held = self._store.get(version)
        return None if held is None else held.digest

    def drop(self, version: int) -> None:
        """Delete what is held of a version, so that it is fetched again."""
        self._store.drop(version)

    def sources_status(self) -> list[dict[str, Any]]:
        """Return one JSON-ready row per source: state, quarantine reason, success rate, bandwidth, bytes."""
        return self._sources.status(time.monotonic())

    # -- the newest head

    async def wait_head(self, after: int = -1, timeout_s: float = 30.0) -> Head | None:
        """Wait for a head whose version exceeds `after`; return None if none came within `timeout_s`.

        None means that some source showed a fresh head. Otherwise raises the most telling error: Equivocation, Stale if
        sources show only expired or older heads (a freeze), another PeerFault, or a NetworkFault.
        """
        return await self._heads.wait(after, timeout_s)

    async def _ask_head(self, url: str, after: int, wait_s: float) -> Head | ShardcastError:
        try:
            data = await self._transport.head(url, after=after, wait_s=wait_s)
            head = self._trust.accept_head(data, self._clock())
            self._last_logged_code.pop(url, None)
            self._sources.answered(url)
            if self._trust.version > self._saved_version:
                self._save_seen()
            elif self._shown is not None and self._trust.seen is not None and self._shown.version == head.version:
                # Re-signed head of the same version: pass it on, or downstream peers would see it expire.
                self._shown = Announced(head.version, self._trust.seen.head)
            return head
        except NoVersionYet as error:
            logger.debug("source %s: %s", url, error)
            return error
        except ShardcastError as error:
            self._note_failure(url, error)
            return error

    def _save_seen(self) -> None:
        if self._trust.seen is not None:
            save_seen(self._root / "state.json", self._trust.seen)
            self._saved_version = self._trust.version

    def _note_failure(self, url: str, error: ShardcastError) -> None:
        # Log a source's repeated fault once; numbers in the message may differ, so compare codes.
        level = logging.DEBUG if self._last_logged_code.get(url) == error.code else logging.WARNING
        self._last_logged_code[url] = error.code
        logger.log(level, "source %s: %s (%s)", url, error, error.code)
        if isinstance(error, Equivocation) and self._trust.fraud is not None:
            save_fraud_proof(self._root, self._trust.version, self._trust.fraud)
        # A lagging relay shows an old head in good faith; a local fault is not the source's.
        if not isinstance(error, Stale | LocalFault):
            self._sources.failed(url, error, time.monotonic())

    # -- versions

    async def fetch(
        self,
        target: Head | int,
        *,
        timeout_s: float | None = None,
        progress: Callable[[VersionProgress], None] | None = None,
    ) -> Path:
        """Fetch a version not older than the highest seen and return the path of its verified file.

        `target` is a head from `wait_head` or a version number. Raises Stale for an older version (rollback protection;
        use `fetch_archived`) and TooSlow after `timeout_s`; the next call resumes the partial download.
        """
        try:
            async with asyncio.timeout(timeout_s):
                version, digest = await self._resolve(target)
                signed = self._held(version, digest) or await self._manifest(
                    lambda url: self._transport.manifest(url, digest),
                    lambda data: self._trust.accept_manifest(data, self._clock(), digest),
                )
                return await self._complete(signed, progress)
        except TimeoutError as error:
            raise TooSlow(f"version not fetched within {timeout_s} s; the next fetch resumes it") from error

    async def fetch_archived(
        self,
        version: int,
        *,
        manifest_digest: str | None = None,
        timeout_s: float | None = None,
        progress: Callable[[VersionProgress], None] | None = None,
    ) -> Path:
        """Fetch an old version by number and return its verified file; age and order are not checked.

        Pass `manifest_digest` where it is known (from a lease or log entry); without it only the publisher's signature
        vouches for the version. Raises TooSlow after `timeout_s`; the next call resumes the partial download.
        """
        try:
            async with asyncio.timeout(timeout_s):
                held = None if manifest_digest is None else self._held(version, manifest_digest)
                return await self._complete(held or await self._archived(version, manifest_digest), progress)
        except TimeoutError as error:
            raise TooSlow(f"version not fetched within {timeout_s} s; the next fetch resumes it") from error

    async def _resolve(self, target: Head | int) -> tuple[int, str]:
        """Resolve `target` to (version, manifest digest) using the highest head seen; may wait for a newer head."""
        version = target if isinstance(target, int) else target.version
        if version < self._trust.version:
            raise Stale(
                f"version {version} is older than version {self._trust.version}, already seen; use fetch_archived",
                code="rollback",
            )
        if isinstance(target, Head):
            return version, target.manifest_digest
        if version > self._trust.version:
            await self.wait_head(after=version - 1, timeout_s=self._poll_s)
        seen = self._trust.seen
        if seen is None or seen.version != version:
            raise NotServed(f"version {version} is not the newest of any source", code="no_such_version")
        return version, seen.manifest_digest

    async def _manifest(
        self, request: Callable[[str], Awaitable[bytes]], accept: Callable[[bytes], SignedManifest]
    ) -> SignedManifest:
        """Request the manifest from the sources; return the first that `accept` validates."""

        async def ask(url: str) -> SignedManifest:
            return accept(await request(url))

        return await first_accepted(self._sources.by_promise(time.monotonic()), ask, failed=self._note_failure)

    async def _archived(self, version: int, manifest_digest: str | None = None) -> SignedManifest:
        return await self._manifest(
            lambda url: self._transport.version(url, version),
            lambda data: self._trust.accept_archived(data, version, expected_digest=manifest_digest),
        )

    def _held(self, version: int, manifest_digest: str) -> SignedManifest | None:
        """Return the held manifest if it has this digest, verified again: the store accepts any signer."""
        held = self._store.get(version)
        if held is None or held.digest != manifest_digest:
            return None
        try:
            return self._trust.accept_archived(held.envelope, version, expected_digest=manifest_digest)
        except PeerFault:
            self._store.drop(version)
            return None

    async def _complete(self, signed: SignedManifest, progress: Callable[[VersionProgress], None] | None) -> Path:
        await asyncio.to_thread(self._store.add_manifest, signed)
        self._room.note(signed.manifest.full.payload_bytes)
        self._announce_if_held(signed)
        return await self._fetcher.complete(signed, progress)
