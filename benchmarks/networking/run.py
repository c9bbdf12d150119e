"""A run on loopback: a real coordinator with a peer beside it, and processes around it. Policies come from here."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.broadcasting.processes import Node, NodeSwarm
from benchmarks.loading.coordinator import Served, serving
from coordinator.lab.processes.layout import free_ports
from coordinator.lab.processes.supervisor import clean_environment
from coordinator.run.peer_child import PEER_FOLDER, PeerPlan
from coordinator.storage import training
from coordinator.storage.training import PolicyRecord
from node.protocol.peers import Invitation

HOST: Final = "127.0.0.1"
JOIN_SECONDS: Final = 120.0
PEER_SECONDS: Final = 30.0


class Run:
    """A run, its peer, and its nodes. `peer` is the peer's own process where it is not the coordinator's child."""

    def __init__(self, swarm: NodeSwarm, served: Served, invitation: Invitation, peer: Node | None) -> None:
        self.swarm, self.invitation, self.peer = swarm, invitation, peer
        self.nodes: list[Node] = []
        self.hostile: list[Node] = []
        self._served = served
        self._version = 0
        self._killed: set[Node] = set()
        self._child = None if peer is not None else self._peer_child()

    @property
    def live(self) -> list[Node]:
        """Return the nodes that nobody killed."""
        return [node for node in self.nodes if node not in self._killed]

    @property
    def url(self) -> str:
        """Return the coordinator's URL."""
        return f"http://{HOST}:{self._served.port}"

    def start_node(self, *way: str) -> Node:
        """Start an honest node; without `way` it is told the string to join, and nothing else."""
        name = self.swarm.name("node")
        own = ("--state", str(self.swarm.folder / name), "--coordinator-port", str(self._served.port))
        node = self._start("node", "node", *(way or ("--join", str(self.invitation))), *own)
        self.nodes.append(node)
        return node

    def start_hostile(self, kind: str) -> Node:
        """Start an attacker of a kind of `networking.hostile`."""
        host = ("--host", f"127.66.0.{1 + len(self.hostile)}")
        node = self._start(f"hostile-{kind}", "hostile", "--join", str(self.invitation), "--kind", kind, *host)
        self.hostile.append(node)
        return node

    def join_one_by_one(self, count: int) -> list[dict[str, float]]:
        """Start nodes, each when the one before has its lease; what each said, and when it was started."""
        return [self._joined(time.monotonic(), self.start_node()) for _ in range(count)]

    def join_at_once(self, count: int) -> list[dict[str, float]]:
        """Start that many nodes in the same moment."""
        started = [(time.monotonic(), self.start_node()) for _ in range(count)]
        return [self._joined(at, node) for at, node in started]

    def publish(self) -> tuple[int, float]:
        """Record a new policy as the trainer does; its version, and the moment before."""
        self._version += 1
        policy = PolicyRecord(
            version=self._version,
            manifest_digest=secrets.token_hex(32),
            result_digest=secrets.token_hex(32),
            manifest=b"network",
        )
        at = time.monotonic()
        with self._served.home.database.write() as connection:
            training.record_policy(connection, policy, now=time.time())
        return self._version, at

    def reports(self) -> list[dict[str, Any]]:
        """Return each live node's report."""
        return self._reports(self.live)

    def kill(self, nodes: Sequence[Node]) -> None:
        """Kill nodes as `kill -9` does."""
        for node in nodes:
            self._killed.add(node)
            node.kill()

    def ended_by_themselves(self) -> int:
        """Count the run's processes that ended, or began again, without being killed."""
        ended = [node.exit_code is not None for node in self.live]
        ended.append(not self._served.processes[0].is_running())
        if self.peer is not None and self.peer not in self._killed:
            ended.append(self.peer.exit_code is not None)
        if self._child is not None:
            ended.append(not self._child.is_running())
        alive = [node for node in self.live if node.exit_code is None]
        return sum(ended) + sum(int(report["network"]["restarts"]) for report in self._reports(alive))

    def kill_peer(self) -> None:
        """Kill the bootstrap peer for good."""
        if self.peer is None:
            raise ValueError("the coordinator would start its child again")
        self.kill([self.peer])

    def _reports(self, nodes: Sequence[Node]) -> list[dict[str, Any]]:
        for node in nodes:
            node.send(report=True)
        return [node.reply() for node in nodes]

    def _joined(self, started_at: float, node: Node) -> dict[str, float]:
        return {"started_at": started_at, **node.reply(JOIN_SECONDS)}

    def _start(self, role: str, program: str, *arguments: str) -> Node:
        command = (sys.executable, "-m", f"benchmarks.networking.{program}", *arguments)
        return self.swarm.start(role, command, environment=clean_environment())

    def _peer_child(self) -> psutil.Process:
        deadline = time.monotonic() + PEER_SECONDS
        while time.monotonic() < deadline:
            for child in self._served.processes[0].children():
                if "peer" in child.cmdline():
                    return child
            time.sleep(0.05)
        raise SystemExit("the coordinator has no peer beside it")


@contextlib.contextmanager
def running(*, own_peer: bool) -> Iterator[Run]:
    """Run without nodes; with `own_peer` the peer is no child of the coordinator, so that it can be killed."""
    with NodeSwarm() as swarm:
        (port,) = free_ports(1)
        state = swarm.folder / "peer" if own_peer else swarm.folder / "data" / PEER_FOLDER
        plan = PeerPlan(state=state, host=HOST, port=port)
        named = tuple(map(str, plan.addresses()))
        flags = ("--introduce", *named) if own_peer else ("--peer", "--peer-port", str(port))
        with serving(swarm.folder, *flags) as served:
            invitation = Invitation(served.home.run_id, plan.addresses())
            peer = _start_peer(swarm, plan, served) if own_peer else None
            run = Run(swarm, served, invitation, peer)
            _wait_for(state / "descriptor.bin")
            yield run


def _start_peer(swarm: NodeSwarm, plan: PeerPlan, served: Served) -> Node:
    command = plan.command(coordinator=f"http://{HOST}:{served.port}", run_id=served.home.run_id)
    return swarm.start("peer", command, environment=clean_environment())


def _wait_for(descriptor: Path) -> None:
    """Wait until the peer has the run's descriptor: nodes are to be timed, not its start."""
    deadline = time.monotonic() + PEER_SECONDS
    while not descriptor.exists():
        if time.monotonic() > deadline:
            raise SystemExit("the peer does not come up")
        time.sleep(0.05)
