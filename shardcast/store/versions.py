"""Versions on disk: what the folder of an origin, a relay or a client holds (`shardcast.store.folder`), and retains.

Safe against kill -9 at any instruction: a file that no manifest names is deleted at the start, and what a manifest
names is hashed again before it is used (`shardcast.store.payload_file`). Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from shardcast.errors import LocalFault
from shardcast.files import FolderLock, as_local_fault, write_atomically
from shardcast.manifest import DEFAULT_LIMITS, Limits, Payload, SignedManifest
from shardcast.store.folder import StoreFolder
from shardcast.store.held import Held
from shardcast.store.payload_file import ChunkData, PayloadFile
from shardcast.store.retention import excess_results

KEPT_DELTAS = 16
"""Versions whose deltas are kept by default: how far behind a worker may be and still catch up by deltas."""

Arrived = Callable[[str, int], None]
"""Callback (payload digest, chunk index) after a chunk is on disk, in the thread that wrote it."""


class ResultReader(Protocol):
    """Reads results while they are written, in any order, from several threads; each chunk has its digest.

    `name` is the digest of a result's `payload`. What was written by an earlier process is not shown.
    """

    def chunk(self, name: str, payload: Payload, index: int, data: ChunkData) -> None:
        """Take a chunk, whose memory is not to be kept."""

    def whole(self, name: str, payload: Payload, path: Path) -> None:
        """Take the file that all chunks are in, before anybody else does; may block."""


class Store:
    """The versions one node holds of one run.

    Retains the `keep` most recently used results (`keep_base`: `shardcast.store.retention`) and the deltas of the
    `keep_deltas` newest versions; None keeps everything. The quota counts complete and incomplete payloads at full
    size, so reserved space cannot exceed it later.
    """

    def __init__(
        self,
        root: Path,
        *,
        run_id: str,
        keep: int | None = 3,
        keep_deltas: int | None = KEPT_DELTAS,
        keep_base: bool = False,
        quota_bytes: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if keep is not None and keep < 1:
            raise LocalFault("a store must keep at least one version", code="bad_setting")
        self._lock_file = FolderLock(root)
        self._folder, self.root = StoreFolder(root), root
        self.incoming = self._folder.incoming
        self._keep, self.keep_deltas, self._keep_base, self._quota_bytes = keep, keep_deltas, keep_base, quota_bytes
        self._lock = threading.RLock()
        self._held: dict[int, Held] = {}
        self._owner: dict[str, int] = {}
        self._pinned: list[int] = []
        self._clock = 0
        self.arrived: Arrived = lambda _name, _index: None
        self.reader: ResultReader | None = None
        try:
            self._recover(run_id, limits)
        except OSError as error:
            self._lock_file.release()
            raise as_local_fault(error, root) from error
        except LocalFault:
            self._lock_file.release()
            raise

    def close(self) -> None:
        """Close every file and release the folder's lock."""
        with self._lock:
            for held in self._held.values():
                for file in held.files.values():
                    file.close()
                held.files.clear()
        self._lock_file.release()

    # -- manifests

    def versions(self) -> list[SignedManifest]:
        """List every held manifest, oldest first."""
        with self._lock:
            return [self._held[version].signed for version in sorted(self._held)]

    def get(self, version: int) -> SignedManifest | None:
        return None if (held := self._held.get(version)) is None else held.signed

    def by_digest(self, digest: str) -> SignedManifest | None:
        """Return the manifest with this digest; None if not held."""
        return next((signed for signed in self.versions() if signed.digest == digest), None)

    def add_manifest(self, signed: SignedManifest, *, only_manifest: bool = False) -> None:
        """Hold a verified version: make room within the quota, then persist its manifest. With `only_manifest` no
        payload is wanted yet.

        Raises LocalFault "quota" if it cannot fit, and "version_conflict" if the version is held with another manifest.
        """
        with self._lock:
            held = self._held.get(signed.manifest.version)
            if held is None:
                if not only_manifest:
                    self._make_room(signed, signed.manifest.payloads)
                write_atomically(self._folder.manifest(signed.manifest.version), signed.envelope)
                self._hold(signed, wanted=not only_manifest)
                # One version beyond the limit may be incomplete, however fast versions follow each other.
                self._trim(extra=1)
            elif held.signed.digest != signed.digest:
                raise LocalFault(
                    f"version {signed.manifest.version} is held with another manifest", code="version_conflict"
                )
            elif not only_manifest:
                for name in held.names:
                    self._want(held, name)

    def adopt(self, signed: SignedManifest, files: Collection[Path]) -> None:
        """Hold a version whose payloads were just hashed into `files` of this folder, in the manifest's order."""
        with self._lock:
            version = signed.manifest.version
            if version not in self._held:
                self._make_room(signed, signed.manifest.payloads)
            for path, payload in zip(files, signed.manifest.payloads, strict=True):
                path.rename(self._folder.final(signed, payload))
            self._forget(version)
            write_atomically(self._folder.manifest(version), signed.envelope)
            held = self._hold(signed, wanted=True)
            for name in held.names:
                self._open_payload(held, name).trust()

    def drop(self, version: int) -> None:
        """Drop a version and delete its payloads."""
        with self._lock:
            held = self._held.get(version)
            if held is not None:
                # The manifest goes first: a crash in between leaves orphans, which the next start deletes.
                self._folder.manifest(version).unlink(missing_ok=True)
                for name in list(held.wanted):
                    self._discard(held, name)
                self._forget(version)

    # -- payloads

    @property
    def planned_bytes(self) -> int:
        """Bytes of every payload held or reserved."""
        with self._lock:
            return sum(held.planned_bytes for held in self._held.values())

    def payload(self, name: str) -> PayloadFile | None:
        """Return the file of a wanted payload by its digest; None if unknown."""
        with self._lock:
            held = self._held.get(self._owner.get(name, -1))
            return None if held is None or name not in held.wanted else self._open_payload(held, name)

    def result(self, signed: SignedManifest) -> PayloadFile:
        """Return the file of a held version's result. Raises LocalFault "not_held", "quota", "disk_full"."""
        with self._lock:
            held = self._require(signed)
            self._want(held, held.full)
            return self._open_payload(held, held.full)

    def delta(self, signed: SignedManifest, index: int) -> PayloadFile:
        """Return the file of a held version's delta. Raises LocalFault as `result` does."""
        with self._lock:
            held = self._require(signed)
            name = held.names[1 + index]
            self._want(held, name)
            return self._open_payload(held, name)

    def whole_results(self) -> list[tuple[SignedManifest, PayloadFile]]:
        """List held versions whose result is complete, newest first."""
        with self._lock:
            found = [(signed, self.whole_result(signed.manifest.version)) for signed in reversed(self.versions())]
            return [(signed, file) for signed, file in found if file is not None]

    def whole_result(self, version: int) -> PayloadFile | None:
        """Return the file of a held version's result if that is complete."""
        with self._lock:
            held = self._held.get(version)
            is_there = held is not None and self._folder.final(held.signed, held.signed.manifest.full).exists()
            return self._open_payload(held, held.full) if held is not None and is_there else None

    def is_whole(self, version: int) -> bool:
        """Return whether every wanted payload of a held version is complete, as far as is known."""
        with self._lock:
            held = self._held.get(version)
            return held is not None and all(self._open_payload(held, name).is_complete() for name in held.wanted)

    def chunks_held(self, version: int) -> int:
        """Count the chunks held of a version's result."""
        with self._lock:
            held = self._held.get(version)
            is_wanted = held is not None and held.full in held.wanted
            return self._open_payload(held, held.full).count() if held is not None and is_wanted else 0

    def finish(self, file: PayloadFile, signed: SignedManifest) -> Path:
        """Rename a complete payload to its final name, then apply retention; return its path."""
        path = file.finish()
        held = self._held.get(signed.manifest.version)
        if self.reader is not None and held is not None and file.payload is held.signed.manifest.full:
            self.reader.whole(held.full, file.payload, path)
        with self._lock:
            held = self._held.get(signed.manifest.version)
            if held is not None:
                self._touch(held)
            self._trim()
        return path

    def discard_result(self, signed: SignedManifest) -> None:
        """Delete a held version's result, complete or not, unless it is pinned; its manifest and deltas stay."""
        with self._lock:
            held = self._held.get(signed.manifest.version)
            if held is not None and signed.manifest.version not in self._pinned and held.full in held.wanted:
                self._discard(held, held.full)

    def discard_deltas(self, signed: SignedManifest) -> None:
        """Delete a held version's deltas unless it is pinned; for a client that serves nobody."""
        with self._lock:
            held = self._held.get(signed.manifest.version)
            if held is not None and signed.manifest.version not in self._pinned:
                for name in held.wanted - {held.full}:
                    self._discard(held, name)

    def pin(self, version: int) -> None:
        """Protect a version from eviction until it is unpinned as often."""
        with self._lock:
            self._pinned.append(version)

    def unpin(self, version: int) -> None:
        with self._lock:
            self._pinned.remove(version)

    # -- called with the lock held

    def _open_payload(self, held: Held, name: str) -> PayloadFile:
        if name not in held.files:
            payload = held.payload(name)
            reader = self.reader if name == held.full else None
            held.files[name] = PayloadFile(
                payload,
                final=self._folder.final(held.signed, payload),
                part=self._folder.part(held.signed, payload),
                arrived=lambda index: self.arrived(name, index),
                written=partial(reader.chunk, name, payload) if reader is not None else lambda _index, _data: None,
            )
        return held.files[name]

    def _require(self, signed: SignedManifest) -> Held:
        held = self._held.get(signed.manifest.version)
        if held is None or held.signed.digest != signed.digest:
            raise LocalFault(f"version {signed.manifest.version} was dropped while it was in use", code="not_held")
        return held

    def _hold(self, signed: SignedManifest, *, wanted: bool) -> Held:
        names = tuple(payload.digest for payload in signed.manifest.payloads)
        held = Held(signed, names, set(names) if wanted else set(), used=0)
        self._touch(held)
        self._held[signed.manifest.version] = held
        self._claim_payloads(held)
        return held

    def _claim_payloads(self, held: Held) -> None:
        """Serve this version's payloads from its files, except those an earlier version already serves."""
        for name in held.names:
            other = self._held.get(self._owner.get(name, -1))
            if other is None or name not in other.wanted:
                self._owner[name] = held.signed.manifest.version

    def _reassign_payload(self, held: Held, name: str) -> None:
        """Let another version serve a payload this one dropped: the same weights may be published twice."""
        version = held.signed.manifest.version
        if self._owner.get(name) == version:
            others = [other for other, rival in self._held.items() if other != version and name in rival.wanted]
            if others:
                self._owner[name] = min(others)
            elif version not in self._held:
                del self._owner[name]

    def _want(self, held: Held, name: str) -> None:
        if name not in held.wanted:
            self._make_room(held.signed, [held.payload(name)])
            held.wanted.add(name)
            self._claim_payloads(held)

    def _forget(self, version: int) -> None:
        held = self._held.pop(version, None)
        if held is not None:
            for name in set(held.names):
                self._reassign_payload(held, name)
            for file in held.files.values():
                file.close()

    def _discard(self, held: Held, name: str) -> None:
        held.wanted.discard(name)
        self._reassign_payload(held, name)
        if (file := held.files.pop(name, None)) is not None:
            file.delete()
        self._folder.delete(held.signed, held.payload(name))

    def _touch(self, held: Held) -> None:
        self._clock += 1
        held.used = self._clock
        self._folder.note_use(held.signed)

    def _make_room(self, signed: SignedManifest, payloads: Iterable[Payload]) -> None:
        """Drop older versions until these payloads fit. Raises LocalFault "quota"."""
        if self._quota_bytes is None:
            return
        version, needed = signed.manifest.version, sum(each.payload_bytes for each in payloads)
        if needed > self._quota_bytes:
            raise LocalFault(f"version {version} exceeds the quota of {self._quota_bytes} bytes", code="quota")
        while self.planned_bytes + needed > self._quota_bytes:
            older = [held for held in self._held if held < version and held not in self._pinned]
            if not older:
                raise LocalFault(f"the quota of {self._quota_bytes} bytes is full", code="quota")
            self.drop(min(older))

    def _trim(self, extra: int = 0) -> None:
        """Evict excess results, then excess deltas, never a pinned version."""
        if self._keep is not None:
            for held in excess_results(self._held.values(), keep=self._keep + extra, keep_base=self._keep_base):
                if held.signed.manifest.version not in self._pinned:
                    self._discard(held, held.full)
        if self.keep_deltas is not None:
            newest = set(sorted(self._held, reverse=True)[: self.keep_deltas])
            for version, held in list(self._held.items()):
                if version not in newest and version not in self._pinned and held.full not in held.wanted:
                    self.drop(version)

    # -- start

    def _recover(self, run_id: str, limits: Limits) -> None:
        self._folder.prepare()
        for signed in self._folder.manifests(run_id=run_id, limits=limits):
            self._restore(signed)
        self._folder.delete_orphans(held.signed for held in self._held.values())

    def _restore(self, signed: SignedManifest) -> None:
        """Restore a held version; payloads without any file are not wanted until requested."""
        self._clock += 1
        names = tuple(payload.digest for payload in signed.manifest.payloads)
        held = Held(signed, names, set(), used=self._clock)
        held.wanted |= {each.digest for each in signed.manifest.payloads if self._folder.has(signed, each)}
        self._held[signed.manifest.version] = held
        self._claim_payloads(held)
