"""`swarmproof status`: a contributor's process against a real coordinator, verifier and worker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from locations import ROOT
from swarm import Peer, Swarm, running, small_spec

from node.engines.torch import TorchEngine
from node.joining.session import JoinSettings
from node.keys.identity import create_key, node_id
from node.protocol.admission import Outcome
from node.protocol.messages import NodeStanding
from node.protocol.reasons import Reason
from node.protocol.run import StandingSpec
from node.worker.daemon import WorkerSettings, run_worker
from shardcast.wire import decode

pytestmark = pytest.mark.usefixtures("forked_commands")

SPEC = small_spec(standing=StandingSpec(probation=2, full_rate_floor=0.5, ban_after=2))
SPEC = msgspec.structs.replace(SPEC, batch=msgspec.structs.replace(SPEC.batch, groups_per_step=60))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Swarm]:
    with running(tmp_path_factory.mktemp("run"), tiny_policy_path, spec=SPEC) as swarm:
        yield swarm


def ask(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """The command, run by somebody whose home folder is `home`."""
    return subprocess.run(
        [sys.executable, "-m", "node.cli", "status", *arguments],
        cwd=ROOT,
        env=os.environ | {"HOME": str(home), "COLUMNS": "1000", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def about(swarm: Swarm, node: str, *more: str, home: Path) -> subprocess.CompletedProcess[str]:
    return ask("--coordinator", swarm.url, "--run-id", swarm.home.run_id, "--node", node, *more, home=home)


def work(swarm: Swarm, peer: Peer, *, wrong: bool = False) -> Outcome:
    """One slot, generated as it must be, or with log-probabilities that are not the policy's."""
    lease = peer.lease()
    rows = swarm.honest(lease)
    if wrong:
        rows[1] = msgspec.structs.replace(rows[1], logprobs=[value - 0.5 for value in rows[1].logprobs])
    return swarm.judge(peer, rows, lease).outcome


def test_a_banned_contributor_reads_that_it_is_banned_since_when_and_for_what(swarm: Swarm, tmp_path: Path) -> None:
    peer = swarm.peer()
    assert [work(swarm, peer, wrong=True) for _ in range(2)] == [Outcome.REJECTED] * 2
    said = about(swarm, peer.node, home=tmp_path)
    assert said.returncode == 1, said.stderr
    assert "Banned since 20" in said.stdout
    assert "2 of its slots were rejected" in said.stdout
    assert "gives this key no more work" in said.stdout
    assert said.stdout.count("wrong_logprob") == 3, "each rejection, and what they mean"
    assert Reason.WRONG_LOGPROB.meaning in " ".join(said.stdout.split())
    assert said.stderr == ""
    again = about(swarm, peer.node, "--json", home=tmp_path)
    standing = json.loads(again.stdout)["standing"]
    assert (again.returncode, standing["banned"], standing["strikes"]) == (1, True, 2)
    assert [one["reason"] for one in standing["rejections"]] == ["wrong_logprob"] * 2


