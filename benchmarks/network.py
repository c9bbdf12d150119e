"""Joining by peers and head propagation: `python -m benchmarks.network [--json] [--nodes N] [--only PART ...]`.

A real `swarmproof coordinator` with a peer beside it, and 24 processes on loopback that are told one string
(`benchmarks.networking.node`): each finds the run, registers, takes a lease, and follows the run's head. Policies are
recorded in the coordinator's database as the trainer records them. Parts, each with processes of its own:

    floor      what one hop costs, by its parts and between two idle nodes
    calm       nodes join one by one; heads; bursts of heads; then a third of the nodes is killed between heads
    bootstrap  nodes join all at once; the peer that they began with is killed for good; heads
    hostile    a third of all are attackers (`networking.hostile`) and were there first; heads; then the same without
               the peer that all began with
    gossipsub  our links and GossipSub of py-libp2p 0.8.1, with as many processes each, at the same time and in turn
    worker     one real `swarmproof worker --join`, with torch, a policy to fetch and a model to load

Figures, `_p50`, `_p95`, `_p99` being quantiles:

    join_s          from a node's start, imports and all, to its first lease; each starts when the one before is in
    head_ms         from before a head is recorded until a node knows of it; of all pairs of a head and a live node
    reached_share   of these pairs, those within two seconds; a node that knows a newer head counts
    burst_newest    twenty heads at once: when the last of them is known, from before it was recorded
    killed_by_input processes that ended, or whose network began again, without having been killed
    *_per_head      of one node, beyond what it uses while nothing happens; bytes are TCP's payload, encrypted
    memory_libp2p_mib   what a node has in memory over one that knows the coordinator's URL and has no peers

Linux only. Six to ten minutes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.networking import floor, heads
from benchmarks.networking.heads import Spread
from benchmarks.networking.hostile import KINDS
from benchmarks.networking.reference import compare
from benchmarks.networking.run import Run, running
from benchmarks.networking.workers import join_seconds
from benchmarks.report import make_parser, report, say
from benchmarks.timing import quantile
from coordinator.http.descriptor_watch import POLL_SECONDS

SETTLE_SECONDS: Final = 3.0
FIRST_SECONDS: Final = 5.0
"""Head start of the attackers."""

LATE_SECONDS: Final = 20.0
"""Settling time where news may wait until a node polls the coordinator."""

Figures = dict[str, Any]


def measure_floor(options: argparse.Namespace, _rng: random.Random) -> Figures:
    """Measure the costs of a hop, and bound the last node's: the coordinator's next poll, a hop to each node."""
    hop_ms = floor.hop_ms()
    hops_ms = options.nodes * hop_ms / len(os.sched_getaffinity(0))
    return {
        "floor_check_ms": round(floor.check_ms(), 3),
        "floor_tcp_ms": round(floor.tcp_ms(), 3),
        "hop_ms": round(hop_ms, 2),
        "head_ms_floor_p99": round(1000 * POLL_SECONDS + hops_ms, 1),
    }


def measure_calm(options: argparse.Namespace, rng: random.Random) -> Figures:
    """Measure joining one by one, heads, what they cost, bursts, and the loss of a third."""
    with running(own_peer=False) as run:
        figures = joining(run.join_one_by_one(options.nodes), "join_s")
        time.sleep(SETTLE_SECONDS)
        idle, (spread, busy) = watched(run, options.idle), timed_heads(run, options.heads, rng)
        cost = heads.costs(idle, busy, heads=options.heads)
        figures |= spreading(spread, "") | {
            "cpu_ms_per_head": round(cost.cpu_ms, 2),
            "frames_per_head": round(cost.frames, 1),
            "sent_bytes_per_head": round(cost.sent_bytes),
            "idle_cpu_ms_per_s": round(cost.idle_cpu_ms_per_s, 2),
        }
        figures |= bursts(run, options.bursts) | memory(run)
        figures |= spreading(third_killed(run, options.heads, rng), "_third_killed")
        return figures | {"killed_by_input": run.ended_by_themselves()}


def measure_bootstrap(options: argparse.Namespace, rng: random.Random) -> Figures:
    """Measure joining all at once, and heads without the bootstrap peer."""
    with running(own_peer=True) as run:
        figures = joining(run.join_at_once(options.nodes), "join_s_at_once")
        time.sleep(SETTLE_SECONDS)
        figures |= without_bootstrap(run, options.heads, rng, "_bootstrap_dead")
        return figures | {"killed_by_input": run.ended_by_themselves()}


def measure_hostile(options: argparse.Namespace, rng: random.Random) -> Figures:
    """Start attackers, then the others; measure with and without the bootstrap peer."""
    with running(own_peer=True) as run:
        hostile = options.nodes // 3
        for index in range(hostile):
            run.start_hostile(KINDS[index % len(KINDS)])
        time.sleep(FIRST_SECONDS)
        figures = joining(run.join_one_by_one(options.nodes - hostile), "join_s_third_hostile")
        time.sleep(SETTLE_SECONDS)
        spread, _ = heads.published_and_seen(run, options.heads, rng)
        figures |= spreading(spread, "_third_hostile")
        figures |= without_bootstrap(run, options.heads, rng, "_third_hostile_bootstrap_dead")
        refused = sum(report["network"]["frames"]["refused"] for report in run.reports())
        alive = sum(node.exit_code is None for node in run.hostile)
        return figures | {
            "hostile": hostile,
            "hostile_frames_refused": refused,
            "hostile_alive": alive,
            "killed_by_input": run.ended_by_themselves(),
        }


def measure_gossipsub(options: argparse.Namespace, rng: random.Random) -> Figures:
    """Compare our links with GossipSub."""
    figures: Figures = {}
    both = compare(options.nodes, heads=options.heads, bursts=options.bursts, rng=rng)
    for name, one in zip(("links", "gossipsub"), both, strict=True):
        figures |= {
            f"{name}_head_ms_p50": one.calm.quantile_ms(0.5),
            f"{name}_head_ms_p99": one.calm.quantile_ms(0.99),
            f"{name}_reached_share": round(one.calm.reached_share, 4),
            f"{name}_burst_newest_ms_p99": one.newest_of_burst.quantile_ms(0.99),
            f"{name}_burst_newest_share": round(one.newest_of_burst.reached_share, 4),
            f"{name}_cpu_ms_per_s": round(one.cpu_ms_per_s, 2),
            f"{name}_memory_mib": round(one.memory_mib, 1),
        }
    delivered = both[1].delivered_share
    return figures | {"gossipsub_burst_delivered_share": None if delivered is None else round(delivered, 4)}


def measure_worker(_options: argparse.Namespace, _rng: random.Random) -> Figures:
    """Time the start of one real worker."""
    with tempfile.TemporaryDirectory(prefix="network-") as folder:
        return {"worker_join_s": round(join_seconds(Path(folder), count=1)[0], 2)}


PARTS: Final[dict[str, Callable[[argparse.Namespace, random.Random], Figures]]] = {
    "floor": measure_floor,
    "calm": measure_calm,
    "bootstrap": measure_bootstrap,
    "hostile": measure_hostile,
    "gossipsub": measure_gossipsub,
    "worker": measure_worker,
}


def joining(said: Sequence[dict[str, float]], name: str) -> Figures:
    """Return quantiles from start to first lease; where nodes came one by one, also the medians of its stages."""
    times = [one["leased_at"] - one["started_at"] for one in said]
    figures: Figures = {f"{name}_{tag}": round(quantile(times, share), 2) for tag, share in _SHARES}
    if name == "join_s":
        stages = ("started_at", "imported_at", "entered_at", "leased_at")
        for before, after in itertools.pairwise(stages):
            took = [one[after] - one[before] for one in said]
            figures[f"join_s_{after.removesuffix('_at')}_p50"] = round(quantile(took, 0.5), 2)
    return figures


_SHARES: Final = (("p50", 0.5), ("p95", 0.95))


def spreading(spread: Spread, suffix: str) -> Figures:
    """Return the figures of heads."""
    return {
        f"head_ms_p50{suffix}": spread.quantile_ms(0.5),
        f"head_ms_p99{suffix}": spread.quantile_ms(0.99),
        f"reached_share{suffix}": round(spread.reached_share, 4),
    }


def watched(run: Run, seconds: float) -> heads.Span:
    """Observe what the nodes use while nothing happens."""
    before, since = run.reports(), time.monotonic()
    time.sleep(seconds)
    return heads.Span(before, run.reports(), time.monotonic() - since)


def timed_heads(run: Run, count: int, rng: random.Random) -> tuple[Spread, heads.Span]:
    """Publish heads, and observe what the nodes use meanwhile."""
    before, since = run.reports(), time.monotonic()
    spread, after = heads.published_and_seen(run, count, rng)
    return spread, heads.Span(before, after, time.monotonic() - since)


def bursts(run: Run, count: int) -> Figures:
    """Publish bursts, and time the last head of each."""
    seconds = [one for _ in range(count) for one in heads.burst(run).seconds]
    spread = Spread(seconds)
    return {
        "burst_newest_ms_p99": spread.quantile_ms(0.99),
        "burst_newest_share": round(spread.reached_share, 4),
    }


def memory(run: Run) -> Figures:
    """Compare the memory of nodes with peers with that of one without."""
    reports = run.reports()
    mean = sum(report["memory_mib"] for report in reports) / len(reports)
    alone = run.start_node("--coordinator", run.url, "--run-id", run.invitation.run_id)
    alone.reply()
    time.sleep(SETTLE_SECONDS)
    without = run.reports()[-1]["memory_mib"]
    run.kill([alone])
    return {"memory_mib": round(mean, 1), "memory_libp2p_mib": round(mean - without, 1)}


def third_killed(run: Run, count: int, rng: random.Random) -> Spread:
    """Publish heads, kill a third of the nodes, and time further heads at those that live."""
    heads.publish(run, count // 4, rng)
    run.kill(rng.sample(run.live, len(run.live) // 3))
    spread, _ = heads.published_and_seen(run, count - count // 4, rng)
    return spread


def without_bootstrap(run: Run, count: int, rng: random.Random, suffix: str) -> Figures:
    """Kill the bootstrap peer, and time heads without it."""
    run.kill_peer()
    spread, _ = heads.published_and_seen(run, count, rng, settle_seconds=LATE_SECONDS)
    return spreading(spread, suffix) | {f"head_ms_max{suffix}": spread.quantile_ms(1.0)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--heads", type=int, default=50, help="of each part (default 50)")
    parser.add_argument("--bursts", type=int, default=5, help="of twenty heads each (default 5)")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds in which nothing happens (default 20)")
    parser.add_argument("--only", action="append", choices=list(PARTS), metavar="PART")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    figures: Figures = {"nodes": options.nodes, "killed_by_input": 0}
    for name in [name for name in PARTS if not options.only or name in options.only]:
        found = PARTS[name](options, rng)
        say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
        killed = figures["killed_by_input"] + found.pop("killed_by_input", 0)
        figures |= found | {"killed_by_input": killed}
    notes: dict[str, Any] = {"heads": options.heads, "bursts": options.bursts, "seed": options.seed}
    notes |= {key: "more than that share never came" for key, value in figures.items() if value is None}
    report("network", options, figures, notes)


if __name__ == "__main__":
    main()
