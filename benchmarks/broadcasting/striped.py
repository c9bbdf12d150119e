"""Relays in the striped trees of `shardcast.tree`: bytes that leave the origin, and the time against what links allow.

Eight relays and a worker fetch as the planner says, each relay and the origin behind an uplink of u. With N receivers
the lower bound for any schedule, max(S / u, N S / (9 u)), is S / u: half of what a tree of fan-out 2 takes.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import SETTLE_S, deliver
from benchmarks.broadcasting.processes import Swarm
from benchmarks.broadcasting.trees import Setting, seconds
from shardcast.tree import Member, plan

RELAYS = 8


def broadcast(setting: Setting) -> tuple[float, int]:
    """Seconds to the worker, and bytes that left the origin. Raises NotServed."""
    with Swarm(setting.within) as swarm:
        throttle = ours.Throttle(swarm)
        origin = ours.start_origin(swarm)
        root = throttle.link(origin.url, setting.bytes_per_s)
        relays = [ours.start_relay(swarm, []) for _ in range(RELAYS)]
        links = [throttle.link(relay.url, setting.bytes_per_s) for relay in relays]
        planned = plan([root], [Member(id=link, url=link) for link in links])
        for relay, link in zip(relays, links, strict=True):
            ours.follow(relay, planned.parents(link))
        worker = ours.start_striped_worker(swarm, planned.sources_for("worker")).ready()
        time.sleep(SETTLE_S)
        delivery = deliver(setting.payload, origin, [worker], nodes=swarm.nodes, patience_s=setting.patience_s)
        return seconds(delivery), throttle.sent_bytes(root)


def measure(setting: Setting) -> dict[str, float]:
    """Medians over rounds. Raises NotServed."""
    rounds = [broadcast(setting) for _ in range(setting.repeats)]
    taken = statistics.median(each for each, _ in rounds)
    return {
        "striped_seconds": taken,
        "striped_share_of_bound": setting.payload.size_bytes / setting.bytes_per_s / taken,
        "striped_origin_bytes_over_size": statistics.median(sent for _, sent in rounds) / setting.payload.size_bytes,
    }
