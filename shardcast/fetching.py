"""Getting a version onto this disk by the cheapest way, from sources that nobody trusts: for clients and relays.

What is here already is copied, what a chain of deltas gives is computed, and the rest is downloaded. Whatever the
way, a chunk of the result is written only if it has the digest in the manifest, so that a delta which does not lead
to the result, or a base that is damaged, costs exactly the chunks that came out wrong.
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

from shardcast.download import DEFAULT_DOWNLOAD_LIMITS, Download, DownloadLimits
from shardcast.errors import CorruptChunk, LocalFault, ShardcastError
from shardcast.manifest import DIGEST_BYTES, SignedManifest
from shardcast.patching import patch
from shardcast.payload_file import PayloadFile
from shardcast.routes import Hop, cheapest
from shardcast.sources import Sources
from shardcast.store import Store
from shardcast.transport import Transport

logger = logging.getLogger(__name__)

MOST_OF_FULL = 0.9
"""A chain must transfer less than this share of what is missing: applying it reads the base, too."""

ROUTE_S = 20.0
"""For the manifests in between: a source that dawdles over each of them must not hold up the whole version."""

DELTA_STALL_S = 10.0
"""A delta that nobody has is given up sooner than a result: there is another way."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fetch is, of the bytes that this way transfers; what was found on disk counts as done.

    `full_bytes` is the size of the result, so of what a way without deltas would transfer.
    """

    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    full_bytes: int
    sources: int

    @property
    def seconds_left(self) -> float | None:
        """None before anything arrived."""
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s if self.bytes_per_s > 0 else None


Report = Callable[[Progress], None]
Watch = Callable[[int], contextlib.AbstractContextManager[Report | None]]
"""Entered with a version while that is fetched; gives what is to be called with its progress."""


def unwatched(_: int) -> contextlib.AbstractContextManager[None]:
    """For fetches that nobody watches."""
    return contextlib.nullcontext()


@dataclass(slots=True)
class Fetched:
    """What was transferred since the start of the process, what the results it gave weigh, and what is under way.

    `under_way` has the progress of each version that something has arrived of.
    """

    bytes_in: int = 0
    result_bytes: int = 0
    by_delta: int = 0
    in_full: int = 0
    wrong_chunks: int = 0
    under_way: dict[int, Progress] = field(default_factory=dict)


@dataclass(slots=True)
class _Meter:
    """Adds up what arrives, for whoever wants to see it."""

    full_bytes: int
    report: Report | None
    sources: Sources
    done: int = 0
    total: int = 0
    fetched: int = 0
    started: float = field(default_factory=time.monotonic)

    def expect(self, file: PayloadFile) -> None:
        missing = file.missing_bytes
        self.total += file.payload.payload_bytes
        self.done += file.payload.payload_bytes - missing

    def arrived(self, length: int) -> None:
        self.done = min(self.total, self.done + length)
        self.fetched += length
        if self.report is not None:
            rate = self.fetched / max(time.monotonic() - self.started, 1e-6)
            self.report(Progress(self.done, self.total, rate, self.full_bytes, self.sources.in_use()))


ArchivedManifest = Callable[[int], Awaitable[SignedManifest]]
"""The verified manifest of an old version, from wherever it can be had; raises ShardcastError."""


class Fetcher:
    """One store's downloads, for one event loop. `everything` has the deltas fetched and kept too, for others."""

    def __init__(
        self,
        store: Store,
        *,
        sources: Sources,
        transport: Transport,
        archived: ArchivedManifest,
        everything: bool,
        limits: DownloadLimits = DEFAULT_DOWNLOAD_LIMITS,
    ) -> None:
        self._store, self._sources, self._transport = store, sources, transport
        self._archived, self._limits = archived, limits
        self.everything = everything
        self.fetched = Fetched()
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        self._passing_on: dict[str, asyncio.Task[None]] = {}

    async def complete(self, signed: SignedManifest, report: Report | None = None) -> Path:
        """The file of a version that the store holds the manifest of, whole and verified."""
        async with self._lock_of(signed.digest):
            with self._pinned(signed), self._metered(signed, report) as meter:
                result = await asyncio.to_thread(self._store.result, signed)
                await asyncio.to_thread(result.check)
                if self.everything:
                    self._pass_on(signed, meter)
                if not result.is_complete():
                    await self._fill(signed, result, meter)
                path = await asyncio.to_thread(self._store.finish, result, signed)
            if not self.everything:
                await asyncio.to_thread(self._store.discard_deltas, signed)
            return path

    async def close(self) -> None:
        """End what goes on behind `complete`."""
        tasks = list(self._passing_on.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _lock_of(self, name: str) -> asyncio.Lock:
        """One lock for each name, for as long as somebody has it."""
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
        """A meter that reports until the version is here: deltas that are passed on may go on arriving."""
        version, under_way = signed.manifest.version, self.fetched.under_way

        def note(progress: Progress) -> None:
            under_way[version] = progress
            if report is not None:
                report(progress)

        meter = _Meter(signed.manifest.full.payload_bytes, note, self._sources)
        try:
            yield meter
        finally:
            meter.report = None
            under_way.pop(version, None)

    def _pass_on(self, signed: SignedManifest, meter: _Meter) -> None:
        """Have every delta of a version, for those who need it; the result does not wait for them."""
        if signed.digest in self._passing_on:
            return

        async def fetch() -> None:
            with self._pinned(signed):
                for index in range(len(signed.manifest.deltas)):
                    try:
                        await self._delta(Hop(signed, index), meter)
                    except ShardcastError as error:
                        logger.warning("a delta to version %d is not here: %s", signed.manifest.version, error)

        task = self._passing_on[signed.digest] = asyncio.create_task(fetch())
        task.add_done_callback(lambda _: self._passing_on.pop(signed.digest))

    async def _fill(self, signed: SignedManifest, result: PayloadFile, meter: _Meter) -> None:
        self.fetched.result_bytes += result.missing_bytes
        await asyncio.to_thread(self._reuse, signed, result)
        if result.is_complete():
            return
        await self._follow_deltas(signed, result, meter)
        if result.is_complete():
            self.fetched.by_delta += 1
            return
        self.fetched.in_full += 1
        meter.expect(result)
        await self._download(result, meter, self._limits)

    def _reuse(self, signed: SignedManifest, result: PayloadFile) -> None:
        """Copy chunks that the newest version here has at the same place: layers that are not trained."""
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
                    with contextlib.suppress(CorruptChunk):  # it was right once: damaged since then
                        result.write(index, data)

    # -- deltas

    async def _follow_deltas(self, signed: SignedManifest, result: PayloadFile, meter: _Meter) -> None:
        """Make of `result` what deltas from the versions that are here give; what they do not stays missing."""
        full = signed.manifest.full
        held = await asyncio.to_thread(self._store.whole_results)
        bases = {
            other.manifest.result_digest: (other, file)
            for other, file in held
            if other.manifest.full.payload_bytes == full.payload_bytes and other.digest != signed.digest
        }
        versions = {digest: other.manifest.version for digest, (other, _) in bases.items()}
        budget = MOST_OF_FULL * result.missing_bytes
        try:
            async with asyncio.timeout(ROUTE_S):
                chain = await cheapest(signed, versions, less_than=budget, manifest_of=self._earlier)
        except TimeoutError:
            logger.warning("version %d is fetched in full: no way by deltas was found in time", signed.manifest.version)
            return
        if not chain:
            return
        start, base = bases[chain[0].delta.base]
        try:
            with self._pinned(start, *(hop.signed for hop in chain)):
                wrong = await self._patched(chain, base, result, meter)
        except ShardcastError as error:
            # The result has its room already, whatever there is none for.
            if isinstance(error, LocalFault) and error.code not in {"quota", "disk_full"}:
                raise
            logger.warning("version %d is fetched in full: %s (%s)", signed.manifest.version, error, error.code)
            return
        finally:
            if not self.everything:
                for hop in chain:
                    await asyncio.to_thread(self._store.discard_deltas, hop.signed)
        if wrong:
            self.fetched.wrong_chunks += wrong
            logger.warning("version %d: %d chunks came out wrong; they are fetched", signed.manifest.version, wrong)

    async def _patched(self, chain: list[Hop], base: PayloadFile, result: PayloadFile, meter: _Meter) -> int:
        tasks = [asyncio.create_task(self._delta(hop, meter)) for hop in chain]
        try:
            files = await asyncio.gather(*tasks)
        finally:  # without one of them the others are of no use
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return await asyncio.to_thread(patch, base, [file.finish() for file in files], result)

    async def _earlier(self, version: int) -> SignedManifest | None:
        try:
            return self._store.get(version) or await self._archived(version)
        except LocalFault:
            raise
        except ShardcastError as error:
            logger.debug("no manifest of version %d: %s", version, error)
            return None

    async def _delta(self, hop: Hop, meter: _Meter) -> PayloadFile:
        """A delta, whole and verified."""
        name = hop.delta.payload.digest
        async with self._lock_of(name):
            if self._store.get(hop.signed.manifest.version) is None:
                await asyncio.to_thread(self._store.add_manifest, hop.signed, only_manifest=True)
            file = await asyncio.to_thread(self._store.delta, hop.signed, hop.index)
            await asyncio.to_thread(file.check)
            if not file.is_complete():
                meter.expect(file)
                patience = replace(self._limits, stall_s=min(DELTA_STALL_S, self._limits.stall_s))
                await self._download(file, meter, patience)
            await asyncio.to_thread(file.finish)
            return file

    async def _download(self, file: PayloadFile, meter: _Meter, limits: DownloadLimits) -> None:
        def arrived(length: int) -> None:
            self.fetched.bytes_in += length
            meter.arrived(length)

        download = Download(file, sources=self._sources, transport=self._transport, arrived=arrived, limits=limits)
        await download.run()
