"""Joining by one string: real processes of a coordinator, its peer, and nodes that come and go.

What would break for whom: a contributor who was given one string would not find the run, or would lose it with the
machine that the string names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ports import free_port
from signing_actors import signed_policy
from waiting import until

from coordinator.lab.processes.layout import free_ports

pytest.importorskip("libp2p")

from coordinator.run.definition import read_run_file
from coordinator.run.home import Home, create_home
from coordinator.run.peer_child import PeerPlan
from coordinator.storage import training
from node.keys.identity import create_key
from node.protocol.peers import parse_join

RUN_TOML = """
name = "join"

[model]
initial = "random-tiny"

[[environments]]
name = "arithmetic"
"""
HOST = "127.0.0.1"
START_SECONDS = 120.0
SOON = 120.0
NEVER = "3600"

NODE = """
import asyncio, json, sys
from pathlib import Path
from node.joining import session as joining
from node.keys.identity import load_or_create_key
from node.commands.joining_options import parse_join_options
from node.runtime.logs import set_up_logging
from node.p2p import network

join, run_id, state, refresh = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
joining.REFRESH_SECONDS, network.GOSSIP_SECONDS = refresh, 0.5

async def main():
    key = load_or_create_key(state / "key")
    options = parse_join_options(joins=(join,), coordinators=(), run_id=run_id, peer_listen="127.0.0.1:0")
    async with joining.join_run(options.settings(key), key=key, state=state) as session:
        following = asyncio.create_task(session.follow())
        while True:
            temporary = state / "status.tmp"
            temporary.write_text(json.dumps(session.status()))
            temporary.rename(state / "seen.json")
            await asyncio.sleep(0.05)

