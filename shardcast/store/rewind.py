"""Older versions as deltas back from the newest: what a client may need again, at a hundredth of the disk.

    <root>/rewinds/<version>-<base>.delta    makes <version> of <base>, a later one that is whole or has such a delta

The deltas are of this machine's own making, in the format of `shardcast.codec.delta`. A whole file is deleted only
after its delta was applied and every chunk had its digest, and what is made of them again is checked against the
manifest like anything that is fetched; so the files in the folder are trusted for nothing. Thread-safe.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from shardcast.errors import PeerFault
from shardcast.files import as_local_fault, sync_file, sync_folder
from shardcast.manifest import SignedManifest
from shardcast.store.patching import count_mismatches, patch
from shardcast.store.payload_file import PayloadFile
from shardcast.store.reading import REWINDS, rewind_files
from shardcast.store.versions import Store

logger = logging.getLogger(__name__)

MAX_SHARE_OF_FULL: Final = 0.8
"""A version whose delta is larger stays whole."""
MAX_REWOUND: Final = 32
"""Versions, so deltas that are applied one after the other at most."""


class Rewinds:
    """The rewound versions of one store: of its newest `keep`, all but the newest `spare` and the one in use."""

    def __init__(self, store: Store, *, keep: int, spare: int, threads: int) -> None:
        self._store, self._threads = store, threads
        self._keep = min(keep, MAX_REWOUND)
        self._folder = store.root / REWINDS
        self._spare = spare
        self._too_large = set[int]()
        self._lock = threading.Lock()
        try:
            self._folder.mkdir(exist_ok=True)
            self._files = {version: (base, path) for version, base, path in rewind_files(store.root)}
        except OSError as error:
            raise as_local_fault(error, self._folder) from error

    def has(self, version: int) -> bool:
        """Return whether deltas lead from a whole version to this one."""
        return self._route(version) is not None

    def restore(self, signed: SignedManifest, result: PayloadFile) -> None:
        """Write what deltas give of a version; chunks that come out wrong stay missing. Raises LocalFault."""
        with self._lock:
            if (route := self._route(signed.manifest.version)) is None:
                return
            base, steps = route
            try:
                wrong = patch(base, steps, result, threads=self._threads)
            except PeerFault as error:
                logger.warning("%s is damaged: %s", self._folder, error)
                wrong = result.payload.chunk_count
            if wrong:
                self._forget(signed.manifest.version)

    def settle(self, completed: int) -> None:
        """Rewind every whole version but the newest ones, by their numbers, and `completed`, which is in use.

        Who lags by a version uses each one after the next one has come: by the last use the wrong ones would stay.
        Versions beyond the newest `keep` are deleted. Raises LocalFault.
        """
        with self._lock:
            whole = self._store.whole_results()
            kept = {signed.manifest.version for signed in self._store.versions()[-self._keep :]}
            # One without a way from a whole version is of no use: a delta on the way was damaged.
            for version in [known for known in self._files if known not in kept or self._route(known) is None]:
                self._forget(version)
            for signed, file in whole[self._spare :]:
                version = signed.manifest.version
                if version == completed or version in self._too_large:
                    continue
                if version not in kept or version in self._files or self._rewind(signed, file, *whole[0]):
                    self._store.discard_result(signed)

    def _rewind(self, signed: SignedManifest, file: PayloadFile, later: SignedManifest, base: PayloadFile) -> bool:
        """Make and try the delta to a version from a later one; return whether it may take the version's place."""
        from shardcast.codec import delta  # noqa: PLC0415  numpy is imported only when deltas are made

        full = signed.manifest.full
        made = self._store.incoming / f"rewind-{signed.manifest.version}"
        if file.path is None or base.path is None:
            return False
        size_bytes = delta.encode(
            base.path,
            file.path,
            made,
            chunk_bytes=full.chunk_bytes,
            max_bytes=int(MAX_SHARE_OF_FULL * full.payload_bytes),
            threads=self._threads,
        )
        if size_bytes is None or count_mismatches(base, [made], full, threads=self._threads):
            made.unlink(missing_ok=True)
            self._too_large.add(signed.manifest.version)
            return False
        path = self._folder / f"{signed.manifest.version}-{later.manifest.version}.delta"
        try:
            sync_file(made)
            made.rename(path)
            sync_folder(self._folder)
        except OSError as error:
            raise as_local_fault(error, path) from error
        self._files[signed.manifest.version] = later.manifest.version, path
        logger.info("version %d is kept as %d bytes", signed.manifest.version, size_bytes)
        return True

    def _route(self, version: int) -> tuple[PayloadFile, list[Path]] | None:
        """Find the whole version that leads to this one, and the deltas from it in order; None if one is missing."""
        steps = list[Path]()
        while (found := self._files.get(version)) is not None and len(steps) < MAX_REWOUND:
            version, path = found
            steps.insert(0, path)
            if (base := self._store.whole_result(version)) is not None:
                return base, steps
        return None

    def _forget(self, version: int) -> None:
        _, path = self._files.pop(version)
        path.unlink(missing_ok=True)
