"""Trees with capped uplinks: how near the measured time is to what the links allow, and what a further hop costs.

The origin and every relay feed `FAN_OUT` children each, through an uplink of `bytes_per_s` that these share; depth 1
is the origin and its workers. With N receivers and N / FAN_OUT nodes that send, the lower bound for any schedule,
max(S / u_origin, N * S / (u_origin + sum u_i)), is FAN_OUT * S / u: the bound of the tree without what its hops cost,
whatever the depth. Downlinks are not capped.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import SETTLE_S, Delivery, Payload, deliver
from benchmarks.broadcasting.processes import Node, Swarm

DEPTHS, FAN_OUT = (1, 2, 3), 2


class NotServed(Exception):
    """A worker got nothing in time, so that there is no time to compare."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is sent through uplinks of which speed, how often, and how long a broadcast may take."""

    payload: Payload
    bytes_per_s: float
    repeats: int
    patience_s: float
    within: Path | None

    @property
    def bound_s(self) -> float:
        """FAN_OUT * S / u."""
        return FAN_OUT * self.payload.size_bytes / self.bytes_per_s


def broadcast(depth: int, setting: Setting) -> Delivery:
    with Swarm(setting.within) as swarm:
        throttle = ours.Throttle(swarm)
        origin = ours.start_origin(swarm)
        senders = [origin]
        for _ in range(depth - 1):
            links = [throttle.link(sender.url, setting.bytes_per_s) for sender in senders]
            senders = [ours.start_relay(swarm, [link]) for link in links for _ in range(FAN_OUT)]
        links = [throttle.link(sender.url, setting.bytes_per_s) for sender in senders]
        workers: list[Node] = [ours.start_worker(swarm, [link]) for link in links for _ in range(FAN_OUT)]
        for worker in workers:
            worker.ready()
        time.sleep(SETTLE_S)
        return deliver(setting.payload, origin, workers, nodes=swarm.nodes, patience_s=setting.patience_s)


def seconds(delivery: Delivery) -> float:
    """Raises NotServed."""
    if delivery.served < delivery.workers:
        raise NotServed(f"{delivery.workers - delivery.served} of {delivery.workers} workers were not served")
    return delivery.seconds


def measure(setting: Setting) -> dict[str, float]:
    """Medians over rounds in which the depths take turns. Raises NotServed."""
    taken: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(setting.repeats):
        for depth in DEPTHS:
            taken[depth].append(seconds(broadcast(depth, setting)))
    medians = {depth: statistics.median(times) for depth, times in taken.items()}
    first, last = DEPTHS[0], DEPTHS[-1]
    return {
        "tree_bound_seconds": setting.bound_s,
        **{f"tree_seconds_depth{depth}": median for depth, median in medians.items()},
        **{f"share_of_bound_depth{depth}": setting.bound_s / median for depth, median in medians.items()},
        "extra_hop_s": (medians[last] - medians[first]) / (last - first),
    }
