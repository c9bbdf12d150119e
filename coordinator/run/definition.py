"""Reading a run.toml."""

from __future__ import annotations

from pathlib import Path

from coordinator.errors import BadConfiguration
from node.environments import load_environment, load_environments
from node.protocol.run import RunSpec, parse_run_toml
from shardcast.errors import Malformed


def read_run_file(path: Path) -> tuple[str, RunSpec]:
    """Return the file's text and its RunSpec; raises BadConfiguration if this installation cannot run it."""
    try:
        text = path.read_text(encoding="utf-8")
        spec = parse_run_toml(text)
    except UnicodeDecodeError as error:
        raise BadConfiguration(f"{path} is not UTF-8 text") from error
    except Malformed as error:
        raise BadConfiguration(f"{path} cannot define a run: {error}; docs/run-toml.md explains every key") from error
    if isinstance(spec.sampling.chat, str):  # not data yet: `coordinator.run.chat`
        for environment in spec.environments:
            load_environment(environment)
    else:
        load_environments(spec)
    return text, spec
