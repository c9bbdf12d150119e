"""The fetching end: wait for a version, get it from several sources at once, trust none of them.

`<state_dir>/state.json` holds the highest version seen, so that a restart opens no way for a rollback. A file
`<state_dir>/versions/<version>-<digest16>.bin` was checked chunk by chunk before it got its name, whose second half
begins the manifest digest (`shardcast.store`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardcast.board import Announced, Board
from shardcast.download import DEFAULT_DOWNLOAD_LIMITS, DownloadLimits
from shardcast.errors import (
    Equivocation,
    LocalFault,
    NotServed,
    NoVersionYet,
    PeerFault,
    ShardcastError,
    Stale,
    TooSlow,
    Unreachable,
)
from shardcast.fetching import Fetched, Fetcher, Progress
from shardcast.listener import DEFAULT_SERVER_LIMITS, Listener, ServerLimits, listen
from shardcast.manifest import DEFAULT_LIMITS, Head, Limits, SignedManifest
from shardcast.server import make_app
from shardcast.sources import DEFAULT_SOURCE_LIMITS, SourceLimits, Sources
from shardcast.store import KEPT_DELTAS, Store
from shardcast.transport import DEFAULT_TRANSPORT_LIMITS, Transport, TransportLimits
from shardcast.trust import TrustedState, load_seen, save_fraud_proof, save_seen

logger = logging.getLogger(__name__)

HEAD_SOURCES = 3
"""How many sources are asked for the newest head at once: one alone could withhold it."""


class Client:
    """One consumer of one run, for one event loop; `async with`, or `close()` at the end."""

    def __init__(
        self,
        run_id: str,
        publisher_key: bytes,
        sources: Iterable[str],
        state_dir: Path | str,
        *,
        keep: int = 3,
        poll_s: float = 10.0,
        limits: Limits = DEFAULT_LIMITS,
        download_limits: DownloadLimits = DEFAULT_DOWNLOAD_LIMITS,
        source_limits: SourceLimits = DEFAULT_SOURCE_LIMITS,
        transport_limits: TransportLimits = DEFAULT_TRANSPORT_LIMITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        root = Path(state_dir)
        self._root, self._poll_s, self._clock = root, poll_s, clock
        self._sources = Sources(sources, limits=source_limits)
        self._transport = Transport(limits=limits, patience=transport_limits)
        self._store = Store(root, run_id=run_id, keep=keep, keep_deltas=0, limits=limits)
        try:
            self._trust = TrustedState(
                run_id=run_id, publisher_key=publisher_key, limits=limits, seen=load_seen(root / "state.json")
            )
        except BaseException:
            self._store.close()
            raise
        self._fetcher = Fetcher(
            self._store,
            sources=self._sources,
            transport=self._transport,
            archived=self._archived,
            everything=False,
            limits=download_limits,
        )
        self._said: dict[str, str] = {}
        self._board: Board | None = None
        self._listener: Listener | None = None
        self._shown: Announced | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._fetcher.close()
        if self._listener is not None:
            await self._listener.stop()
        await self._transport.close()
        self._store.close()

    async def serve(
        self, host: str = "127.0.0.1", port: int = 0, *, limits: ServerLimits = DEFAULT_SERVER_LIMITS
    ) -> int:
        """Serve others what is fetched from now on, while it arrives, as a relay does; returns the bound port.

        Deltas are then fetched and kept for others, too.
        """
        board = Board(
            store=self._store,
            role="worker",
            run_id=self._trust.run_id,
            head=lambda: self._shown,
            upstreams=self.sources_status,
            fetched=self.fetched,
        )
        board.open()
        self._board, self._fetcher.everything = board, True
        self._store.keep_deltas = KEPT_DELTAS
        self._listener = await listen(make_app(board, limits), host=host, port=port, limits=limits)
        return self._listener.port

    def _show(self, signed: SignedManifest) -> None:
        """Show the newest head to those who are served here, once its manifest is here."""
        seen = self._trust.seen
        if self._board is not None and seen is not None and seen.manifest_digest == signed.digest:
            self._shown = Announced(seen.version, seen.head)
            self._board.announce()

    @property
    def highest_seen(self) -> int:
        """The highest version this client has ever seen a valid head for; -1 before the first."""
        return self._trust.version

    def set_sources(self, urls: Iterable[str], *, stripes: Iterable[Iterable[str]] = ()) -> None:
        """Fetch from these from now on; those that stay keep their measurements.

        `stripes` has the candidates for each stripe, as `shardcast.tree` plans them.
        """
        self._sources.set_urls(urls, stripes=stripes)

    @property
    def fetched(self) -> Fetched:
        """What was transferred since the start, and how."""
        return self._fetcher.fetched

    def sources_status(self) -> list[dict[str, Any]]:
        """One JSON-ready row per source: state, reason of a quarantine, success, bandwidth, bytes."""
        return self._sources.status(time.monotonic())

    # -- the newest head

    async def wait_head(self, after: int = -1, timeout_s: float = 30.0) -> Head | None:
        """The newest head once its version exceeds `after`; None if in `timeout_s` there was no newer one.

        None is only returned when a source showed a head that is still fresh. Otherwise the most telling
        error is raised: Equivocation, Stale when sources show only expired or older heads (a freeze),
        another PeerFault, or a NetworkFault.
        """
        deadline = time.monotonic() + timeout_s
        urls = self._sources.usable(time.monotonic())[:HEAD_SOURCES] or self._sources.urls[:HEAD_SOURCES]
        if not urls:
            raise Unreachable("there is no source to ask", code="no_sources")
        watchers = [asyncio.create_task(self._watch_head(url, after, deadline)) for url in urls]
        try:
            return await _first_newer(watchers, after)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch_head(self, url: str, after: int, deadline: float) -> Head:
        """Ask one source until it shows a version above `after` or the time is up; then its last answer."""
        attempt = 0
        while True:
            asked = time.monotonic()
            wait_s = max(0.0, min(self._poll_s, deadline - asked))
            outcome = await self._ask_head(url, after, wait_s)
            if isinstance(outcome, Equivocation):
                raise outcome
            if isinstance(outcome, Head) and outcome.version > after:
                return outcome
            # A source that answers a long poll at once without news must not make this loop spin.
            waited = time.monotonic() - asked > wait_s / 2
            attempt = 0 if waited else min(attempt + 1, 10)
            pause_s = 0.0 if waited else min(2.0, 0.05 * 2**attempt)
            if time.monotonic() + pause_s >= deadline:
                if isinstance(outcome, ShardcastError):
                    raise outcome
                return outcome
            await asyncio.sleep(pause_s)

    async def _ask_head(self, url: str, after: int, wait_s: float) -> Head | ShardcastError:
        try:
            data = await self._transport.head(url, after=after, wait_s=wait_s)
            before = self._trust.version
            head = self._trust.accept_head(data, self._clock())
            self._said.pop(url, None)
            self._sources.answered(url)
            if self._trust.version > before:
                self._save_seen()
            elif self._shown is not None and self._trust.seen is not None and self._shown.version == head.version:
                # Signed again: those who are served here must not see it grow old.
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

    def _note_failure(self, url: str, error: ShardcastError) -> None:
        # What a source goes on doing wrong is said once, though a number in the sentence may change.
        level = logging.DEBUG if self._said.get(url) == error.code else logging.WARNING
        self._said[url] = error.code
        logger.log(level, "source %s: %s (%s)", url, error, error.code)
        if isinstance(error, Equivocation) and self._trust.fraud is not None:
            save_fraud_proof(self._root, self._trust.version, self._trust.fraud)
        # A relay that lags shows an old head in good faith; a fault of this machine is nobody else's.
        if not isinstance(error, Stale | LocalFault):
            self._sources.failed(url, error, time.monotonic())

    # -- versions

    async def fetch(
        self,
        target: Head | int,
        *,
        timeout_s: float | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Path:
        """The verified file of a version that is not older than the highest seen.

        `target` is a head from `wait_head`, or a version number. Older ones are refused as rollback (Stale):
        `fetch_archived` is for those. Raises TooSlow after `timeout_s`; what was fetched is kept, and the
        next call goes on from there.
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
            raise TooSlow(f"not fetched within {timeout_s} s; it resumes where it stopped") from error

    async def fetch_archived(
        self,
        version: int,
        *,
        manifest_digest: str | None = None,
        timeout_s: float | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Path:
        """The verified file of an old version, asked for by number on purpose: age and order are waived.

        Give `manifest_digest` where it is known (a lease or a log entry names it); without it the
        publisher's signature on that version number is all there is.
        """
        try:
            async with asyncio.timeout(timeout_s):
                held = None if manifest_digest is None else self._held(version, manifest_digest)
                return await self._complete(held or await self._archived(version, manifest_digest), progress)
        except TimeoutError as error:
            raise TooSlow(f"not fetched within {timeout_s} s; it resumes where it stopped") from error

    async def _resolve(self, target: Head | int) -> tuple[int, str]:
        """(version, manifest digest) of what is asked for, by the highest head seen."""
        version = target if isinstance(target, int) else target.version
        if version < self._trust.version:
            raise Stale(
                f"version {version} after version {self._trust.version} was seen; fetch_archived gets old ones",
                code="rollback",
            )
        if isinstance(target, Head):
            return version, target.manifest_digest
        if version > self._trust.version:
            await self.wait_head(after=version - 1, timeout_s=self._poll_s)
        seen = self._trust.seen
        if seen is None or seen.version != version:
            raise NotServed(f"no source has version {version} as its newest", code="no_such_version")
        return version, seen.manifest_digest

    async def _manifest(
        self, ask: Callable[[str], Awaitable[bytes]], accept: Callable[[bytes], SignedManifest]
    ) -> SignedManifest:
        """The first manifest that `accept` believes, from one source after the other."""
        last: ShardcastError = Unreachable("there is no source to ask", code="no_sources")
        for url in self._sources.usable(time.monotonic()) or self._sources.urls:
            try:
                return accept(await ask(url))
            except Equivocation as error:
                self._note_failure(url, error)
                raise
            except ShardcastError as error:
                self._note_failure(url, error)
                if not (isinstance(last, PeerFault) and not isinstance(error, PeerFault)):
                    last = error
        raise last

    async def _archived(self, version: int, manifest_digest: str | None = None) -> SignedManifest:
        return await self._manifest(
            lambda url: self._transport.version(url, version),
            lambda data: self._trust.accept_archived(data, version, expected_digest=manifest_digest),
        )

    def _held(self, version: int, manifest_digest: str) -> SignedManifest | None:
        """A manifest that is here, verified again: the store takes any signer's."""
        held = self._store.get(version)
        if held is None or held.digest != manifest_digest:
            return None
        try:
            return self._trust.accept_archived(held.envelope, version, expected_digest=manifest_digest)
        except PeerFault:
            self._store.drop(version)
            return None

    async def _complete(self, signed: SignedManifest, progress: Callable[[Progress], None] | None) -> Path:
        await asyncio.to_thread(self._store.add_manifest, signed)
        self._show(signed)
        return await self._fetcher.complete(signed, progress)


async def _first_newer(watchers: list[asyncio.Task[Head]], after: int) -> Head | None:
    """The first head above `after`; None if the best that was shown is fresh but not newer."""
    fresh, errors = False, list[ShardcastError]()
    for finished in asyncio.as_completed(watchers):
        try:
            head = await finished
        except Equivocation:
            raise
        except ShardcastError as error:
            errors.append(error)
        else:
            if head.version > after:
                return head
            fresh = True
    if fresh:
        return None
    raise next((error for error in errors if isinstance(error, PeerFault)), errors[0])
