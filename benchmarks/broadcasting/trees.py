"""Trees with capped uplinks: how near the measured time is to what the links allow, and what a further hop costs.

The origin and every relay feed `FAN_OUT` children each, through an uplink of `bytes_per_s` that these share; depth 1
is the origin and its workers. With N receivers and N / FAN_OUT nodes that send, the lower bound for any schedule,
max(S / u_origin, N * S / (u_origin + sum u_i)), is FAN_OUT * S / u: the bound of the tree without what its hops cost,
whatever the depth. Downlinks are not capped.
"""

from __future__ import annotations

import statistics

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import BroadcastResult, Setting, deliver
from benchmarks.broadcasting.processes import NodeSwarm

DEPTHS, FAN_OUT = (1, 2, 3), 2


def broadcast(depth: int, setting: Setting) -> BroadcastResult:
    with NodeSwarm(setting.within) as swarm:
        throttle = ours.Throttle(swarm)
        origin = ours.start_origin(swarm)
        senders = [origin]
        for _ in range(depth - 1):
            links = [throttle.link(sender.url, setting.bytes_per_s) for sender in senders]
            senders = [ours.start_relay(swarm, [link]) for link in links for _ in range(FAN_OUT)]
        links = [throttle.link(sender.url, setting.bytes_per_s) for sender in senders]
        workers = [ours.start_worker(swarm, [link]) for link in links for _ in range(FAN_OUT)]
        return deliver(setting, origin, workers)


def measure(setting: Setting) -> dict[str, float]:
    """Return medians over rounds in which the depths take turns. Raise WorkerNotServed."""
    bound_s = FAN_OUT * setting.payload.size_bytes / setting.bytes_per_s
    taken: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(setting.repeats):
        for depth in DEPTHS:
            taken[depth].append(broadcast(depth, setting).complete_seconds())
    medians = {depth: statistics.median(times) for depth, times in taken.items()}
    first, last = DEPTHS[0], DEPTHS[-1]
    return {
        "tree_bound_seconds": bound_s,
        **{f"tree_seconds_depth{depth}": median for depth, median in medians.items()},
        **{f"share_of_bound_depth{depth}": bound_s / median for depth, median in medians.items()},
        "extra_hop_s": (medians[last] - medians[first]) / (last - first),
    }
