"""Datasets of a run in its backup: copied once each, since they never change, and verified on the way."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from msgspec import UnsetType

from coordinator.backup.manifest import BackupError, BackupManifest, HashingFile
from coordinator.run.home import Home
from node.datasets.folder import DATASETS, dataset_file
from node.protocol.run import FileSpec, RunSpec
from shardcast.content import file_digest
from shardcast.files import TEMPORARY_SUFFIX, sync_folder

_PIECE_BYTES: Final = 2**22


def copy_datasets(home: Home, folder: Path, *, verify: bool) -> tuple[str, ...]:
    """Copy the run's datasets and answers into the backup in `folder`; return the digests of those that it holds then.

    Copies none that it has already (intact, with `verify`), and none that the data folder lacks or has damaged.
    """
    sources, held = home.dataset_files, []
    for dataset in home.spec.dataset_files:
        target = folder / DATASETS / dataset_file(dataset.digest)
        source = sources.get(dataset.digest)
        has_it = _is_whole(target, dataset) if verify else target.exists()
        is_secret = dataset in home.spec.answers
        if has_it or (source is not None and _copy(source, target, dataset, is_secret=is_secret)):
            held.append(dataset.digest)
    return tuple(held)


def held_datasets(manifest: BackupManifest, spec: RunSpec) -> tuple[FileSpec, ...]:
    """Return the run's datasets and files of answers that the backup holds."""
    held = () if isinstance(manifest.datasets, UnsetType) else manifest.datasets
    return tuple(one for one in spec.dataset_files if one.digest in held)


def verify_datasets(folder: Path, manifest: BackupManifest, spec: RunSpec) -> None:
    """Verify the datasets of the backup in `folder`; raises BackupError."""
    for dataset in held_datasets(manifest, spec):
        path = folder / DATASETS / dataset_file(dataset.digest)
        if not path.is_file():
            raise BackupError(f"{path} is missing")
        if not _is_whole(path, dataset):
            raise BackupError(f"{path} is damaged: it is not the run's dataset")


def restore_datasets(folder: Path, manifest: BackupManifest, spec: RunSpec, *, data: Path) -> None:
    """Copy the datasets of the backup in `folder` into the data folder `data`; raises BackupError and OSError."""
    for dataset in held_datasets(manifest, spec):
        path = folder / DATASETS / dataset_file(dataset.digest)
        if not _copy(path, data / DATASETS / path.name, dataset, is_secret=dataset in spec.answers):
            raise BackupError(f"{path} is damaged: it is not the run's dataset")


def _is_whole(path: Path, dataset: FileSpec) -> bool:
    return path.is_file() and path.stat().st_size == dataset.bytes and file_digest(path) == dataset.digest


def _copy(source: Path, target: Path, dataset: FileSpec, *, is_secret: bool) -> bool:
    """Copy `source` durably to `target`; return False, and leave nothing, if it is not `dataset`.

    One that `is_secret` is for its owner alone, whoever could read the source; others keep the source's mode.
    """
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    try:
        temporary.touch(mode=0o600)
        with source.open("rb") as file, temporary.open("wb") as copy:
            hashed = HashingFile(copy)
            while hashed.size_bytes <= dataset.bytes and (piece := file.read(_PIECE_BYTES)):
                hashed.write(piece)
            copy.flush()
            os.fsync(copy.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if hashed.digest != dataset.digest:
        temporary.unlink()
        return False
    if not is_secret:
        shutil.copymode(source, temporary)
    temporary.rename(target)
    sync_folder(target.parent)
    return True