set_up_logging()
asyncio.run(main())
"""
"""What a worker does to join and to stay in touch, and nothing else. `refresh`: how often it asks a coordinator."""


@dataclass
class Started:
    """A process, and what it says."""

    process: subprocess.Popen[bytes]
    folder: Path

    def said(self, name: str = "stderr") -> str:
        return (self.folder / name).read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Node(Started):
    """One that has joined, or is about to."""

    def status(self) -> dict[str, object]:
        path = self.folder / "seen.json"
        assert self.process.poll() is None, self.said()
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def network(self) -> dict[str, list[str]]:
        return self.status().get("network") or {}  # type: ignore[return-value]

    def wait(self, condition: Callable[[dict[str, object]], object], seconds: float = SOON) -> None:
        until(lambda: condition(self.status()), seconds=seconds, what=lambda: (self.status(), self.said()))

    def wait_joined(self) -> None:
        self.wait(lambda status: status)

    def wait_head(self, version: int) -> None:
        self.wait(lambda status: status.get("head_version") == version)

    def wait_neighbours(self, count: int) -> None:
        self.wait(lambda status: status and len(status["network"]["neighbours"]) >= count)  # type: ignore[index]


@dataclass
class Scene:
    """A run on disk, and the processes that a test has started for it."""

    folder: Path
    home: Home
    key: Ed25519PrivateKey
    started: list[Started] = field(default_factory=list)

    def start(self, name: str, *arguments: str, cls: type[Started] = Started) -> Started:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as errors:
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=errors, env=environment)
        self.started.append(cls(process, folder))
        return self.started[-1]

    def coordinator(self, *arguments: str, name: str = "coordinator", port: int = 0) -> Started:
        options = ("--run", "run.toml", "--key", "run.key", "--data", "data", "--port", str(port))
        return self.start(name, "-m", "node.cli", "coordinator", "--uncalibrated", *options, *arguments)

    def peer(self, coordinator: str, name: str = "peer", *, port: int = 0) -> tuple[Started, str]:
        """A peer that only introduces others, and the string that it prints."""
        way = ("--coordinator", coordinator, "--run-id", self.home.run_id, "--state", str(self.folder / name))
        started = self.start(name, "-m", "node.cli", "peer", *way, "--peer-listen", f"{HOST}:{port}")
        until(lambda: started.said("stdout"), seconds=START_SECONDS, what=started.said)
        return started, started.said("stdout").strip()

    def node(self, name: str, join: str, *, refresh: str = NEVER) -> Node:
        state = str(self.folder / name)
        (self.folder / name / "seen.json").unlink(missing_ok=True)
        node = self.start(name, "-c", NODE, join, self.home.run_id, state, refresh, cls=Node)
        assert isinstance(node, Node)
        return node

    def publish(self, version: int) -> None:
        published = signed_policy(self.home.run_id, version, key=self.key)
        with self.home.database.write() as connection:
            training.record_policy(connection, published, now=time.time())


@pytest.fixture
def scene(forked_commands: None, tmp_path: Path) -> Iterator[Scene]:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    key: Ed25519PrivateKey = create_key(tmp_path / "run.key")
    _, spec = read_run_file(tmp_path / "run.toml")
    home = create_home(tmp_path / "data", public_key=key.public_key().public_bytes_raw(), spec=spec)
    scene = Scene(tmp_path, home, key)
    try:
        yield scene
    finally:
        for started in scene.started:
            started.kill()
        home.database.close()


def url_of(coordinator: Started) -> str:
    found: list[str] = []

    def answers() -> bool:
        found[:] = re.findall(r"serving at (http://\S+:\d+)", coordinator.said("stdout"))
        with contextlib.suppress(OSError, IndexError):
            socket.create_connection((HOST, int(found[0].rpartition(":")[2])), timeout=1).close()
            return True
        return False

    until(answers, seconds=START_SECONDS, what=coordinator.said)
    return found[0]


def join_of(coordinator: Started) -> str:
    url_of(coordinator)
    (join,) = re.findall(r"--join (swarmproof://\S+)", coordinator.said("stdout"))
    return str(join)


@pytest.mark.timeout(600)
def test_the_string_that_a_coordinator_prints_is_all_that_a_contributor_needs(scene: Scene) -> None:
    port, peer_port = free_ports(2)
    coordinator = scene.coordinator("--peer-port", str(peer_port), port=port)
    join = join_of(coordinator)
    assert [address.port for address in parse_join(join).peers] == [peer_port]
    nodes = [scene.node(f"node-{number}", join) for number in range(2)]
    for node in nodes:
        node.wait_joined()
        assert node.status()["endpoints"] == [f"http://{HOST}:{port}"], "it was told nothing but the string"
        node.wait_neighbours(2)
    scene.publish(0)
    for node in nodes:
        node.wait_head(0)
    coordinator.kill()
    until(lambda: can_bind(peer_port))
    scene.coordinator("--peer-port", str(peer_port), port=port, name="again")
    scene.publish(1)
    third = scene.node("node-2", join)
    for node in (*nodes, third):
        node.wait_head(1)


def can_bind(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
        return True
    return False


@pytest.mark.timeout(600)
def test_the_peer_that_a_string_names_may_die_for_good(scene: Scene) -> None:
    """Those who joined by it stay together and hear of news; newcomers join by any of them; who left comes back."""
    coordinator = scene.coordinator("--no-peer")
    bootstrap, join = scene.peer(url_of(coordinator))
    first, second = scene.node("first", join, refresh="0.5"), scene.node("second", join)
    for node in (first, second):
        node.wait_neighbours(2)
    bootstrap.kill()
    scene.publish(0)
    second.wait_head(0)  # which asks no coordinator

    (address, *_) = first.network["addresses"]
    newcomer = scene.node("newcomer", address)
    newcomer.wait_neighbours(2)
    scene.publish(1)
    for node in (second, newcomer):
        node.wait_head(1)

    second.kill()
    (second.folder / "descriptor.bin").unlink()
    shutil.rmtree(second.folder / "evidence", ignore_errors=True)
    again = scene.node("second", join)
    again.wait_neighbours(1)  # with the peers that it remembers, and a string that leads nowhere
    scene.publish(2)
    again.wait_head(2)
    assert len(again.said().splitlines()) <= 2, again.said()


@pytest.mark.timeout(600)
def test_a_peer_that_is_not_there_yet_is_waited_for_in_one_line(scene: Scene) -> None:
    """The operator starts last: whoever is early must not have to start again, nor read a page of complaints."""
    port = free_port()
    plan = PeerPlan(state=scene.folder / "peer", host=HOST, port=port)
    join = f"swarmproof://{scene.home.run_id}{plan.addresses()[0]}"
    way = ("--join", join, "--peer-listen", f"{HOST}:0", "--port", str(free_port()))
    relay = scene.start("relay", "-m", "node.cli", "relay", *way, "--state", str(scene.folder / "relay"))
    until(lambda: "no peer reachable" in relay.said(), seconds=START_SECONDS)
    time.sleep(3.0)
    (line,) = (line for line in relay.said().splitlines() if "not in the run yet" not in line)
    assert f"no peer reachable ({HOST}:{port}: " in line
    assert line.endswith("; retrying")
    coordinator = scene.coordinator("--no-peer")
    _, printed = scene.peer(url_of(coordinator), port=port)
    assert printed == join
    until(lambda: "relaying run" in relay.said(), seconds=START_SECONDS, what=relay.said)
    assert relay.process.poll() is None
    relay.process.send_signal(signal.SIGTERM)
    assert relay.process.wait(SOON) == 0


@pytest.mark.timeout(400)
def test_two_peers_do_not_share_a_port_or_a_folder(scene: Scene) -> None:
    """libp2p would let them: each would get half of the calls, and those who call would meet a stranger."""
    port, nowhere = free_port(), f"http://{HOST}:{free_port()}"
    first, _ = scene.peer(nowhere, port=port)
    way = ("-m", "node.cli", "peer", "--coordinator", nowhere, "--run-id", scene.home.run_id)
    at_port = scene.start("other", *way, "--state", str(scene.folder / "other"), "--peer-listen", f"{HOST}:{port}")
    in_folder = scene.start("third", *way, "--state", str(scene.folder / "peer"), "--peer-listen", f"{HOST}:0")
    assert at_port.process.wait(START_SECONDS) == 1
    assert f"Error: Peers cannot be listened for on {HOST}:{port}: another process listens there." in at_port.said()
    assert in_folder.process.wait(START_SECONDS) == 1
    assert "is in use by another process" in in_folder.said()
    said = in_folder.said().strip().splitlines()
    assert [line.partition(":")[0] for line in said] == ["Error", "hint"], said
    assert first.process.poll() is None
