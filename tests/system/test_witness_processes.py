"""An operator who shows two histories under one key, two auditors, and a witness that is killed in between."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from waiting import until

from node.keys.identity import load_key
from node.protocol.checkpoints import log_key
from node.protocol.run import run_id_of

SWARMPROOF = [sys.executable, "-m", "node.cli"]
RUN_TOML = 'name = "{name}"\n\n[model]\ninitial = "random-tiny"\n\n[[environments]]\nname = "arithmetic"\n'


@contextmanager
def started(folder: Path, name: str, *arguments: str) -> Iterator[tuple[str, str]]:
    """A process, its output and its address; killed at the end as by kill -9."""
    output = folder / f"{name}.out"
    with output.open("wb") as file:
        process = subprocess.Popen([*SWARMPROOF, *arguments], cwd=folder, stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: "serving at" in output.read_text(), seconds=240, what=output.read_text)
        yield output.read_text(), re.findall(r"serving at (http://[0-9.:]+)", output.read_text())[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_commands")
def test_a_second_history_gets_no_signature_of_a_witness_that_was_killed(tmp_path: Path) -> None:
    subprocess.run([*SWARMPROOF, "keys", "new", "run.key"], cwd=tmp_path, check=True, capture_output=True)
    public_key = load_key(tmp_path / "run.key").public_key().public_bytes_raw()
    run_id = run_id_of(public_key)
    witness = ("witness", "--name", "witness.example/w1", "--log", str(log_key(run_id, public_key)), "--state", "w1")
    for name in ("one", "other"):
        (tmp_path / f"{name}.toml").write_text(RUN_TOML.format(name=name))

    def coordinator(name: str, address: str) -> tuple[str, ...]:
        files = (
            "--run",
            f"{name}.toml",
            "--key",
            "run.key",
            "--data",
            name,
            "--port",
            "0",
            "--no-peer",
            "--uncalibrated",
        )
        return ("coordinator", *files, "--witness", address)

    def audit(url: str, state: str, address: str) -> tuple[int, dict]:
        asked = ("--sample", "0", "--state", state, "--witness", address, "--json")
        ran = subprocess.run(
            [*SWARMPROOF, "audit", url, "--run-id", run_id, *asked], cwd=tmp_path, capture_output=True, check=False
        )
        return ran.returncode, json.loads(ran.stdout)

    with ExitStack() as first:
        said, url = first.enter_context(started(tmp_path, "w", *witness, "--port", "0"))
        key = re.findall(r"witness key  (\S+)", said)[0]
        port = url.rpartition(":")[2]
        _, one = first.enter_context(started(tmp_path, "one", *coordinator("one", f"{key}@{url}")))
        code, report = audit(one, "first", key)
        assert (code, report["witnesses"]["has_quorum"], report["problems"]) == (0, True, [])
    with (
        started(tmp_path, "again", *witness, "--port", port) as (again, _),
        started(tmp_path, "other", *coordinator("other", f"{key}@{url}")) as (_, other),
    ):
        assert key in again
        code, report = audit(other, "second", f"{key}@{url}")
        assert (code, [one["code"] for one in report["problems"]]) == (1, ["log_forked"])
        code, report = audit(other, "third", key)
        assert (code, report["outcome"], report["witnesses"]["has_quorum"]) == (2, "incomplete", False)
        until(lambda: "does not sign" in (tmp_path / "other.out").read_text(), seconds=60)
    (evidence,) = (tmp_path / "second").glob("evidence-*")
    assert len(list(evidence.glob("*.checkpoint"))) == 2
