"""Old versions of an origin: kept as deltas from a version that stays whole.

A version's folded delta, the one that reaches furthest back, leads from a version that is whole or has such a delta
itself; so whoever follows these deltas gets to a whole version. A whole file is deleted only after the deltas were
applied and every chunk had its digest; a crash at any instruction leaves the file, or deltas that reproduce it.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from shardcast.errors import PeerFault
from shardcast.files import sync_file, sync_folder
from shardcast.manifest import SignedManifest
from shardcast.store.patching import count_mismatches
from shardcast.store.payload_file import PayloadFile
from shardcast.store.versions import Store

logger = logging.getLogger(__name__)

FOLDS_PER_WHOLE: Final = 4
"""Folded deltas from one whole version to the next: each costs whoever wants an old version another pass."""


def archive(store: Store, *, keep: int, fold_every: int, threads: int, stopping: threading.Event) -> None:
    """Delete the whole files of old versions that deltas reproduce, until `stopping` is set.

    Whole stay the `keep` newest, the newest whose number is a multiple of `fold_every` (the base of deltas to come),
    each whose number is a multiple of `FOLDS_PER_WHOLE * fold_every`, and what deltas do not reproduce. Raises
    LocalFault and OSError.
    """
    whole = {signed.manifest.version: (signed, file) for signed, file in store.whole_results()}
    staying = {*list(whole)[:keep], *[version for version in whole if version % fold_every == 0][:1]}
    for version, (signed, _) in list(whole.items()):  # newest first, while the bases of most are still whole
        if version in staying or version % (FOLDS_PER_WHOLE * fold_every) == 0:
            continue
        if stopping.is_set():
            return
        bases = {other: file for other, (_, file) in whole.items() if other != version}
        route = _route(store, signed, bases)
        if route is not None and _reproduces(signed, *route, threads):
            store.discard_result(signed)
            del whole[version]
            logger.info("version %d is kept as deltas (%d bytes free)", version, signed.manifest.full.payload_bytes)


def _route(
    store: Store, signed: SignedManifest, whole: dict[int, PayloadFile]
) -> tuple[PayloadFile, list[Path]] | None:
    """Follow the folded deltas back to a whole version; return it and the deltas from it, None if one is missing."""
    steps = list[Path]()
    while (delta := signed.manifest.folded_delta) is not None:
        file, base = store.payload(delta.payload.digest), store.get(delta.base_version)
        if file is None or file.path is None or base is None or base.manifest.result_digest != delta.base:
            return None
        steps.insert(0, file.path)
        if delta.base_version in whole:
            return whole[delta.base_version], steps
        signed = base
    return None


def _reproduces(signed: SignedManifest, base: PayloadFile, steps: list[Path], threads: int) -> bool:
    """Return whether the deltas, durably on disk, give every chunk of a version; raises LocalFault and OSError."""
    version = signed.manifest.version
    try:
        for path in steps:
            sync_file(path)
            sync_folder(path.parent)
        wrong = count_mismatches(base, steps, signed.manifest.full, threads=threads)
    except PeerFault as error:
        logger.warning("version %d stays whole: a delta to it is damaged: %s", version, error)
        return False
    if wrong:
        logger.warning("version %d stays whole: deltas give %d wrong chunks; check the disk", version, wrong)
    return not wrong
