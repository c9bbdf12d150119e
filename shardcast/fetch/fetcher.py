"""Obtain a version on this disk by the cheapest route from untrusted sources, for clients and relays.

Held chunks are copied, a chain of deltas is applied, and the rest is downloaded. A chunk of the result is written only
if it has the manifest's digest, so a wrong delta or a damaged base costs exactly the chunks that came out wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakValueDictionary

from shardcast.codec.delta_routes import MAX_HOPS, Hop, cheapest
from shardcast.errors import CorruptChunk, LocalFault, NetworkFault, PeerFault, ShardcastError
from shardcast.fetch.download import DEFAULT_DOWNLOAD_LIMITS, Download, DownloadLimits
from shardcast.fetch.served_base import find_served_base
from shardcast.fetch.sources import Sources
from shardcast.fetch.transport import Transport
from shardcast.manifest import DIGEST_BYTES, SignedManifest
from shardcast.store.patching import patch
from shardcast.store.payload_file import PayloadFile
from shardcast.store.rewind import Rewinds
from shardcast.store.threads import threads_or_all
from shardcast.store.versions import Store

logger = logging.getLogger(__name__)

MAX_SHARE_OF_FULL = 0.9
"""A chain must transfer less than this share of what is missing: applying it also reads the base."""

ROUTE_TIMEOUT_S = 20.0
"""For all intermediate manifests together: one slow source must not hold up the whole version."""

DELTA_STALL_S = 10.0
"""A delta is given up sooner than a result: there is a fallback."""


@dataclass(frozen=True, slots=True)
class VersionProgress:
    """Progress of one fetch in bytes to transfer; what was found on disk counts as done.

    `full_bytes` is the size of the result: what a fetch without deltas would transfer.
    """

    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    full_bytes: int
    sources: int

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds left; None before anything arrived."""
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s if self.bytes_per_s > 0 else None


Report = Callable[[VersionProgress], None]
Watch = Callable[[int], contextlib.AbstractContextManager[Report | None]]
"""Context manager around one fetch, by version; yields its progress callback."""


def no_watch(_: int) -> contextlib.AbstractContextManager[None]:
    """Observe nothing: the default `Watch`."""
    return contextlib.nullcontext()


@dataclass(slots=True)
class Fetched:
    """Transfer counters since the start, and the progress of each version being fetched."""

    bytes_in: int = 0
    result_bytes: int = 0
    by_delta: int = 0
    in_full: int = 0
    wrong_chunks: int = 0
    under_way: dict[int, VersionProgress] = field(default_factory=dict)


@dataclass(slots=True)
class _Meter:
    """Accumulates received bytes and reports progress."""

    full_bytes: int
    report: Report | None
    sources: Sources
    done: int = 0
    total: int = 0
    fetched: int = 0
    started: float = field(default_factory=time.monotonic)

    @contextlib.contextmanager
    def expecting(self, file: PayloadFile) -> Iterator[None]:
        """Count a file that the block fetches; what it leaves missing is fetched, and counted, by another way."""
        self.total += file.payload.payload_bytes
        self.done += file.payload.payload_bytes - file.missing_bytes
        try:
            yield
        finally:
            self.total -= file.missing_bytes
            self.done = min(self.done, self.total)

    def arrived(self, length: int) -> None:
        self.done = min(self.total, self.done + length)
        self.fetched += length
        if self.report is not None:
            rate = self.fetched / max(time.monotonic() - self.started, 1e-6)
            self.report(VersionProgress(self.done, self.total, rate, self.full_bytes, self.sources.in_use()))


ArchivedManifest = Callable[[int], Awaitable[SignedManifest]]
"""Fetch the verified manifest of an old version; raises ShardcastError."""


