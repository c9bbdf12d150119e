"""Chunks on disk, addressed by digest, and the manifests that say which of them to keep.

    <root>/chunks/<2 hex>/<digest>     verified before the rename that makes it visible
    <root>/manifests/<version>         the envelope as it was received
    <root>/incoming/                   temporary files, emptied at the start

Safe against kill -9 at any instruction. Chunks are not fsynced one by one, so a power cut may leave one
torn: a chunk found at the start is hashed again before it is first served, and dropped if it is wrong.
All methods may be called from any thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from pathlib import Path

from shardcast import wire
from shardcast.errors import CorruptChunk, LocalFault, PeerFault
from shardcast.files import FolderLock, as_local_fault, read_bounded, write_atomically
from shardcast.manifest import DEFAULT_LIMITS, Limits, SignedManifest, open_manifest

logger = logging.getLogger(__name__)

_ENVELOPE_OVERHEAD_BYTES = 1024


class ChunkStore:
    """What one origin or relay holds of one run. `keep` None keeps every version; `quota_bytes` None is no quota.

    The quota counts every distinct chunk of every held version, arrived or not, so that it cannot be
    exceeded later by chunks that were promised room.
    """

    def __init__(
        self,
        root: Path,
        *,
        run_id: str,
        keep: int | None = 3,
        quota_bytes: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if keep is not None and keep < 1:
            raise LocalFault("a store must keep at least one version", code="bad_setting")
        self._lock_file = FolderLock(root)
        self._chunks, self._manifests, self._incoming = root / "chunks", root / "manifests", root / "incoming"
        self._run_id, self._keep, self._quota_bytes, self._limits = run_id, keep, quota_bytes, limits
        self._lock = threading.RLock()
        self._names = itertools.count()
        self._versions: dict[int, SignedManifest] = {}
        self._by_digest: dict[str, int] = {}
        self._references: Counter[str] = Counter()
        self._staged: set[str] = set()
        self._lengths: dict[str, int] = {}
        self._planned_bytes = 0
        self._present: set[str] = set()
        self._complete: set[int] = set()
        self._verified: set[str] = set()
        try:
            self._recover()
        except OSError as error:
            self._lock_file.release()
            raise as_local_fault(error, root) from error
        except LocalFault:
            self._lock_file.release()
            raise

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock_file.release()

    # -- manifests

    def versions(self) -> list[SignedManifest]:
        """Every held manifest, oldest first."""
        with self._lock:
            return [self._versions[version] for version in sorted(self._versions)]

    def get(self, version: int) -> SignedManifest | None:
        return self._versions.get(version)

    def by_digest(self, digest: str) -> SignedManifest | None:
        return self._versions.get(self._by_digest.get(digest, -1))

    def manifest_path(self, version: int) -> Path:
        """Where the envelope of a held version lies."""
        return self._manifests / f"{version:016d}"

    def add_manifest(self, signed: SignedManifest) -> None:
        """Hold a checked version: make room by `keep` and quota, then persist it.

        Raises LocalFault "quota" when it would not fit even alone, "version_conflict" when another manifest
        holds its place, and "too_old" when `keep` newer versions are held.
        """
        with self._lock:
            version = signed.manifest.version
            held = self._versions.get(version)
            if held is not None:
                if held.digest != signed.digest:
                    raise LocalFault(f"version {version} is held with another manifest", code="version_conflict")
                return
            self._make_room(signed)
            write_atomically(self.manifest_path(version), signed.envelope)
            self._hold(signed)

    def drop(self, version: int) -> None:
        """Forget a version and delete the chunks that no other version needs."""
        with self._lock:
            signed = self._versions.pop(version, None)
            if signed is None:
                return
            # The manifest goes first: a crash in between leaves orphans, which the next start deletes.
            self.manifest_path(version).unlink(missing_ok=True)
            del self._by_digest[signed.digest]
            self._complete.discard(version)
            for digest, _ in signed.manifest.chunks():
                self._references[digest] -= 1
                if self._references[digest] <= 0:
                    del self._references[digest]
                    self._release(digest)

    # -- chunks

    @property
    def planned_bytes(self) -> int:
        """Bytes of every distinct chunk that is held or promised room."""
        return self._planned_bytes

    def wants(self, digest: str) -> bool:
        """Whether a held version needs this chunk."""
        return digest in self._references

    def holds(self, digest: str) -> bool:
        return digest in self._present

    def missing(self, version: int) -> list[int]:
        """Indices of the chunks of a held version that are not here, each distinct chunk once."""
        with self._lock:
            signed = self._versions.get(version)
            if signed is None or version in self._complete:
                return []
            first: dict[str, int] = {}
            for index, (digest, _) in enumerate(signed.manifest.chunks()):
                if digest not in self._present:
                    first.setdefault(digest, index)
            if not first:
                self._complete.add(version)
            return list(first.values())

    def ready_path(self, digest: str) -> Path | None:
        """The file of a chunk that this process has verified; cheap. None: ask `verified_path`."""
        return self._path(digest) if digest in self._verified else None

    def verified_path(self, digest: str) -> Path | None:
        """The file of a chunk, hashed again if this process has not yet; None if it is not here."""
        if digest in self._verified:
            return self._path(digest)
        if digest not in self._present:
            return None
        path = self._path(digest)
        try:
            intact = wire.digest(read_bounded(path, max_bytes=self._limits.max_chunk_bytes)) == digest
        except (OSError, PeerFault):
            intact = False
        with self._lock:
            if digest not in self._present:
                return None
            if intact:
                self._verified.add(digest)
                return path
            logger.warning("chunk %s is damaged on disk; dropped", digest[:16])
            self._present.discard(digest)
            self._complete.clear()
            path.unlink(missing_ok=True)
            return None

    def put(self, digest: str, data: bytes | bytearray, *, staged: bool = False) -> bool:
        """Verify `data`, then make it visible as `digest`; False if it was here already.

        `staged` keeps a chunk that no version needs yet, until `add_manifest` or `discard_staged`. Raises
        CorruptChunk, and LocalFault "unwanted", "quota" or "disk_full".
        """
        if wire.digest(memoryview(data)) != digest:
            raise CorruptChunk(f"{len(data)} bytes that are not chunk {digest[:16]}…")
        with self._lock:
            self._plan(digest, len(data), staged=staged)
            if digest in self._verified:
                return False
        temporary = self._incoming / f"{digest}.{next(self._names)}"
        try:
            temporary.write_bytes(data)
            with self._lock:
                return self._make_visible(temporary, digest)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise as_local_fault(error, temporary) from error

    def discard_staged(self) -> None:
        """Delete the chunks that were staged for a version that was not added."""
        with self._lock:
            staged, self._staged = self._staged, set()
            for digest in staged:
                if digest not in self._references:
                    self._release(digest)

    # -- inside the lock

    def _plan(self, digest: str, length: int, *, staged: bool) -> None:
        if digest in self._lengths:
            return
        if not staged:
            raise LocalFault(f"no held version needs chunk {digest[:16]}…", code="unwanted")
        if self._quota_bytes is not None and self._planned_bytes + length > self._quota_bytes:
            raise LocalFault(f"the quota of {self._quota_bytes} bytes is full", code="quota")
        self._staged.add(digest)
        self._lengths[digest] = length
        self._planned_bytes += length

    def _make_visible(self, temporary: Path, digest: str) -> bool:
        if digest not in self._lengths:  # its version was dropped while it was being written
            temporary.unlink()
            return False
        temporary.rename(self._path(digest))
        self._present.add(digest)
        self._verified.add(digest)
        return True

    def _release(self, digest: str) -> None:
        self._planned_bytes -= self._lengths.pop(digest, 0)
        self._present.discard(digest)
        self._verified.discard(digest)
        self._path(digest).unlink(missing_ok=True)

    def _make_room(self, signed: SignedManifest) -> None:
        version = signed.manifest.version
        if self._keep is not None:
            newer = sum(1 for held in self._versions if held > version)
            if newer >= self._keep:
                raise LocalFault(f"version {version} is older than the {self._keep} that are kept", code="too_old")
            for old in sorted(self._versions)[: max(0, len(self._versions) + 1 - self._keep)]:
                self.drop(old)
        if self._quota_bytes is None:
            return
        if sum(dict(signed.manifest.chunks()).values()) > self._quota_bytes:
            raise LocalFault(f"version {version} exceeds the quota of {self._quota_bytes} bytes", code="quota")
        while self._planned_bytes + self._extra_bytes(signed) > self._quota_bytes:
            older = [held for held in self._versions if held < version]
            if not older:
                raise LocalFault(f"the quota of {self._quota_bytes} bytes is full", code="quota")
            self.drop(min(older))

    def _extra_bytes(self, signed: SignedManifest) -> int:
        new = {digest: length for digest, length in signed.manifest.chunks() if digest not in self._lengths}
        return sum(new.values())

    def _hold(self, signed: SignedManifest) -> None:
        self._versions[signed.manifest.version] = signed
        self._by_digest[signed.digest] = signed.manifest.version
        for digest, length in signed.manifest.chunks():
            self._references[digest] += 1
            self._staged.discard(digest)
            if digest not in self._lengths:
                self._lengths[digest] = length
                self._planned_bytes += length

    def _path(self, digest: str) -> Path:
        return self._chunks / digest[:2] / digest

    # -- start

    def _recover(self) -> None:
        for folder in (self._manifests, self._incoming):
            folder.mkdir(parents=True, exist_ok=True)
        for number in range(256):
            (self._chunks / f"{number:02x}").mkdir(parents=True, exist_ok=True)
        for leftover in self._incoming.iterdir():
            leftover.unlink()
        for path in sorted(self._manifests.iterdir()):
            self._recover_manifest(path)
        for path in self._chunks.glob("*/*"):
            if path.stat().st_size == self._lengths.get(path.name):
                self._present.add(path.name)
            else:
                path.unlink()

    def _recover_manifest(self, path: Path) -> None:
        try:
            data = read_bounded(path, max_bytes=self._limits.max_manifest_bytes + _ENVELOPE_OVERHEAD_BYTES)
            signed = open_manifest(data, run_id=self._run_id, publisher_key=None, limits=self._limits)
        except PeerFault as error:
            if error.code == "wrong_run":
                raise LocalFault(f"{path.parent} holds another run; use another folder", code="wrong_run") from error
            logger.warning("dropping %s: %s", path, error)
            path.unlink()
            return
        if path == self.manifest_path(signed.manifest.version):
            self._hold(signed)
        else:  # left by a crash between writing and renaming
            path.unlink()