def test_a_new_one_reads_how_far_it_has_come_and_a_trusted_one_what_is_looked_at(swarm: Swarm, tmp_path: Path) -> None:
    peer = swarm.peer()
    assert work(swarm, peer) is Outcome.ADMITTED
    said = about(swarm, peer.node, home=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "On probation: 1 of 2 probation slots were admitted in a row." in said.stdout
    assert "It may have 2 slots at a time, and has 0" in said.stdout
    for _ in range(2):
        assert work(swarm, peer) is Outcome.ADMITTED
    said = about(swarm, peer.node, home=tmp_path)
    assert "Trusted: 3 fully measured slots in a row were admitted." in said.stdout
    assert "The next one is measured in full with 67%, else one row of it." in said.stdout


def test_a_key_that_never_registered_is_not_banned(swarm: Swarm, tmp_path: Path) -> None:
    key = tmp_path / "key"
    node = node_id(create_key(key))
    said = ask("--coordinator", swarm.url, "--run-id", swarm.home.run_id, "--key", str(key), home=tmp_path)
    assert said.returncode == 0, said.stderr
    assert node in said.stdout
    assert "Not registered with this run, and not banned" in said.stdout


def test_without_flags_it_is_about_the_worker_of_this_machine(swarm: Swarm, tmp_path: Path) -> None:
    """A contributor asks when something is wrong, and then knows neither the run's id nor the node's by heart."""
    state = tmp_path / ".swarmproof" / swarm.home.run_id[:16] / "worker"
    key = create_key(state / "key")
    entry = JoinSettings(run_id=swarm.home.run_id, coordinators=(swarm.url,))
    settings = WorkerSettings(join=entry, state=state, once=True)
    joined = run_worker(settings, key=key, make_engine=TorchEngine, stop=asyncio.Event())
    asyncio.run(asyncio.wait_for(joined, 200))
    for arguments in ((), ("--state", str(state)), ("--run-id", swarm.home.run_id)):
        said = ask(*arguments, home=tmp_path)
        assert said.returncode == 0, said.stderr
        assert node_id(key) in said.stdout
        assert "On probation: 1 of 2" in said.stdout
        assert "worker here" in said.stdout
    report = json.loads(ask("--json", home=tmp_path).stdout)
    assert (report["worker"]["admitted"], report["standing"]["admitted"], report["exit_code"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ((), 2, "Give --join, or --coordinator and --run-id"),
        (
            ("--coordinator", "http://127.0.0.1:9", "--run-id", "a" * 64, "--key", "/nowhere/key"),
            1,
            "make one with: swarmproof keys new",
        ),
        (("--coordinator", "http://127.0.0.1:9", "--run-id", "a" * 64, "--node", "b" * 64), 1, "cannot be reached"),
        (("--coordinator", "http://127.0.0.1:9", "--run-id", "a" * 63), 2, "64 hexadecimal digits"),
        (("--node", "b" * 63), 2, "keys show"),
        (("--node", "b" * 64, "--key", "key"), 2, "not both"),
    ],
)
def test_what_is_missing_or_away_is_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    said = ask(*arguments, home=tmp_path)
    assert said.returncode == code
    assert sentence in said.stderr
    assert len([line for line in said.stderr.splitlines() if line.startswith("Error:")]) == 1
    assert said.stdout == ""
    if code == 1:
        assert [line.partition(":")[0] for line in said.stderr.splitlines()] == ["Error", "hint"]


def test_an_operator_without_a_worker_reads_how_the_run_is(swarm: Swarm, tmp_path: Path) -> None:
    """`swarmproof --help` names this command for it; that a key is to be made helps nobody there."""
    run = ("--coordinator", swarm.url, "--run-id", swarm.home.run_id)
    said = ask(*run, home=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert "health" in said.stdout
    assert "None has worked for it here" in said.stdout
    assert json.loads(ask(*run, "--json", home=tmp_path).stdout)["standing"] is None
    elsewhere = ask(*run, "--state", str(tmp_path / "worker"), home=tmp_path)
    assert elsewhere.returncode == 2
    assert "No worker has worked in" in elsewhere.stderr


def test_a_coordinator_of_another_run_is_not_believed(swarm: Swarm, tmp_path: Path) -> None:
    said = ask("--coordinator", swarm.url, "--run-id", "a" * 64, "--node", "b" * 64, home=tmp_path)
    assert said.returncode == 1
    assert "--run-id" in said.stderr
    assert said.stdout == ""


def test_anybody_may_ask_without_a_signature_and_names_that_are_none_are_not_found(swarm: Swarm) -> None:
    stranger = Peer(swarm.url, swarm.home.run_id, Ed25519PrivateKey.generate())
    reply = stranger.send("GET", f"/v1/nodes/{stranger.node}")
    assert reply.status == 200
    assert not decode(NodeStanding, reply.body, max_bytes=2**16).known
    for name in ("x", "A" * 64, "a" * 65, "%00", "..%2f"):
        reply = stranger.send("GET", f"/v1/nodes/{name}")
        assert (reply.status, reply.code) == (404, "not_found"), name


def test_the_machines_name_is_not_told_to_strangers(swarm: Swarm) -> None:
    peer = swarm.peer()
    answer: Any = json.loads(peer.send("GET", f"/v1/nodes/{peer.node}").body)
    assert not {"instance", "name", "instance_name", "address"} & set(answer)
