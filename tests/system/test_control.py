"""An operator asks a worker: a real coordinator, a real peer, a real worker process and the real command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarm import Swarm, running, settle_slots, small_spec
from waiting import until

from node.keys.identity import create_key, node_id
from node.protocol.control import PURPOSES

pytest.importorskip("libp2p")

pytestmark = pytest.mark.usefixtures("forked_commands")

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SECONDS = 90.0


@contextlib.contextmanager
def process(*arguments: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """`swarmproof ARGUMENTS`, ended when the block is."""
    command = [sys.executable, "-m", "node.cli", *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT) as running_process,
    ):
        try:
            yield running_process
        finally:
            running_process.terminate()
            running_process.wait(90)


def swarmproof(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "node.cli", *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=SECONDS,
        check=False,
    )


@dataclass(frozen=True)
class Scene:
    """A worker that allows everything, and an operator with authority for everything."""

    swarm: Swarm
    join: str
    folder: Path
    node: str
    run_key: Path
    operator: Path
    grant: Path

    def control(self, what: str, *options: str) -> subprocess.CompletedProcess[str]:
        """`swarmproof control`, as the operator."""
        way = ("--join", self.join, "--key", str(self.operator), "--authority", str(self.grant))
        return swarmproof("control", what, self.node, *way, "--state", str(self.folder / "asker"), *options)

    def status(self) -> dict[str, object]:
        """What the worker's own file says."""
        return json.loads((self.folder / "worker" / "status.json").read_text())

    def until(self, condition, what: str) -> None:
        until(lambda: condition(self.status()), seconds=SECONDS, what=lambda: f"{what}: {self.status()}")


def grant_to(folder: Path, *, run_key: Path, node: str, purposes: tuple[str, ...] = PURPOSES) -> Path:
    options = [part for purpose in purposes for part in ("--purpose", purpose)]
    made = swarmproof("authority", "--key", str(run_key), "--node", node, "--hours", "1", *options)
    assert made.returncode == 0, made.stderr
    path = folder / f"grant-{'-'.join(purposes)}"
    path.write_text(made.stdout)
    return path


@pytest.fixture(scope="module")
def scene(forked_commands: None, tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("control")
    run_key, operator, worker_key = (create_key(folder / f"{name}.key") for name in ("run", "operator", "worker"))
    with running(folder, tiny_policy_path, spec=small_spec(), key=run_key) as swarm:
        way = ("--coordinator", swarm.url, "--run-id", swarm.home.run_id)
        listen = ("--peer-listen", "127.0.0.1:0")
        with process("peer", *way, *listen, "--state", str(folder / "peer"), log=folder / "peer.log") as peer:
            join = peer.stdout.readline().strip()
            allowed = [part for purpose in PURPOSES for part in ("--allow-control", purpose)]
            worker = ("worker", "--join", join, *way, *listen, *allowed, "--key", str(folder / "worker.key"))
            with process(*worker, "--state", str(folder / "worker"), "--slots", "2", log=folder / "worker.log"):
                found = Scene(
                    swarm=swarm,
                    join=join,
                    folder=folder,
                    node=node_id(worker_key),
                    run_key=folder / "run.key",
                    operator=folder / "operator.key",
                    grant=grant_to(folder, run_key=folder / "run.key", node=node_id(operator)),
                )
                deadline = time.monotonic() + SECONDS
                while not (folder / "worker" / "status.json").exists():
                    assert time.monotonic() < deadline, (folder / "worker.log").read_text()
                    time.sleep(0.2)
                found.until(lambda status: status["version"] == 0, "the engine starts")
                yield found


def test_the_operator_sees_what_a_worker_does(scene: Scene) -> None:
    answer = scene.control("status", "--json")
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout)
    assert (said["purpose"], said["version"], said["engine"]) == ("status", 0, "torch")


def test_a_person_reads_it(scene: Scene) -> None:
    answer = scene.control("status")
    assert answer.returncode == 0, answer.stderr
    assert "torch" in answer.stdout
    assert "tokens/s" in answer.stdout
    # What leaves the machine names neither its folders nor where it is.
    assert str(scene.folder) not in answer.stdout
    assert "127.0.0.1" not in answer.stdout


def test_the_log_of_a_worker_that_shows_it(scene: Scene) -> None:
    answer = scene.control("logs", "--lines", "200")
    assert answer.returncode == 0, answer.stderr
    assert "control: logs, asked by" in answer.stdout


def test_drained_challenged_and_invited_again(scene: Scene) -> None:
    drained = scene.control("drain")
    assert drained.returncode == 0, drained.stderr
    scene.until(lambda status: status["draining"] and not status["slots"], "it finishes its slots")

    policy = ("--policy", str(scene.swarm.policy_path))
    challenged = scene.control("challenge", "--samples", "4", "--tokens", "16", "--json", *policy)
    assert challenged.returncode == 0, challenged.stderr
    shown = json.loads(challenged.stdout)
    assert (shown["fault"], shown["measured"], shown["rows"]) == (None, True, 4)
    assert 4 <= shown["tokens"] <= 64
    assert shown["tokens_per_s"] > 0

    generated = scene.status()["tokens"]
    invited = scene.control("invite")
    assert invited.returncode == 0, invited.stderr
    scene.until(lambda status: not status["draining"], "it is drained no more")
    with scene.swarm.home.database.write() as connection:  # there is work again, whatever was done before
        settle_slots(connection, "admitted", "used")
    scene.until(lambda status: status["tokens"] > generated, "it works again")


def test_an_invite_to_a_coordinator_that_the_run_does_not_name(scene: Scene) -> None:
    answer = scene.control("invite", "--endpoint", "http://192.0.2.66:8700")
    assert answer.returncode == 1
    assert "unknown_endpoint" in answer.stderr


def test_the_engine_starts_again_when_the_operator_asks(scene: Scene) -> None:
    restarts = scene.status()["engine_restarts"]
    answer = scene.control("restart")
    assert answer.returncode == 0, answer.stderr
    scene.until(lambda status: status["engine_restarts"] == restarts + 1 and status["version"] == 0, "a new engine")


def test_what_goes_wrong_is_one_sentence(scene: Scene, tmp_path: Path) -> None:
    way = ("--join", scene.join, "--state", str(tmp_path))
    stranger = create_key(tmp_path / "stranger")
    asked = ("--key", str(tmp_path / "stranger"), "--authority", str(scene.grant))
    foreign = swarmproof("control", "status", scene.node, *way, *asked)
    assert (foreign.returncode, "foreign_authority" in foreign.stderr) == (1, True)

    narrow = grant_to(tmp_path, run_key=scene.run_key, node=node_id(stranger), purposes=("status",))
    asked = ("--key", str(tmp_path / "stranger"), "--authority", str(narrow))
    wrong = swarmproof("control", "logs", scene.node, *way, *asked)
    assert (wrong.returncode, "wrong_purpose" in wrong.stderr) == (1, True)

    nobody = node_id(Ed25519PrivateKey.generate())
    missing = swarmproof("control", "status", nobody, *way, *asked, "--seconds", "1")
    assert missing.returncode == 1
    assert "No address is known for" in missing.stderr
    for failed in (foreign, wrong, missing):
        assert len([line for line in failed.stderr.splitlines() if line.startswith("Error")]) == 1


def test_the_key_of_the_run_needs_no_authority(scene: Scene, tmp_path: Path) -> None:
    way = ("--join", scene.join, "--state", str(tmp_path))
    answer = swarmproof("control", "status", scene.node, *way, "--key", str(scene.run_key))
    assert answer.returncode == 0, answer.stderr
