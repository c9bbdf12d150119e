"""Publisher: chunk a file, encode deltas to it, sign its manifest, and serve it to the first relays.

Publishing is idempotent, so a restarted trainer may publish its newest version again. A version is announced only after
its chunks and manifest are on disk.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast.errors import LocalFault, ShardcastError
from shardcast.manifest import (
    DEFAULT_LIMITS,
    Delta,
    Head,
    Limits,
    Manifest,
    SignedManifest,
    check_consistency,
    seal_head,
    seal_manifest,
)
from shardcast.serve.listener import DEFAULT_SERVER_LIMITS, ServerLimits, listen
from shardcast.serve.server import make_app
from shardcast.serve.state import Announced, ServedState
from shardcast.store.archive import archive
from shardcast.store.disk import RoomCheck
from shardcast.store.staging import Staged, chunk_bytes_for, stage
from shardcast.store.threads import threads_or_all
from shardcast.store.versions import KEPT_DELTAS, Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeltaSettings:
    """Which deltas an origin makes: one from the previous version, and one from the last version whose number is a
    multiple of `fold_every`.

    Deltas are left out once they total more than `max_share_of_full` of the result. `enabled` False makes none.
    """

    enabled: bool = True
    fold_every: int = 8
    max_share_of_full: float = 0.8


DEFAULT_DELTA_SETTINGS = DeltaSettings()


class Origin:
    """Sign and store versions of one run. Thread-safe.

    A head lives for `head_lifetime_s` and is re-signed after `head_refresh_s`: the first bounds how long a withholding
    relay goes unnoticed, the second how far the clocks of a relay tree may lag. `announced` is the newest version that
    others may have heard of (-1 for none, None for all): a later one in the store was interrupted while publishing, and
    is announced once it is published again. Of versions beyond `keep` nothing stays; beyond `keep_whole` only deltas do
    where they reproduce it (`shardcast.store.archive`), which is found out after each publication, in a thread of its
    own. `threads` hash and encode; None takes every core. `content_name` is what the log calls the only version of a
    content (`shardcast.content`).
    """

    def __init__(
        self,
        store_dir: Path | str,
        key: Ed25519PrivateKey,
        run_id: str,
        *,
        chunk_bytes: int | None = None,
        keep: int | None = None,
        keep_whole: int | None = None,
        quota_bytes: int | None = None,
        manifest_lifetime_s: int = 90 * 86400,
        head_lifetime_s: int = 60,
        head_refresh_s: float = 5.0,
        announced: int | None = None,
        content_name: str | None = None,
        deltas: DeltaSettings = DEFAULT_DELTA_SETTINGS,
        threads: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if chunk_bytes is not None and not limits.min_chunk_bytes <= chunk_bytes <= limits.max_chunk_bytes:
            raise LocalFault(f"chunk size of {chunk_bytes} bytes is out of bounds", code="bad_setting")
        self.run_id = run_id
        self.publisher_key = key.public_key().public_bytes_raw()
        self._key, self._limits, self._clock = key, limits, clock
        self._chunk_bytes, self._manifest_lifetime_s = chunk_bytes, manifest_lifetime_s
        self._deltas, self._threads = deltas, threads_or_all(threads)
        self._content_name = content_name
        self._keep_whole = keep_whole
        self._archiving = concurrent.futures.ThreadPoolExecutor(1, "shardcast-archive")
        self._stopping = threading.Event()
        self._head_lifetime_s, self._head_refresh_s = head_lifetime_s, head_refresh_s
        self._publishing = threading.Lock()
        self._head: tuple[Head, bytes] | None = None
        self.store = Store(
            Path(store_dir),
            run_id=run_id,
            keep=keep,
            keep_deltas=None if keep is None else max(keep, KEPT_DELTAS),
            quota_bytes=quota_bytes,
            limits=limits,
        )
        self._room = RoomCheck(Path(store_dir), versions=2 + (keep_whole or keep or 0), quota_bytes=quota_bytes)
        announced_versions = [
            held for held in self.store.versions() if announced is None or held.manifest.version <= announced
        ]
        self._latest = announced_versions[-1] if announced_versions else None

    def close(self) -> None:
        self._stopping.set()
        self._archiving.shutdown(cancel_futures=True)
        self.store.close()

    def publish(
        self, path: Path | str, *, version: int, before_announcing: Callable[[SignedManifest], None] | None = None
    ) -> str:
        """Publish the bytes of `path` as `version` and return the manifest digest.

        `before_announcing` is called with the manifest once it is on disk and before any head names it, so that the
        caller's records are never behind what others see; if it raises, nothing is announced, and publishing again
        repeats it. Publishing the same bytes again returns the same manifest and repairs lost chunks.

        Raises LocalFault "version_conflict" for other bytes, "version_not_rising", "empty", "quota", "disk_full" or
        "too_large".
        """
        with self._publishing:
            held = self.store.get(version)
            if held is None and self._latest is not None and version <= self._latest.manifest.version:
                raise LocalFault(
                    f"version {version} is not above {self._latest.manifest.version}", code="version_not_rising"
                )
            if Path(path).is_file():
                self._room.note(Path(path).stat().st_size)
            if held is not None:
                chunk_bytes = held.manifest.full.chunk_bytes
            else:
                chunk_bytes = self._chunk_bytes or chunk_bytes_for(Path(path))
            staged = self._stage(Path(path), self.store.incoming / "result", chunk_bytes)
            try:
                if held is None:
                    held = self._add(staged, version)
                else:
                    self._repair(held, staged)
            finally:
                staged.path.unlink(missing_ok=True)
            if before_announcing is not None:
                before_announcing(held)
            if self._latest is None or self._latest.manifest.version < version:
                self._latest = held
                logger.info("published %s as %s", self._content_name or f"version {version}", held.digest[:16])
            if self._keep_whole is not None:
                self._archiving.submit(self._archive, self._keep_whole)
            return held.digest

    def head(self) -> Announced | None:
        """Return the newest head, re-signed when due; None before the first version."""
        latest, now = self._latest, self._clock()
        if latest is None:
            return None
        current = self._head
        if current is None or current[0].manifest_digest != latest.digest or self._needs_refresh(current[0], now):
            current = self._head = self._sign_head(latest, int(now))
        return Announced(current[0].version, current[1])

    def _needs_refresh(self, head: Head, now: float) -> bool:
        return not head.issued_at <= now < head.issued_at + self._head_refresh_s

    def _sign_head(self, latest: SignedManifest, now: int) -> tuple[Head, bytes]:
        head = Head(
            run_id=self.run_id,
            version=latest.manifest.version,
            manifest_digest=latest.digest,
            issued_at=now,
            expires_at=now + self._head_lifetime_s,
        )
        return head, seal_head(head, self._key)

    def _archive(self, keep: int) -> None:
        try:
            archive(
                self.store,
                keep=keep,
                fold_every=self._deltas.fold_every,
                threads=self._threads,
                stopping=self._stopping,
            )
        except (ShardcastError, OSError) as error:  # tried again after the next publication
            logger.warning("old versions stay whole for now: %s", error)

    def _add(self, staged: Staged, version: int) -> SignedManifest:
        now = int(self._clock())
        deltas = self._find_deltas(staged, version)
        manifest = Manifest(
            run_id=self.run_id,
            version=version,
            previous=None if self._latest is None else self._latest.digest,
            issued_at=now,
            expires_at=now + self._manifest_lifetime_s,
            result_digest=staged.digest,
            full=staged.payload,
            deltas=tuple(delta for delta, _ in deltas),
        )
        check_consistency(manifest, self._limits)
        signed = seal_manifest(manifest, self._key)
        self.store.adopt(signed, [staged.path, *(staged_delta.path for _, staged_delta in deltas)])
        if (result := self.store.payload(staged.payload.digest)) is not None:
            self.store.finish(result, signed)
        return signed

    def _repair(self, held: SignedManifest, staged: Staged) -> None:
        """Rewrite missing chunks of a published version from the same bytes; raise LocalFault for other bytes."""
        manifest = held.manifest
        if (staged.payload, staged.digest) != (manifest.full, manifest.result_digest):
            raise LocalFault(f"version {manifest.version} was published with other bytes", code="version_conflict")
        result = self.store.result(held)
        result.check(self._threads)
        for index in result.missing():
            result.write(index, staged.read(index))
        self.store.finish(result, held)

    def _stage(self, source: Path, target: Path, chunk_bytes: int) -> Staged:
        return stage(source, target, chunk_bytes=chunk_bytes, limits=self._limits, threads=self._threads)

    def _find_deltas(self, staged: Staged, version: int) -> list[tuple[Delta, Staged]]:
        """Encode the deltas that are worth their bytes, the one from the previous version first."""
        from shardcast.codec import delta  # noqa: PLC0415  numpy is imported only when deltas are made

        whole = self.store.whole_results() if self._deltas.enabled else []
        earlier = [(signed.manifest, file) for signed, file in whole if signed.manifest.version < version]
        anchors = [candidate for candidate in earlier if candidate[0].version % self._deltas.fold_every == 0]
        found = list[tuple[Delta, Staged]]()
        # Relays fetch every delta: their total must stay below the result's size.
        budget = int(self._deltas.max_share_of_full * staged.payload.payload_bytes)
        for manifest, file in {candidate[0].version: candidate for candidate in (*earlier[:1], *anchors[:1])}.values():
            # Readers hold what was published: a delta from a damaged file would be of no use to them.
            file.check(self._threads)
            if (base := file.path) is None or manifest.full.payload_bytes != staged.payload.payload_bytes:
                continue
            path = self.store.incoming / f"delta-{manifest.version}"
            full = staged.payload
            size_bytes = delta.encode(
                base,
                staged.path,
                path,
                chunk_bytes=full.chunk_bytes,
                max_bytes=budget,
                threads=self._threads,
            )
            if size_bytes is not None:
                budget -= size_bytes
                chunk_bytes = min(full.chunk_bytes, chunk_bytes_for(path))
                staged_delta = self._stage(path, path.with_suffix(".cut"), chunk_bytes)
                path.unlink()
                entry = Delta(base=manifest.result_digest, base_version=manifest.version, payload=staged_delta.payload)
                found.append((entry, staged_delta))
        return found


NO_ORIGINS: Final[Mapping[str, Origin]] = MappingProxyType({})


class OriginServer:
    """Serve an origin from a thread with its own event loop; `publish` may be called from any thread.

    `contents` are origins of single files, by digest (`shardcast.content`). `beside` runs on the loop while it serves.
    """

    def __init__(
        self,
        origin: Origin,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: ServerLimits = DEFAULT_SERVER_LIMITS,
        contents: Mapping[str, Origin] = NO_ORIGINS,
        beside: Callable[[], Coroutine[None, None, None]] | None = None,
    ) -> None:
        self._origin, self._host, self._port, self._limits = origin, host, port, limits
        self._contents, self._beside = contents, beside
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._served: ServedState | None = None
        self._stopping: asyncio.Event | None = None

    def start(self) -> int:
        """Start serving and return the bound port. Raises LocalFault "cannot_bind"."""
        bound: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(bound,), name="shardcast-origin", daemon=True)
        self._thread.start()
        return bound.result()

    def publish(
        self, path: Path | str, *, version: int, before_announcing: Callable[[SignedManifest], None] | None = None
    ) -> str:
        """Call `Origin.publish`, then wake every client waiting for a new version."""
        digest = self._origin.publish(path, version=version, before_announcing=before_announcing)
        if self._loop is not None and self._served is not None:
            self._loop.call_soon_threadsafe(self._served.announce)
        return digest

    def stop(self) -> None:
        """Close every connection and end the thread; the origin stays usable."""
        if self._thread is not None and self._loop is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._thread = self._loop = self._served = self._stopping = None

    def _run(self, bound: concurrent.futures.Future[int]) -> None:
        try:
            asyncio.run(self._serve(bound))
        finally:
            if not bound.done():
                bound.set_exception(LocalFault("origin server ended before it was ready"))

    async def _serve(self, bound: concurrent.futures.Future[int]) -> None:
        origin = self._origin
        served = ServedState(store=origin.store, role="origin", run_id=origin.run_id, head=origin.head)
        contents = {
            digest: ServedState(store=content.store, role="origin", run_id=content.run_id, head=lambda: None)
            for digest, content in self._contents.items()
        }
        for state in (served, *contents.values()):
            state.open()
        try:
            listener = await listen(
                make_app(served, self._limits, contents), host=self._host, port=self._port, limits=self._limits
            )
        except LocalFault as error:
            bound.set_exception(error)
            return
        stopping = asyncio.Event()
        self._loop, self._served, self._stopping = asyncio.get_running_loop(), served, stopping
        bound.set_result(listener.port)
        beside = None if self._beside is None else asyncio.create_task(self._beside())
        await stopping.wait()
        if beside is not None:
            beside.cancel()
        await listener.stop()
