"""A folder of datasets under their digests, as an operator's data folder has one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from node.protocol.run import DATASET, DatasetSpec, RunSpec

DATASETS = "datasets"
"""Folder of the datasets in a run's data folder, and in the state of whoever fetches them."""


def dataset_file(digest: str) -> str:
    """Return the name of a dataset's file in a folder of datasets."""
    return f"{digest}.dataset"


def find_datasets(folder: Path, wanted: Iterable[DatasetSpec]) -> dict[str, Path]:
    """Return the files of those `wanted` datasets that are in `folder`, by digest; nothing is verified."""
    paths = {one.digest: folder / dataset_file(one.digest) for one in wanted}
    return {digest: path for digest, path in paths.items() if path.is_file()}


def dataset_name(spec: RunSpec, digest: str) -> str:
    """Return what people call a dataset of the run: "dataset NAME", by the first environment that draws from it."""
    for one in spec.environments:
        if isinstance(one.dataset, DatasetSpec) and one.dataset.digest == digest:
            return f"dataset {one.name.removeprefix(DATASET)}"
    raise ValueError(f"the run has no dataset {digest}")
