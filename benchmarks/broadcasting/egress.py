"""Bytes that leave the origin when many workers fetch, over those for two: counted on its link, headers included."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import SETTLE_S, Payload, deliver
from benchmarks.broadcasting.processes import Swarm
from benchmarks.broadcasting.trees import seconds

RELAYS, FEW, MANY = 2, 2, 16


def origin_bytes(workers: int, payload: Payload, *, patience_s: float, within: Path | None) -> int:
    """Workers share two processes: only the origin is looked at. Raises NotServed."""
    with Swarm(within) as swarm:
        throttle = ours.Throttle(swarm)
        origin = ours.start_origin(swarm)
        link = throttle.link(origin.url, None)
        sources = [ours.start_relay(swarm, [link]).url for _ in range(RELAYS)]
        halves = [ours.start_worker(swarm, sources, workers // 2) for _ in range(2)]
        for half in halves:
            half.ready()
        time.sleep(SETTLE_S)
        seconds(deliver(payload, origin, halves, nodes=[], patience_s=patience_s, count=workers // 2))
        return throttle.sent_bytes(link)


def measure(payload: Payload, *, repeats: int, patience_s: float, within: Path | None) -> dict[str, float]:
    """The median of the rounds' ratios, and bytes over the file's size, of which each relay needs one."""
    few, many = list[int](), list[int]()
    for _ in range(repeats):
        few.append(origin_bytes(FEW, payload, patience_s=patience_s, within=within))
        many.append(origin_bytes(MANY, payload, patience_s=patience_s, within=within))
    return {
        f"origin_bytes_{MANY}_over_{FEW}_workers": statistics.median(
            above / below for above, below in zip(many, few, strict=True)
        ),
        f"origin_bytes_over_size_{FEW}_workers": statistics.median(few) / payload.size_bytes,
        f"origin_bytes_over_size_{MANY}_workers": statistics.median(many) / payload.size_bytes,
    }
