"""A small swarm of real processes over an object store, two of which are killed with -9 while bodies are under way.

What an operator would lose is at stake: a submission that was acknowledged and is in no log, evidence that no auditor
can fetch, a run that stands still because its trainer cannot read a group.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from object_store import object_store
from run_files import small_run_toml
from waiting import is_quiet, until

from coordinator.lab.processes import supervisor as supervisors
from coordinator.lab.processes.layout import Swarm, lay_out
from coordinator.lab.processes.local_http import get_json
from coordinator.lab.processes.supervisor import Supervisor
from node.audit.auditor import run_audit

STEPS = 4
RUN_TOML = small_run_toml("object store", steps=STEPS, groups_per_step=4)
START_SECONDS = 120.0
FINISH_SECONDS = 150.0


def by_the_store(swarm: Swarm, url: str) -> Swarm:
    """The same swarm, whose coordinator alone is told where blobs go."""
    commands = tuple(
        replace(command, arguments=(*command.arguments, "--blobs", url)) if command.name == "coordinator" else command
        for command in swarm.commands
    )
    return replace(swarm, commands=commands)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_run_over_an_object_store_survives_a_killed_coordinator_and_a_killed_verifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(supervisors, "_KEPT_VARIABLES", (*supervisors._KEPT_VARIABLES, *store.environment))
        swarm = by_the_store(lay_out(tmp_path / "run", RUN_TOML, honest=2, hostile=(), leaves=1), store.url)

        def status() -> dict[str, Any]:
            return get_json(f"{swarm.coordinator_url}/v1/status", seconds=60.0) or {}

        with Supervisor(swarm.folder / "logs", grace_seconds=4.0) as supervisor:
            supervisor.start(swarm.commands)
            poll = supervisor.poll
            for steps, kind in enumerate(("coordinator", "verifier"), start=1):
                until(lambda: status().get("finished_steps", 0) >= steps, seconds=START_SECONDS, meanwhile=poll)  # noqa: B023
                victim = supervisor.pid(kind)
                os.kill(victim, signal.SIGKILL)
                until(lambda: supervisor.pid(kind) not in {None, victim}, seconds=60.0, meanwhile=poll)  # noqa: B023
            until(lambda: bool(status().get("finished")), seconds=FINISH_SECONDS, meanwhile=poll)
            until(lambda: is_quiet(status()), seconds=120.0, meanwhile=poll)
            settings = {"sample": None, "all_": True, "seed": None, "state_dir": tmp_path / "auditor"}
            sources = {"sources": [swarm.origin_url]}
            asyncio.run(run_audit(swarm.coordinator_url, run_id=swarm.run_id, as_json=True, **settings, **sources))
            nodes = status()["nodes"]
        report = json.loads(capsys.readouterr().out)
        bodies = [call for call in store.calls if call.method == "PUT" and call.key.startswith("uploads/")]

    assert (report["problems"], report["outcome"], report["error"]) == ([], "agree", None)
    assert report["log"]["batches"] == STEPS
    assert report["log"]["rejected"] == 0, "an honest worker was refused"
    assert sum(node["rejected"] for node in nodes) == 0
    assert len(bodies) >= report["log"]["admitted"]
    assert {(call.agent, call.presigned) for call in bodies} == {("swarmproof", True)}, "workers alone carry bodies"
    assert not (swarm.folder / "data" / "blobs").exists()
