"""Options of commands that need a run's datasets and have no data folder of its."""

from __future__ import annotations

from pathlib import Path

import click

from node.commands.options import EXISTING_FOLDER
from node.datasets.folder import DATASETS

datasets_option = click.option(
    "--datasets",
    type=EXISTING_FOLDER,
    metavar="FOLDER",
    help="Where the run's datasets are, such as datasets/ in its --data.  [default: datasets/ beside --run]",
)


def datasets_folder(run_file: Path, given: Path | None) -> Path:
    """Return the folder of the datasets that a run.toml names."""
    return given or run_file.parent / DATASETS
