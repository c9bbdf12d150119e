"""Our links beside GossipSub: as many processes of each at the same time, the same envelopes, in turn.

In both, everybody begins with the first node, and the second one publishes. Ours find their neighbours by themselves;
GossipSub has no way to, so each is told to call the first and five others, drawn at random.
"""

from __future__ import annotations

import base64
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.broadcasting.processes import Node, NodeSwarm
from benchmarks.networking.envelopes import Signer
from benchmarks.networking.heads import BURST, IN_TIME_SECONDS, Spread, heads_of, spread
from coordinator.lab.processes.supervisor import clean_environment

START_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 12.0
"""Time for GossipSub's mesh to form, which takes some heartbeats."""

LATE_SECONDS: Final = 3.0
CALLED: Final = 5
GAP_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Compared:
    """Measurements of one side: heads one after the other, and each burst's last head, at all nodes but the publisher.

    `delivered_share` is of all messages of the bursts, within two seconds of the last; None for ours, which sends only
    the newest. `cpu_ms_per_s` is a node's, at a head a second or nearly.
    """

    calm: Spread
    newest_of_burst: Spread
    delivered_share: float | None
    cpu_ms_per_s: float
    memory_mib: float


class ComparedSide:
    """The processes of one side, and what they were told."""

    def __init__(self, nodes: Sequence[Node], signer: Signer) -> None:
        self.nodes, self._signer = nodes, signer
        self._calm: list[tuple[int, float]] = []
        self._bursts: list[tuple[int, float]] = []
        self._delivered: list[float] = []
        self._cpu_s = self._seconds = 0.0

    def publish(self) -> tuple[int, float]:
        """Publish one head from the second node; return its version and the moment before."""
        version, envelope = self._signer.next()
        self.nodes[1].send(publish=base64.b64encode(envelope).decode())
        return version, float(self.nodes[1].reply()["at"])

    def publish_calmly(self) -> None:
        self._calm.append(self.publish())

    def publish_burst(self) -> None:
        """Publish many heads at once, and record what came of them."""
        began = time.monotonic()
        self._bursts.append([self.publish() for _ in range(BURST)][-1])
        time.sleep(LATE_SECONDS)
        in_time = (began, self._bursts[-1][1] + IN_TIME_SECONDS)
        for report in self.reports():
            came = sum(in_time[0] <= at <= in_time[1] for at in report.get("messages", ()))
            self._delivered.append(came / BURST)

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports of each node but the publisher."""
        others = [self.nodes[0], *self.nodes[2:]]
        for node in others:
            node.send(report=True)
        return [node.reply() for node in others]

    def clock_cpu(self) -> None:
        """Start the CPU clock, or stop it."""
        self._cpu_s = sum(report["cpu_s"] for report in self.reports()) - self._cpu_s
        self._seconds = time.monotonic() - self._seconds

    def calm(self) -> Spread:
        """Return the spread of the heads that came one after the other."""
        return spread(self._calm, heads_of(self.reports()))

    def compared(self) -> Compared:
        """Return all that was measured."""
        reports = self.reports()
        has_messages = "messages" in reports[0]
        return Compared(
            calm=spread(self._calm, heads_of(reports)),
            newest_of_burst=spread(self._bursts, heads_of(reports)),
            delivered_share=sum(self._delivered) / len(self._delivered) if has_messages else None,
            cpu_ms_per_s=1000 * self._cpu_s / len(reports) / self._seconds,
            memory_mib=sum(report["memory_mib"] for report in reports) / len(reports),
        )


def compare(count: int, *, heads: int, bursts: int, rng: random.Random) -> tuple[Compared, Compared]:
    """Measure our links and GossipSub."""
    signers = Signer(), Signer()
    with NodeSwarm() as swarm:
        sides = (
            ComparedSide(start_links(swarm, count, signers[0].run_id), signers[0]),
            ComparedSide(_gossip(swarm, count, signers[1].run_id, rng), signers[1]),
        )
        time.sleep(SETTLE_SECONDS)
        for side in sides:
            side.clock_cpu()
        for _ in range(heads):
            for side in rng.sample(sides, 2):
                time.sleep(GAP_SECONDS)
                side.publish_calmly()
        time.sleep(LATE_SECONDS)
        for side in sides:
            side.clock_cpu()
        for _ in range(bursts):
            for side in rng.sample(sides, 2):
                side.publish_burst()
        return sides[0].compared(), sides[1].compared()


def start_links(swarm: NodeSwarm, count: int, run_id: str) -> list[Node]:
    """Start nodes that have links and nothing else, and begin with the first one."""
    first: list[str] = []
    nodes = list[Node]()
    for _ in range(count):
        state = str(swarm.folder / swarm.name("links"))
        nodes.append(_start(swarm, "plain_links", "--run-id", run_id, "--state", state, *first))
        first = first or ["--call", str(nodes[0].reply(START_SECONDS)["address"])]
    for node in nodes[1:]:
        node.reply(START_SECONDS)
    return nodes


def _gossip(swarm: NodeSwarm, count: int, run_id: str, rng: random.Random) -> list[Node]:
    nodes = [_start(swarm, "gossip", "--run-id", run_id) for _ in range(count)]
    addresses = [str(node.reply(START_SECONDS)["address"]) for node in nodes]
    for index, node in enumerate(nodes[1:], start=1):
        others = addresses[1:index] + addresses[index + 1 :]
        node.send(call=[addresses[0], *rng.sample(others, min(CALLED, len(others)))])
        node.reply(START_SECONDS)
    return nodes


def _start(swarm: NodeSwarm, program: str, *arguments: str) -> Node:
    command = (sys.executable, "-m", f"benchmarks.networking.{program}", *arguments)
    return swarm.start(program, command, environment=clean_environment())
