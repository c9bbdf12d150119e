"""`swarmproof problems` that is killed: what it had measured is kept, and the result is as if it had been left alone.

Filtering a dataset for a model of real size takes hours of a machine; an operator whose machine restarts must not begin
anew, and must not start a run on other problems than they would have got.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dataset_files import environment_of, made, sums
from locations import ROOT
from waiting import until

RUN_TOML = """
name = "t"

[model]
initial = "random-tiny"

[sampling]
max_new_tokens = 8

[[environments]]
name = "arithmetic"

[[environments]]
name = "dataset:sums"
dataset = {{ digest = "{digest}", bytes = {bytes} }}
problems = {{ count = 200 }}
"""


def command(folder: Path, out: str) -> list[str]:
    options = ["--count", "200", "--samples", "8", "--min", "0", "--datasets", str(folder), "--json"]
    return [sys.executable, "-m", "node.cli", "problems", "--run", str(folder / "run.toml"), "--out", out, *options]


def batches(file: Path) -> list[bytes]:
    """The whole lines of what is measured, behind the first one."""
    return [line for line in file.read_bytes().splitlines(keepends=True)[1:] if line.endswith(b"\n")]


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_commands")
def test_problems_that_is_killed_goes_on_and_keeps_the_same_problems(tmp_path: Path) -> None:
    dataset = made(tmp_path, sums(200))
    spec = environment_of(dataset).dataset
    (tmp_path / "run.toml").write_text(RUN_TOML.format(digest=spec.digest, bytes=spec.bytes))
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    measured = tmp_path / "killed.toml.measured"
    begun = subprocess.Popen(
        command(tmp_path, str(tmp_path / "killed.toml")), cwd=ROOT, env=variables, stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: measured.exists() and len(batches(measured)) >= 2, seconds=300)
    finally:
        begun.send_signal(signal.SIGKILL)
        begun.wait()
    assert not (tmp_path / "killed.toml").exists()
    before = batches(measured)
    assert 2 <= len(before) < 14, "it was killed too late to have anything left"

    def finish(out: str) -> dict[str, object]:
        ended = subprocess.run(
            command(tmp_path, str(tmp_path / out)), cwd=ROOT, env=variables, stdout=subprocess.PIPE, check=True
        )
        return json.loads(ended.stdout)["environments"]

    assert finish("killed.toml") == finish("alone.toml")
    assert (tmp_path / "killed.toml").read_text() == (tmp_path / "alone.toml").read_text()
    assert batches(measured)[: len(before)] == before
    assert measured.read_bytes() == (tmp_path / "alone.toml.measured").read_bytes()
