"""Reading a run.toml."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from coordinator.errors import BadConfiguration
from coordinator.run.near_keys import unknown_key
from node.datasets.folder import dataset_file, find_datasets
from node.environments import lacks_answers, load_environment
from node.environments.isolated.store import EnvironmentStore
from node.errors import DatasetFault
from node.protocol.chat import ChatFormat
from node.protocol.environment_spec import DATASET, EnvironmentSpec, PackageSpec
from node.protocol.run import HonestSpec, RunSpec, parse_run_toml
from shardcast.errors import Malformed
from shardcast.files import write_atomically

UNCALIBRATED = (
    "run.toml has no levels of honest work (limits.honest), and a run's limits cannot change once it has begun"
)


def is_calibrated(spec: RunSpec) -> bool:
    """Return whether the rules have levels of honest work, as `swarmproof calibrate` finds them."""
    return spec.limits.honest != HonestSpec()


def keep_locks(spec: RunSpec, folder: Path) -> None:
    """Put the locks of the run's environments into `folder`, from where every node gets them.

    Raises EnvironmentFault for an environment that is not installed here.
    """
    for environment in spec.environments:
        if isinstance(environment.package, PackageSpec):
            file = folder / dataset_file(environment.package.lock.digest)
            if not file.exists():
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(file, EnvironmentStore.default().find(environment.package).lock.encode())


def render_environments(environments: Sequence[EnvironmentSpec]) -> str:
    """Render the table of each environment, of which only the name is given."""
    return "\n\n".join(f"[[environments]]\nname = {json.dumps(each.name)}" for each in environments)


def read_run_file(path: Path, *, datasets: Path | None = None) -> tuple[str, RunSpec]:
    """Return the file's text and its RunSpec; raises BadConfiguration if this installation cannot run it.

    Datasets are verified where the folder `datasets` is given; raises DatasetFault for one that is missing or another,
    or whose answers are.
    """
    try:
        text = path.read_text(encoding="utf-8")
        spec = parse_run_toml(text)
    except UnicodeDecodeError as error:
        raise BadConfiguration(f"{path} is not UTF-8 text") from error
    except Malformed as error:
        said = unknown_key(str(error)) or f"{error}; docs/run-toml.md explains every key"
        raise BadConfiguration(f"{path} cannot define a run: {said.removeprefix('run.toml: ')}") from error
    here = {} if datasets is None else find_datasets(datasets, spec.dataset_files)
    # A name of a chat format is no data yet: `coordinator.run.chat`.
    chat = spec.sampling.chat if isinstance(spec.sampling.chat, ChatFormat) else None
    for environment in spec.environments:
        if datasets is not None or not environment.name.startswith(DATASET):
            loaded = load_environment(environment, here, chat=chat)
            if lacks_answers(loaded):
                raise DatasetFault(
                    f"the file of answers of {environment.name} is not in {datasets}", code="answers_missing"
                )
    return text, spec
