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
from benchmarks.broadcasting.delivery import SETTLE_S, Delivery, Payload, deliver
from benchmarks.broadcasting.peer import Peer
from benchmarks.broadcasting.processes import Node, Swarm

RELAYS = 2

PEER_KEYS = (
    "full_speedup_vs_peer_defaults",
    "full_speedup_vs_peer_1s",
    "workers_never_served_peer",
    "cpu_s_per_gib_vs_peer",
)

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Setting:
    """How the file is sent. A worker that has nothing after `patience_s` counts as never served."""

    payload: Payload
    workers: int
    repeats: int
    patience_s: float
    within: Path | None


@dataclass(frozen=True, slots=True)
class Side:
    """Who starts the nodes, and over how many seconds the rounds spread the order to publish."""

    start_origin: Callable[[Swarm], Node]
    start_relay: Callable[[Swarm, Sequence[str]], Node]
    start_worker: Callable[[Swarm, Sequence[str]], Node]
    spread_s: float = 0.0


def sides(environment: Path | None) -> dict[str, Side]:
    """Ours, and the peer of this environment at both intervals."""
    found = {"ours": Side(ours.start_origin, ours.start_relay, ours.start_worker)}
    if environment is not None:
        peer = Peer(environment)
        eager = replace(peer, relay_interval_s=1, worker_interval_s=1)
        for name, each in (("peer_defaults", peer), ("peer_1s", eager)):
            found[name] = Side(each.start_origin, each.start_relay, each.start_worker, each.relay_interval_s)
    return found


def broadcast(side: Side, setting: Setting, share: float) -> Delivery:
    """One broadcast, ordered after this share of the side's spread."""
    with Swarm(setting.within) as swarm:
        origin = side.start_origin(swarm)
        relays = [side.start_relay(swarm, [origin.url]) for _ in range(RELAYS)]
        sources = [relay.url for relay in relays]
        workers = [side.start_worker(swarm, sources) for _ in range(setting.workers)]
        for worker in workers:
            worker.ready()
        touch_memory(2 * (setting.workers + RELAYS + 1) * setting.payload.size_bytes)
        time.sleep(SETTLE_S + side.spread_s * share)
        return deliver(setting.payload, origin, workers, nodes=swarm.nodes, patience_s=setting.patience_s)


def touch_memory(size_bytes: int) -> None:
    """Have the host back that much memory, or most of what is free."""
    size_bytes = min(size_bytes, psutil.virtual_memory().free * 8 // 10)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, max(mmap.PAGESIZE, size_bytes), flags=flags).close()


def measure(setting: Setting, environment: Path | None) -> dict[str, float | None]:
    """All figures; those of the peer are null without its environment."""
    found = sides(environment)
    rounds: dict[str, list[Delivery]] = {name: [] for name in found}
    order, shuffler = list(found), random.Random(0)
    for number in range(setting.repeats):
        for name in order:
            rounds[name].append(broadcast(found[name], setting, (number + 0.5) / setting.repeats))
        shuffler.shuffle(order)
    figures: dict[str, float | None] = dict.fromkeys(PEER_KEYS)
    return figures | own_figures(rounds["ours"], setting.payload) | peer_figures(rounds, setting.payload)


def own_figures(rounds: Sequence[Delivery], payload: Payload) -> dict[str, float | None]:
    return {
        "full_seconds": statistics.median(each.seconds for each in rounds),
        "workers_never_served": never_served(rounds),
        "cpu_s_per_gib": median_of_known([cpu_s_per_gib(each, payload) for each in rounds]),
        "client_memory_mib": max(each.peak_bytes for each in rounds) / _MIB,
        "client_written_over_size": max(each.written_bytes for each in rounds) / payload.size_bytes,
    }


def peer_figures(rounds: dict[str, list[Delivery]], payload: Payload) -> dict[str, float | None]:
    """Those of each interval, and over both: the worst for us."""
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


def never_served(rounds: Sequence[Delivery]) -> int:
    """Workers of the worst round."""
    return max(each.workers - each.served for each in rounds)


def cpu_s_per_gib(each: Delivery, payload: Payload) -> float | None:
    """Of all processes, over what arrived at workers; None if nothing did."""
    arrived = each.served * payload.size_bytes
    return each.cpu_s * _GIB / arrived if arrived else None


def cpu_ratio(own: Delivery, other: Delivery, payload: Payload) -> float | None:
    ours, theirs = cpu_s_per_gib(own, payload), cpu_s_per_gib(other, payload)
    return ours / theirs if ours is not None and theirs else None


def median_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
