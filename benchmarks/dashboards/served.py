"""A coordinator process over the database of a run that has been going for long."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.dashboards.stocked import Stock, stock
from coordinator.run.definition import read_run_file
from coordinator.run.home import create_home
from node.keys.identity import create_key

START_SECONDS = 60.0
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
class Served:
    """Where its pages are, and what was submitted."""

    url: str
    submissions: list[str]


@contextmanager
def serving(folder: Path, what: Stock) -> Iterator[Served]:
    """The command of an operator, on the database that `what` says."""
    folder.mkdir()
    (folder / "run.toml").write_text(RUN_TOML, encoding="utf-8")
    key = create_key(folder / "run.key")
    _, spec = read_run_file(folder / "run.toml")
    home = create_home(folder / "data", public_key=key.public_key().public_bytes_raw(), spec=spec)
    submissions = stock(home, what, now=time.time())
    home.database.close()
    command = [sys.executable, "-m", "node.cli", "coordinator", "--no-peer", "--run", "run.toml", "--key", "run.key"]
    output = folder / "coordinator.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--data", "data", "--port", "0", "--relay", "http://192.0.2.1:8710"],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Served(_url(output, process), submissions)
    finally:
        process.terminate()
        process.wait(30)


def _url(output: Path, process: subprocess.Popen[bytes]) -> str:
    """Where it says that it serves, once it does."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"serving at (http://127\.0\.0\.1:\d+)", output.read_text(encoding="utf-8"))
        if found:
            with contextlib.suppress(URLError), urlopen(f"{found[1]}/health", timeout=5):  # noqa: S310
                return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the coordinator did not start:\n{output.read_text(encoding='utf-8')}")
