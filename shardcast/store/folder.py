"""The files of a store's folder: their names, and what is found of them at the start.

<root>/manifests/<version>                  the envelope as it was received
<root>/versions/<version>-<digest16>.bin    complete and verified; <digest16> begins the manifest digest
<root>/deltas/<version>-<digest16>.delta    likewise a delta; <digest16> begins its payload's digest
<root>/downloads/                           incomplete files with their journals
<root>/incoming/                            temporary files, emptied at the start
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from shardcast.errors import LocalFault, PeerFault
from shardcast.manifest import Limits, Payload, SignedManifest
from shardcast.store.reading import DELTAS, MANIFESTS, VERSIONS, load_manifest, payload_path

logger = logging.getLogger(__name__)


class StoreFolder:
    """A store's folder, which its owner has locked."""

    def __init__(self, root: Path) -> None:
        self.root, self.incoming, self._downloads = root, root / "incoming", root / "downloads"

    def manifest(self, version: int) -> Path:
        """Return the path of a held version's envelope."""
        return self.root / MANIFESTS / f"{version:016d}"

    def final(self, signed: SignedManifest, payload: Payload) -> Path:
        """Return the path of a payload once it is complete."""
        return payload_path(self.root, signed, payload)

    def part(self, signed: SignedManifest, payload: Payload) -> Path:
        """Return the path of a payload while it is not; its journal lies beside it."""
        return self._downloads / f"{self.final(signed, payload).name}.part"

    def has(self, signed: SignedManifest, payload: Payload) -> bool:
        """Return whether there is a file of a payload, complete or not."""
        return self.final(signed, payload).exists() or self.part(signed, payload).exists()

    def delete(self, signed: SignedManifest, payload: Payload) -> None:
        """Delete the files of a payload."""
        for path in self._files(signed, payload):
            path.unlink(missing_ok=True)

    def note_use(self, signed: SignedManifest) -> None:
        """Mark a version's result as used now, for the order of `manifests`."""
        path = self.final(signed, signed.manifest.full)
        if path.exists():
            # Last use is the time of access: that of modification tells readers that the file is still the same.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def prepare(self) -> None:
        """Make the folders that are missing, and empty the one of temporary files."""
        for folder in (self.root / MANIFESTS, *self._payload_folders(), self.incoming):
            folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.incoming.iterdir():
            leftover.unlink()

    def manifests(self, *, run_id: str, limits: Limits) -> list[SignedManifest]:
        """Read the stored manifests, least recently used first, and delete the invalid ones.

        Raises LocalFault "wrong_run" for another run's.
        """
        paths = sorted((self.root / MANIFESTS).iterdir())
        found = [signed for path in paths if (signed := self._load(path, run_id, limits)) is not None]
        return sorted(found, key=self._last_used)

    def delete_orphans(self, held: Iterable[SignedManifest]) -> None:
        """Delete the payloads that none of the manifests names."""
        known = {
            path for signed in held for payload in signed.manifest.payloads for path in self._files(signed, payload)
        }
        for folder in self._payload_folders():
            for path in folder.iterdir():
                if path not in known:
                    path.unlink()

    def _payload_folders(self) -> tuple[Path, ...]:
        return self.root / VERSIONS, self.root / DELTAS, self._downloads

    def _files(self, signed: SignedManifest, payload: Payload) -> tuple[Path, ...]:
        part = self.part(signed, payload)
        return self.final(signed, payload), part, part.with_suffix(".journal")

    def _load(self, path: Path, run_id: str, limits: Limits) -> SignedManifest | None:
        try:
            signed = load_manifest(path, run_id=run_id, limits=limits)
        except PeerFault as error:
            if error.code == "wrong_run":
                raise LocalFault(f"{path.parent} holds another run; use another folder", code="wrong_run") from error
            logger.warning("dropping invalid manifest %s: %s", path, error)
            path.unlink()
            return None
        if path != self.manifest(signed.manifest.version):  # left by a crash between writing and renaming
            path.unlink()
            return None
        return signed

    def _last_used(self, signed: SignedManifest) -> tuple[int, int]:
        path = self.final(signed, signed.manifest.full)
        return path.stat().st_atime_ns if path.exists() else 0, signed.manifest.version