class Fetcher:
    """Downloads into one store, for one event loop. `mirror_deltas`: also fetch and keep every delta, to serve it."""

    def __init__(
        self,
        store: Store,
        *,
        sources: Sources,
        transport: Transport,
        archived: ArchivedManifest,
        mirror_deltas: bool,
        threads: int | None = None,
        rewinds: Rewinds | None = None,
        limits: DownloadLimits = DEFAULT_DOWNLOAD_LIMITS,
    ) -> None:
        self._threads, self._rewinds = threads_or_all(threads), rewinds
        self._store, self._sources, self._transport = store, sources, transport
        self._archived, self._limits = archived, limits
        self.mirror_deltas = mirror_deltas
        self.fetched = Fetched()
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        self._settling = set[asyncio.Task[None]]()
        self._mirror_tasks: dict[str, asyncio.Task[None]] = {}

    async def complete(self, signed: SignedManifest, report: Report | None = None) -> Path:
        """Complete a version whose manifest is held; return the path of its verified file."""
        async with self._lock_for(signed.digest):
            with self._pinned(signed), self._metered(signed, report) as meter:
                result = await asyncio.to_thread(self._store.result, signed)
                await asyncio.to_thread(result.check, self._threads)
                if self.mirror_deltas:
                    self._mirror_deltas(signed, meter)
                if not result.is_complete():
                    await self._obtain(signed, result, meter)
                path = await asyncio.to_thread(self._store.finish, result, signed)
            if not self.mirror_deltas:
                await asyncio.to_thread(self._store.discard_deltas, signed)
            if self._rewinds is not None:
                self._settle(self._rewinds, signed.manifest.version)
            return path

    def _settle(self, rewinds: Rewinds, completed: int) -> None:
        """Rewind older versions in the background; the caller does not wait."""

        async def settle() -> None:
            try:
                await asyncio.to_thread(rewinds.settle, completed)
            except (LocalFault, OSError) as error:  # tried again after the next fetch
                logger.warning("older versions stay whole for now: %s", error)

        task = asyncio.create_task(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def close(self) -> None:
        """Cancel background tasks, but wait for threads that change the store."""
        tasks = list(self._mirror_tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._settling, return_exceptions=True)

    def _lock_for(self, name: str) -> asyncio.Lock:
        """Return the lock of `name`, shared while anybody holds it."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    @contextlib.contextmanager
    def _pinned(self, *versions: SignedManifest) -> Iterator[None]:
        for signed in versions:
            self._store.pin(signed.manifest.version)
        try:
            yield
        finally:
            for signed in versions:
                self._store.unpin(signed.manifest.version)

    @contextlib.contextmanager
    def _metered(self, signed: SignedManifest, report: Report | None) -> Iterator[_Meter]:
        """Yield a meter that reports until the version is complete; mirrored deltas may arrive later."""
        version, under_way = signed.manifest.version, self.fetched.under_way

        def record(progress: VersionProgress) -> None:
            under_way[version] = progress
            if report is not None:
                report(progress)

        meter = _Meter(signed.manifest.full.payload_bytes, record, self._sources)
        try:
            yield meter
        finally:
            meter.report = None
            under_way.pop(version, None)

    def _mirror_deltas(self, signed: SignedManifest, meter: _Meter) -> None:
        """Fetch every delta of a version in the background, to serve it; the result does not wait."""
        if signed.digest in self._mirror_tasks:
            return

        async def fetch() -> None:
            with self._pinned(signed):
                for index in range(len(signed.manifest.deltas)):
                    try:
                        await self._fetch_delta(Hop(signed, index), meter)
                    except ShardcastError as error:
                        logger.warning("delta to version %d not mirrored: %s", signed.manifest.version, error)

        task = self._mirror_tasks[signed.digest] = asyncio.create_task(fetch())
        task.add_done_callback(lambda _: self._mirror_tasks.pop(signed.digest))

    async def _obtain(self, signed: SignedManifest, result: PayloadFile, meter: _Meter) -> None:
        if self._rewinds is not None:
            await asyncio.to_thread(self._rewinds.restore, signed, result)
            if result.is_complete():
                return
        self.fetched.result_bytes += result.missing_bytes
        await asyncio.to_thread(self._reuse, signed, result)
        if result.is_complete():
            return
        await self._follow_deltas(signed, result, meter)
        if result.is_complete():
            self.fetched.by_delta += 1
            return
        try:
            await self._download_in_full(result, meter)
        except (NetworkFault, PeerFault):  # a source that lies beside one that has it as deltas alone
            await self._follow_folds(signed, result, meter)
            if not result.is_complete():
                raise

    async def _download_in_full(self, result: PayloadFile, meter: _Meter) -> None:
        await self._download(result, meter, self._limits)
        self.fetched.in_full += 1

    # -- versions that are kept as deltas (`shardcast.store.archive`)

    async def _follow_folds(self, signed: SignedManifest, result: PayloadFile, meter: _Meter) -> None:
        """Fetch the nearest version that is served in full of those that folded deltas lead from, and apply these.

        One whose chunks turn out not to be served is passed over: a source may claim to have it.
        """
        start, chain = signed, list[Hop]()
        while len(chain) < MAX_HOPS:
            try:
                async with asyncio.timeout(ROUTE_TIMEOUT_S):
                    found = await find_served_base(
                        start, sources=self._sources, transport=self._transport, manifest_of=self._manifest_or_none
                    )
            except TimeoutError:
                return
            if found is None:
                return
            start, chain = found[0], [*found[1], *chain]
            try:
                with self._pinned(start):
                    base = await self._fetch_base(start, meter)
                    await self._apply_chain(signed, chain, (start, base), result, meter)
                return
            except (NetworkFault, PeerFault):
                # What arrived of it is of no use to anything else. A fetch that is cancelled is resumed with it.
                await asyncio.to_thread(self._store.discard_result, start)

    async def _fetch_base(self, signed: SignedManifest, meter: _Meter) -> PayloadFile:
        await asyncio.to_thread(self._store.add_manifest, signed, only_manifest=True)
        base = await asyncio.to_thread(self._store.result, signed)
        await asyncio.to_thread(base.check, self._threads)
        if not base.is_complete():
            await self._download_in_full(base, meter)
        await asyncio.to_thread(self._store.finish, base, signed)
        return base

    def _reuse(self, signed: SignedManifest, result: PayloadFile) -> None:
        """Copy equal chunks from the newest held version (e.g. layers that are not trained)."""
        wanted = result.payload
        for other, file in self._store.whole_results()[:1]:
            held = other.manifest.full
            if other.digest == signed.digest or held.chunk_bytes != wanted.chunk_bytes:
                continue
            for index in range(min(held.chunk_count, wanted.chunk_count)):
                here = slice(index * DIGEST_BYTES, (index + 1) * DIGEST_BYTES)
                if held.chunk_digests[here] != wanted.chunk_digests[here] or result.holds(index):
                    continue
                if (data := file.read(index)) is not None:
                    with contextlib.suppress(CorruptChunk):  # the base was damaged after it was verified
                        result.write(index, data)

    # -- deltas

    async def _follow_deltas(self, signed: SignedManifest, result: PayloadFile, meter: _Meter) -> None:
        """Apply deltas from a held version; chunks that come out wrong stay missing."""
        full = signed.manifest.full
        held = await asyncio.to_thread(self._store.whole_results)
        bases = {
            other.manifest.result_digest: (other, file)
            for other, file in held
            if other.manifest.full.payload_bytes == full.payload_bytes and other.digest != signed.digest
        }
        versions = {digest: other.manifest.version for digest, (other, _) in bases.items()}
        budget = MAX_SHARE_OF_FULL * result.missing_bytes
        try:
            async with asyncio.timeout(ROUTE_TIMEOUT_S):
                chain = await cheapest(signed, versions, less_than=budget, manifest_of=self._manifest_or_none)
        except TimeoutError:
            logger.warning(
                "version %d: no delta chain found within %.0f s; fetching in full",
                signed.manifest.version,
                ROUTE_TIMEOUT_S,
            )
            return
        if chain:
            await self._apply_chain(signed, chain, bases[chain[0].delta.base], result, meter)

    async def _apply_chain(
        self,
        signed: SignedManifest,
        chain: list[Hop],
        start_and_base: tuple[SignedManifest, PayloadFile],
        result: PayloadFile,
        meter: _Meter,
    ) -> None:
        """Fetch the deltas of a chain and apply them to the base; log failures, after which chunks are missing."""
        start, base = start_and_base
        try:
            with self._pinned(start, *(hop.signed for hop in chain)):
                wrong = await self._fetch_and_patch(chain, base, result, meter)
        except ShardcastError as error:
            # Space for the result is already reserved, whatever a delta lacked space for.
            if isinstance(error, LocalFault) and error.code not in {"quota", "disk_full"}:
                raise
            logger.warning("version %d: delta chain failed: %s (%s)", signed.manifest.version, error, error.code)
            return
        finally:
            if not self.mirror_deltas:
                for hop in chain:
                    await asyncio.to_thread(self._store.discard_deltas, hop.signed)
        if wrong:
            self.fetched.wrong_chunks += wrong
            logger.warning("version %d: %d patched chunks have a wrong digest", signed.manifest.version, wrong)

    async def _fetch_and_patch(self, chain: list[Hop], base: PayloadFile, result: PayloadFile, meter: _Meter) -> int:
        tasks = [asyncio.create_task(self._fetch_delta(hop, meter)) for hop in chain]
        try:
            files = await asyncio.gather(*tasks)
        finally:  # the chain needs every delta
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        paths = [file.finish() for file in files]
        return await asyncio.to_thread(patch, base, paths, result, threads=self._threads)

    async def _manifest_or_none(self, version: int) -> SignedManifest | None:
        try:
            return self._store.get(version) or await self._archived(version)
        except LocalFault:
            raise
        except ShardcastError as error:
            logger.debug("no manifest of version %d: %s", version, error)
            return None

    async def _fetch_delta(self, hop: Hop, meter: _Meter) -> PayloadFile:
        """Fetch a delta, whole and verified."""
        name = hop.delta.payload.digest
        async with self._lock_for(name):
            if self._store.get(hop.signed.manifest.version) is None:
                await asyncio.to_thread(self._store.add_manifest, hop.signed, only_manifest=True)
            file = await asyncio.to_thread(self._store.delta, hop.signed, hop.index)
            await asyncio.to_thread(file.check, self._threads)
            if not file.is_complete():
                patience = replace(self._limits, stall_s=min(DELTA_STALL_S, self._limits.stall_s))
                await self._download(file, meter, patience)
            await asyncio.to_thread(file.finish)
            return file

    async def _download(self, file: PayloadFile, meter: _Meter, limits: DownloadLimits) -> None:
        def arrived(length: int) -> None:
            self.fetched.bytes_in += length
            meter.arrived(length)

        download = Download(file, sources=self._sources, transport=self._transport, arrived=arrived, limits=limits)
        with meter.expecting(file):
            await download.run()
