"""A folder of datasets under their digests, as an operator's data folder has one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from node.errors import ConfigError
from node.protocol.environment_spec import DATASET, DatasetSpec, FileSpec, PackageSpec
from node.protocol.run import RunSpec
from shardcast.content import file_digest

DATASETS = "datasets"
"""Folder of the datasets in a run's data folder, and in the state of whoever fetches them."""


def dataset_file(digest: str) -> str:
    """Return the name of a dataset's file in a folder of datasets."""
    return f"{digest}.dataset"


def find_datasets(folder: Path, wanted: Iterable[FileSpec]) -> dict[str, Path]:
    """Return those of the `wanted` files that are in `folder`, by digest; nothing is verified."""
    paths = {one.digest: folder / dataset_file(one.digest) for one in wanted}
    return {digest: path for digest, path in paths.items() if path.is_file()}


def match_answers(files: Iterable[Path], spec: RunSpec) -> dict[str, Path]:
    """Return files of the run's answers by digest; blocks. Raises ConfigError for one that is none, OSError."""
    found = {file_digest(path): path for path in files}
    for digest in found.keys() - {one.digest for one in spec.answers}:
        raise ConfigError(f"{found[digest]} is no file of answers of this run.")
    return found


def dataset_name(spec: RunSpec, digest: str) -> str:
    """Return what people call a file of the run, by the first environment that needs it: "dataset NAME", "lock of
    PACKAGE VERSION".
    """
    for one in spec.environments:
        if isinstance(one.dataset, DatasetSpec) and one.dataset.digest == digest:
            return f"dataset {one.name.removeprefix(DATASET)}"
        if isinstance(one.package, PackageSpec) and one.package.lock.digest == digest:
            return f"lock of {one.package.name} {one.package.version}"
    raise ValueError(f"the run has no dataset {digest}")
