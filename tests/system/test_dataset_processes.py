"""From a JSONL file to a run by README's commands, in real processes: a worker that has only the run's id earns.

What would break for whom: an operator's first attempt with data of their own.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from dataset_files import sums
from locations import ROOT
from ports import free_port
from waiting import until

README = (ROOT / "README.md").read_text()
COMMAND = [sys.executable, "-m", "node.cli"]
SOON = 240.0
RUN_TOML = """
name = "sums"

[model]
initial = "random-tiny"

[sampling]
group_size = 2
max_new_tokens = 8

[batch]
groups_per_step = 2

[training]
steps = 1
"""


def readme_commands() -> list[list[str]]:
    """The commands of README's block about data of one's own, without the program's name."""
    at = README.index("swarmproof dataset add")
    block = README[README.rindex("```\n", 0, at) + 4 : README.index("\n```", at)]
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines]


@contextmanager
def process(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    with (folder / f"{arguments[0]}.log").open("w") as log:
        started = subprocess.Popen(
            [*COMMAND, *map(str, arguments)], cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield started
    finally:
        started.terminate()
        started.wait(60)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("answers", [(), ("--answers", "operator")], ids=["for everybody", "for the operator"])
def test_readmes_commands_lead_from_a_file_to_a_run_in_which_a_bare_worker_earns(
    tmp_path: Path, answers: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    if answers:  # the other ones have been started as README does
        request.getfixturevalue("forked_commands")
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(200)))
    (tmp_path / "run.toml").write_text(RUN_TOML)
    *first, serve = readme_commands()
    first[1] += answers
    for arguments in first:
        subprocess.run([*COMMAND, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=SOON)
    ports = {name: free_port() for name in ("coordinator", "origin", "relay")}
    url, origin, relay = (f"http://127.0.0.1:{ports[name]}" for name in ("coordinator", "origin", "relay"))
    serve[serve.index("--port") + 1] = str(ports["coordinator"])
    run_id = subprocess.run(
        [*COMMAND, "keys", "run-id", "run.key"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=SOON
    ).stdout.strip()
    join = ("--coordinator", url, "--run-id", run_id)
    with ExitStack() as stack:
        for arguments in (
            (*serve, "--no-peer", "--relay", relay),
            ("trainer", "--data", "run/", "--key", "run.key", "--state", "trainer/", "--port", ports["origin"]),
            ("verifier", "--data", "run/", "--state", "verifier-1/", "--source", origin),
            ("relay", *join, "--upstream", origin, "--state", "relay-1/", "--port", ports["relay"]),
            ("worker", *join, "--state", "worker-1/"),
        ):
            stack.enter_context(process(tmp_path, *arguments))
        status = tmp_path / "worker-1" / "status.json"
        until(lambda: status.exists() and json.loads(status.read_text())["admitted"] >= 1, seconds=SOON)
    fetched = next((tmp_path / "worker-1" / "datasets").glob("*/versions/0-*.bin")).read_bytes()
    made = [path.read_bytes() for path in (tmp_path / "run" / "datasets").glob("*.dataset")]
    assert fetched in made
    assert len(made) == 1 + bool(answers)
    strangers = [path for name in ("worker-1", "relay-1") for path in (tmp_path / name).rglob("*") if path.is_file()]
    rows = rb'"messages":null,"answer":"\d'
    assert any(re.search(rows, path.read_bytes()) for path in strangers) is not bool(answers)
