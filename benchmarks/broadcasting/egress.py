"""Bytes that leave the origin when many workers fetch, over those for two: counted on its link, headers included."""

from __future__ import annotations

import statistics

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import Setting, deliver
from benchmarks.broadcasting.processes import NodeSwarm
from benchmarks.timing import median_ratio

RELAYS, FEW, MANY = 2, 2, 16


def origin_bytes(workers: int, setting: Setting) -> int:
    """Broadcast to workers in two processes; return the bytes that left the origin. Raise WorkerNotServed."""
    with NodeSwarm(setting.within) as swarm:
        throttle = ours.Throttle(swarm)
        origin = ours.start_origin(swarm)
        link = throttle.link(origin.url, None)
        sources = [ours.start_relay(swarm, [link]).url for _ in range(RELAYS)]
        halves = [ours.start_worker(swarm, sources, workers // 2) for _ in range(2)]
        deliver(setting, origin, halves, count=workers // 2).complete_seconds()
        return throttle.sent_bytes(link)


def measure(setting: Setting) -> dict[str, float]:
    """Return the median of the rounds' ratios, and bytes over the file's size, of which each relay needs one."""
    rounds = [(origin_bytes(FEW, setting), origin_bytes(MANY, setting)) for _ in range(setting.repeats)]
    few, many = zip(*rounds, strict=True)
    return {
        f"origin_bytes_{MANY}_over_{FEW}_workers": median_ratio(many, few),
        f"origin_bytes_over_size_{FEW}_workers": statistics.median(few) / setting.payload.size_bytes,
        f"origin_bytes_over_size_{MANY}_workers": statistics.median(many) / setting.payload.size_bytes,
    }
