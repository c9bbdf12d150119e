"""A whole file over one origin, two relays and eight workers, at full speed: ours and the peer's in turn.

Every broadcast is of new processes with empty folders, which have found each other before the order to publish. The
peer runs twice: at its users' intervals, published at another point of its relays' interval in each round, and with
relays and workers that look each second.

A virtual machine may hand pages that it does not use back to its host, and then the first write to each costs more than
all else (2.6 s of system time for a GiB were seen). So as much memory as a broadcast writes is touched before each, for
both sides alike.
"""

from __future__ import annotations

import mmap
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import BroadcastFile, BroadcastResult, Setting, deliver
from benchmarks.broadcasting.peer import ShardcastPeer
from benchmarks.broadcasting.processes import Node, NodeSwarm

RELAYS = 2

PEER_KEYS = (
    "full_speedup_vs_peer_defaults",
    "full_speedup_vs_peer_1s",
    "workers_never_served_peer",
    "cpu_s_per_gib_vs_peer",
)

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class BroadcastSide:
    """Functions that start a side's nodes, and the seconds over which rounds spread the order to publish."""

    start_origin: Callable[[NodeSwarm], Node]
    start_relay: Callable[[NodeSwarm, Sequence[str]], Node]
    start_worker: Callable[[NodeSwarm, Sequence[str]], Node]
    spread_s: float = 0.0


def sides(environment: Path | None) -> dict[str, BroadcastSide]:
    """Return ours, and the peer of this environment at both intervals."""
    found = {"ours": BroadcastSide(ours.start_origin, ours.start_relay, ours.start_worker)}
    if environment is not None:
        peer = ShardcastPeer(environment)
        eager = replace(peer, relay_interval_s=1, worker_interval_s=1)
        for name, each in (("peer_defaults", peer), ("peer_1s", eager)):
            found[name] = BroadcastSide(each.start_origin, each.start_relay, each.start_worker, each.relay_interval_s)
    return found


def broadcast(side: BroadcastSide, setting: Setting, workers: int, share: float) -> BroadcastResult:
    """Broadcast once, ordered after this share of the side's spread."""
    with NodeSwarm(setting.within) as swarm:
        origin = side.start_origin(swarm)
        relays = [side.start_relay(swarm, [origin.url]) for _ in range(RELAYS)]
        sources = [relay.url for relay in relays]
        started = [side.start_worker(swarm, sources) for _ in range(workers)]
        for worker in started:
            worker.ready()
        touch_memory(2 * (workers + RELAYS + 1) * setting.payload.size_bytes)
        time.sleep(side.spread_s * share)
        return deliver(setting, origin, started, nodes=swarm.nodes)


def touch_memory(size_bytes: int) -> None:
    """Make the host back that much memory, or most of what is free."""
    size_bytes = min(size_bytes, psutil.virtual_memory().free * 8 // 10)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, max(mmap.PAGESIZE, size_bytes), flags=flags).close()


def measure(setting: Setting, workers: int, environment: Path | None) -> dict[str, float | None]:
    """Measure all figures; those of the peer are null without its environment."""
    found = sides(environment)
    rounds: dict[str, list[BroadcastResult]] = {name: [] for name in found}
    order, shuffler = list(found), random.Random(0)
    for number in range(setting.repeats):
        for name in order:
            rounds[name].append(broadcast(found[name], setting, workers, (number + 0.5) / setting.repeats))
        shuffler.shuffle(order)
    figures: dict[str, float | None] = dict.fromkeys(PEER_KEYS)
    return figures | own_figures(rounds["ours"], setting.payload) | peer_figures(rounds, setting.payload)


def own_figures(rounds: Sequence[BroadcastResult], payload: BroadcastFile) -> dict[str, float | None]:
    return {
        "full_seconds": statistics.median(each.seconds for each in rounds),
        "workers_never_served": never_served(rounds),
        "cpu_s_per_gib": median_of_known([cpu_s_per_gib(each, payload) for each in rounds]),
        "client_memory_mib": max(each.peak_bytes for each in rounds) / _MIB,
        "client_written_over_size": max(each.written_bytes for each in rounds) / payload.size_bytes,
    }


def peer_figures(rounds: dict[str, list[BroadcastResult]], payload: BroadcastFile) -> dict[str, float | None]:
    """Compute the figures against the peer at each interval, and the worst for us of both."""
    theirs = {name: each for name, each in rounds.items() if name != "ours"}
    if not theirs:
        return {}
    figures, cpu_ratios = dict[str, float | None](), list[float | None]()
    for name, each in theirs.items():
        pairs = list(zip(rounds["ours"], each, strict=True))
        figures |= {
            f"full_speedup_vs_{name}": statistics.median(other.seconds / own.seconds for own, other in pairs),
            f"full_seconds_{name}": statistics.median(other.seconds for other in each),
            f"cpu_s_per_gib_{name}": median_of_known([cpu_s_per_gib(other, payload) for other in each]),
            f"workers_never_served_{name}": never_served(each),
            f"client_written_over_size_{name}": max(other.written_bytes for other in each) / payload.size_bytes,
        }
        cpu_ratios.append(median_of_known([cpu_ratio(own, other, payload) for own, other in pairs]))
    figures["workers_never_served_peer"] = max(never_served(each) for each in theirs.values())
    figures["cpu_s_per_gib_vs_peer"] = max((ratio for ratio in cpu_ratios if ratio is not None), default=None)
    return figures


def never_served(rounds: Sequence[BroadcastResult]) -> int:
    """Return the workers without the file in the worst round."""
    return max(each.workers - each.served for each in rounds)


def cpu_s_per_gib(each: BroadcastResult, payload: BroadcastFile) -> float | None:
    """Return the CPU seconds of all processes over what arrived at workers; None if nothing did."""
    arrived = each.served * payload.size_bytes
    return each.cpu_s * _GIB / arrived if arrived else None


def cpu_ratio(own: BroadcastResult, other: BroadcastResult, payload: BroadcastFile) -> float | None:
    ours, theirs = cpu_s_per_gib(own, payload), cpu_s_per_gib(other, payload)
    return ours / theirs if ours is not None and theirs else None


def median_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
