"""The folder of whole, verified versions a client keeps, and of downloads under way.

    downloads/<digest16>.part          under way, with its .journal
    versions/<version>-<digest16>.bin  whole and verified; <digest16> begins the manifest digest
    versions/<version>-<digest16>.manifest

The signed manifest lies next to the file, so that a restart needs no network to check it again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path

from shardcast.errors import PeerFault
from shardcast.files import read_bounded, write_atomically
from shardcast.manifest import SignedManifest
from shardcast.partfile import PartFile, file_digest, journal_of
from shardcast.trust import TrustedState

_ENVELOPE_OVERHEAD_BYTES = 1024


class VersionFolder:
    """At most `keep` versions, the least recently used dropped first. All methods may block on the disk."""

    def __init__(self, root: Path, *, keep: int, trust: TrustedState) -> None:
        self._versions, self._downloads = root / "versions", root / "downloads"
        self._keep, self._trust = max(1, keep), trust
        self._checked: set[Path] = set()
        self._lock = threading.Lock()
        for folder in (self._versions, self._downloads):
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, version: int, digest: str) -> Path:
        return self._versions / f"{version}-{digest[:16]}.bin"

    def manifest(self, version: int, digest: str) -> SignedManifest | None:
        """The manifest that was kept for this version, verified again."""
        path = self.path(version, digest).with_suffix(".manifest")
        limit = self._trust.limits.max_manifest_bytes + _ENVELOPE_OVERHEAD_BYTES
        try:
            data = read_bounded(path, max_bytes=limit)
            return self._trust.accept_archived(data, version, expected_digest=digest)
        except FileNotFoundError:
            return None
        except PeerFault:
            path.unlink()
            return None

    def held(self, signed: SignedManifest) -> Path | None:
        """The file of this version; hashed again when this process has not yet, and deleted if it is damaged."""
        path = self.path(signed.manifest.version, signed.digest)
        if not path.exists():
            return None
        if path not in self._checked and not _is_intact(path, signed):
            path.unlink(missing_ok=True)
            return None
        self._checked.add(path)
        os.utime(path)
        return path

    def begin(self, signed: SignedManifest) -> PartFile:
        """Open the download of a version where it stopped."""
        manifest_path = self.path(signed.manifest.version, signed.digest).with_suffix(".manifest")
        if not manifest_path.exists():
            write_atomically(manifest_path, signed.envelope)
        return PartFile(self._downloads / f"{signed.digest[:16]}.part", signed.manifest)

    def finish(self, part: PartFile, signed: SignedManifest, *, under_way: Collection[str]) -> Path:
        """Name the whole file, then delete what exceeds `keep`, and downloads other than those `under_way`."""
        path = self.path(signed.manifest.version, signed.digest)
        part.finish(path)
        os.utime(path)
        self._checked.add(path)
        with self._lock:
            self._prune({digest[:16] for digest in under_way})
        return path

    def _prune(self, under_way: Collection[str]) -> None:
        files = sorted(self._versions.glob("*.bin"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in files[self._keep :]:
            self._checked.discard(path)
            path.unlink()
        kept = {path.stem for path in files[: self._keep]}
        for manifest in self._versions.glob("*.manifest"):
            if manifest.stem not in kept and manifest.stem.rpartition("-")[2] not in under_way:
                manifest.unlink()
        for part in self._downloads.glob("*.part"):
            if part.stem not in under_way:
                part.unlink()
                journal_of(part).unlink(missing_ok=True)


def _is_intact(path: Path, signed: SignedManifest) -> bool:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        return (
            size_bytes == signed.manifest.result_bytes
            and file_digest(file.fileno(), size_bytes) == signed.manifest.result_digest
        )
