"""The demonstration as a person starts it: it ends with a true report, or at once when told to, and leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from waiting import until

from coordinator.lab.demo.command import EXIT_INTERRUPTED, demo
from coordinator.lab.demo.orchestration import Demonstration, DemoSettings
from coordinator.lab.processes.layout import family_run_toml
from coordinator.lab.processes.summary import Summary
from node.cli import main as cli
from node.errors import ConfigError
from node.policy.families import TINY_FAMILIES
from node.protocol.run import parse_run_toml

# An untrained policy solves nothing: what it tried is hard from the next policy on, the rest still normal.
SMALL_RUN = """
name = "small demo"

[model]
initial = "random-tiny"

[[environments]]
name = "arithmetic"
problems = { count = 16, kept = "//8=" }

[[environments]]
name = "reverse"

[sampling]
group_size = 2
max_new_tokens = 24

[batch]
groups_per_step = 4
max_async = 1
rejection_backoff_seconds = 0.1
rejection_backoff_max_seconds = 0.5

[batch.pools]
easy = 1
normal = 1
hard = 2

[limits]
exponent_mismatches = 4.0
token_margin = 0.001
rollout_margin_mean = 0.0001
logprob_error = 0.001

[training]
steps = 3

[broadcast]
"""


def swarm_processes(folder: Path) -> list[psutil.Process]:
    """Whatever runs on this machine with a path of this folder among its arguments."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(folder) in argument for argument in process.info["cmdline"] or [])
    ]


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_commands")
@pytest.mark.parametrize(
    "model",
    # goldfinch has both memories that eagle and finch have.
    [
        pytest.param(model, marks=pytest.mark.nightly) if model in ("eagle", "finch") else model
        for model in TINY_FAMILIES
    ],
)
def test_a_small_demo_admits_honest_work_only_and_is_confirmed_by_its_audit(tmp_path: Path, model: str) -> None:
    rules = SMALL_RUN.replace("random-tiny", f"random-{model}")
    if model == "frame-action":
        rules = rules.replace("reverse", "terminal")
    assert parse_run_toml(rules).batch.pools is not None
    summary = Demonstration(DemoSettings(out=tmp_path, headless=True), run_toml=rules).run()
    (folder,) = tmp_path.iterdir()
    assert [step.step for step in summary.steps] == [0, 1, 2]
    assert summary.figures["hostile_slots_admitted"] == 0
    assert summary.figures["honest_slots_rejected"] == 0
    assert summary.figures["honest_slots_admitted"] >= 12
    rejected = {node.kind: set(node.reasons) for node in summary.nodes if node.rejected}
    assert rejected.items() <= {"other-model": {"proof_mismatch"}, "colluder": {"wrong_token"}}.items()
    assert rejected, "no hostile worker got as far as a verdict"
    assert (summary.audit.exit_code, summary.audit.result["outcome"]) == (0, "agree"), summary.audit
    assert msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary) == summary
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "report.html", "run.toml", "summary.json"]
    report = (folder / "report.html").read_text()
    assert 'aria-label="Mean reward' in report
    assert "independent audit" in report
    until(lambda: not swarm_processes(folder))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_every_process_and_leaves_no_key(tmp_path: Path, number: signal.Signals) -> None:
    # A shell that runs these tests in the background has them ignore Ctrl-C, and what is ignored is inherited.
    listening = ("env", "--default-signal=INT")
    command = [*listening, sys.executable, "-m", "node.cli", "demo", "--headless", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while len(swarm_processes(tmp_path)) < 11 + 1:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == EXIT_INTERRUPTED, errors
    assert "every process of the swarm has ended" in errors
    assert "Traceback" not in errors
    until(lambda: not swarm_processes(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert not list(folder.rglob("*key*"))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_has_a_demonstration_that_starts_from_it(family: str) -> None:
    assert parse_run_toml(family_run_toml(family)).model.initial == family


def test_vllm_is_not_asked_to_run_a_recurrent_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would come of it, minutes later and in some process's log."""
    monkeypatch.setattr("node.commands.engine_options.find_spec", lambda _: object())
    with pytest.raises(ConfigError) as caught:
        demo.callback(
            steps=1, out=tmp_path, headless=True, as_json=False, seed=0, engine="vllm", model="finch", keep=False
        )
    assert caught.value.code == "wrong_engine"
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_offers_the_demo() -> None:
    assert "demo" in cli.list_commands(cli.make_context("swarmproof", [], resilient_parsing=True))
