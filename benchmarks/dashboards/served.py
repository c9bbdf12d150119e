"""A coordinator process over the database of a run that has been going for long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.dashboards.stocked import Stock, stock
from benchmarks.loading.coordinator import running_command, wait_for_port
from coordinator.run.definition import read_run_file
from coordinator.run.home import create_home
from node.keys.identity import create_key

RUN_TOML = """
name = "A long run"

[model]
initial = "random-tiny"

[[environments]]
name = "arithmetic"

[training]
steps = 100000
"""


@dataclass(frozen=True)
class StockedRun:
    """URL of the run's pages, and the ids of its submissions."""

    url: str
    submissions: list[str]


@contextmanager
def serving(folder: Path, what: Stock) -> Iterator[StockedRun]:
    """Run an operator's command on the database that `what` describes."""
    folder.mkdir()
    (folder / "run.toml").write_text(RUN_TOML, encoding="utf-8")
    key = create_key(folder / "run.key")
    _, spec = read_run_file(folder / "run.toml")
    home = create_home(folder / "data", public_key=key.public_key().public_bytes_raw(), spec=spec)
    submissions = stock(home, what, key=key, now=time.time())
    home.database.close()
    run = ["--run", "run.toml", "--key", "run.key", "--uncalibrated"]
    command = ["coordinator", "--no-peer", *run, "--data", "data", "--port", "0"]
    with running_command(folder, "coordinator", [*command, "--relay", "http://192.0.2.1:8710"]) as (output, process):
        yield StockedRun(f"http://127.0.0.1:{wait_for_port(output, process)}", submissions)
