"""Relays in the striped trees of `shardcast.tree`: bytes that leave the origin, and the time against the links' bound.

Eight relays and a worker fetch as the planner says, each relay and the origin behind an uplink of u. With N receivers
the lower bound for any schedule, max(S / u, N S / (9 u)), is S / u: half of what a tree of fan-out 2 takes.
"""

from __future__ import annotations

import statistics

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import Setting, deliver
from benchmarks.broadcasting.processes import NodeSwarm
from shardcast.tree import Member, plan

RELAYS = 8


def broadcast(setting: Setting) -> tuple[float, int]:
    """Return the seconds to the worker, and the bytes that left the origin. Raise WorkerNotServed."""
    with NodeSwarm(setting.within) as swarm:
        throttle = ours.Throttle(swarm)
        origin = ours.start_origin(swarm)
        root = throttle.link(origin.url, setting.bytes_per_s)
        relays = [ours.start_relay(swarm, []) for _ in range(RELAYS)]
        links = [throttle.link(relay.url, setting.bytes_per_s) for relay in relays]
        planned = plan([root], [Member(id=link, url=link) for link in links])
        for relay, link in zip(relays, links, strict=True):
            ours.follow(relay, planned.parents(link))
        worker = ours.start_striped_worker(swarm, planned.sources_for("worker"))
        return deliver(setting, origin, [worker]).complete_seconds(), throttle.sent_bytes(root)


def measure(setting: Setting) -> dict[str, float]:
    """Return medians over rounds. Raise WorkerNotServed."""
    rounds = [broadcast(setting) for _ in range(setting.repeats)]
    taken = statistics.median(each for each, _ in rounds)
    return {
        "striped_seconds": taken,
        "striped_share_of_bound": setting.payload.size_bytes / setting.bytes_per_s / taken,
        "striped_origin_bytes_over_size": statistics.median(sent for _, sent in rounds) / setting.payload.size_bytes,
    }
