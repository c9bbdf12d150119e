"""Simulated broadcast to 10,000 workers: time and origin egress over the planner's own trees, by a fluid model.

`python -m benchmarks.scale [--json] [--sigma S] [--error E]`. The plan is the one that a registry would make
(`shardcast.tree`); only the network is simulated, over what a chunk costs this machine, measured first. docs/scale.md
has the result and what the model leaves out.

The model. A sender splits its uplink evenly over those who fetch from it, and a receiver its downlink over the stripes;
what a flow leaves unused nobody takes. A stripe reaches a node at the least rate on its path, after every hop has held
one chunk back: its transfer, its digest, its write, and a round trip. A node is done with its last stripe, a broadcast
with its last node. Everybody fetches from the first candidate alone.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from benchmarks.report import make_parser, report
from shardcast.tree import Member, TreePlan, plan

MIB = 2**20
ORIGIN = "http://origin"
PAYLOAD_BYTES = 62e9  # INTELLECT-2 (arXiv 2505.07291): 62 GB in about 14 minutes at 590 Mb/s
INTELLECT2_S, INTELLECT2_MBPS = 14 * 60.0, 590.0
FULL_CHUNK, DELTA_CHUNK = 4 * MIB, MIB
MEASURE_BYTES = 192 * MIB
SLOWEST_MBPS = 20.0  # no uplink is drawn below it


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """Processor seconds for one chunk: to receive, digest and write it, and to send it from its file."""

    chunk_bytes: int
    receive_s: float
    digest_s: float
    write_s: float
    serve_s: float

    @property
    def take_s(self) -> float:
        return self.receive_s + self.digest_s + self.write_s


def chunk_costs(chunk_bytes: int) -> ChunkCosts:
    """Measure on one core: medians over `MEASURE_BYTES`, through a file's cached pages and a loopback connection."""
    rounds = MEASURE_BYTES // chunk_bytes
    chunk = random.Random(0).randbytes(chunk_bytes)
    with tempfile.TemporaryFile() as file:
        write_s = _per_call(lambda n: os.pwrite(file.fileno(), chunk, n % 16 * chunk_bytes), rounds)
        digest_s = _per_call(lambda _: blake3(chunk).digest(), rounds)
        taken: list[float] = []
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
            receiver, _ = server.accept()
            drain = threading.Thread(target=_drain, args=(receiver, rounds * chunk_bytes, taken))
            drain.start()
            serve_s = _per_call(lambda n: sender.sendfile(file, n % 16 * chunk_bytes, chunk_bytes), rounds)
            drain.join()
            receiver.close()
    return ChunkCosts(chunk_bytes, taken[0] / rounds, digest_s, write_s, serve_s)


def _per_call(call: Callable[[int], object], rounds: int) -> float:
    taken = []
    for number in range(rounds):
        start = time.thread_time()
        call(number)
        taken.append(time.thread_time() - start)
    return statistics.median(taken)


def _drain(receiver: socket.socket, wanted: int, taken: list[float]) -> None:
    buffer = bytearray(MIB)
    start = time.thread_time()
    while wanted > 0:
        wanted -= receiver.recv_into(buffer)
    taken.append(time.thread_time() - start)


# -- the network


@dataclass(frozen=True, slots=True)
class Network:
    """Members and workers, uplinks in bytes/s by URL, and the downlink of all."""

    members: Sequence[Member]
    workers: Sequence[str]
    uplinks: Mapping[str, float]
    downlink: float
    rtt_s: float


def make_network(given: argparse.Namespace, *, workers: int, serving: int = 0, serving_mbps: float = 0.0) -> Network:
    """Make relays, `workers` that only fetch, and `serving` members with uplinks around `serving_mbps`.

    Uplinks are log-normal around their median; the planner knows each but for a log-normal error.
    """
    draws = random.Random(given.seed)
    medians = [given.link_mbps] * given.relays + [serving_mbps] * serving
    uplinks = {ORIGIN: given.link_mbps / 8 * 1e6}
    members = []
    for number, median in enumerate(medians):
        url = f"http://node-{number}"
        uplinks[url] = max(SLOWEST_MBPS, median * draws.lognormvariate(0, given.sigma)) / 8 * 1e6
        members.append(Member(f"node-{number}", url, uplinks[url] * draws.lognormvariate(0, given.error)))
    names = [f"worker-{number}" for number in range(workers)]
    return Network(members, names, uplinks, given.link_mbps / 8 * 1e6, given.rtt_ms / 1e3)


def lower_bound_s(network: Network, payload: float) -> float:
    """Bound any schedule: S over the origin's uplink, over a downlink, and all that arrives over all uplinks."""
    receivers = len(network.members) + len(network.workers)
    return max(
        payload / network.uplinks[ORIGIN],
        payload / network.downlink,
        receivers * payload / sum(network.uplinks.values()),
    )


def parents(planned: TreePlan, network: Network) -> list[dict[str, str]]:
    """Map, for each stripe, each node to the sender that it fetches from."""
    asked = {member.url: planned.parents(member.id) for member in network.members}
    asked |= {worker: planned.sources_for(worker) for worker in network.workers}
    return [{node: stripes[stripe][0] for node, stripes in asked.items()} for stripe in range(planned.stripes)]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One payload: seconds until the last node and until the median one are done, and what the origin sent."""

    seconds: float
    median_seconds: float
    bound_s: float
    origin_bytes: float


def broadcast(trees: list[dict[str, str]], network: Network, payload: float, costs: ChunkCosts) -> Broadcast:
    """Simulate `payload` bytes down `trees`, one stripe each."""
    flows = Counter(sender for tree in trees for sender in tree.values())
    per_flow = {
        sender: min(network.uplinks[sender], costs.chunk_bytes / costs.serve_s) / count
        for sender, count in flows.items()
    }
    most = min(network.downlink, costs.chunk_bytes / costs.take_s) / len(trees)
    stripe_bytes = payload / len(trees)
    done: dict[str, float] = {}
    for tree in trees:
        for node, (rate, first_chunk_s) in _arrivals(tree, per_flow, most, network.rtt_s, costs).items():
            seconds = first_chunk_s + max(0.0, stripe_bytes - costs.chunk_bytes) / rate
            done[node] = max(done.get(node, 0.0), seconds)
    origin_bytes = flows[ORIGIN] * stripe_bytes
    return Broadcast(
        max(done.values()), statistics.median(done.values()), lower_bound_s(network, payload), origin_bytes
    )


def _arrivals(
    tree: Mapping[str, str], per_flow: Mapping[str, float], most: float, rtt_s: float, costs: ChunkCosts
) -> dict[str, tuple[float, float]]:
    """Return for each node the rate at which the stripe reaches it, and when its first chunk is there."""
    reached = {ORIGIN: (math.inf, 0.0)}
    for node in tree:
        path = [node]
        while path[-1] not in reached:
            path.append(tree[path[-1]])
        for child, parent in zip(path[-2::-1], path[:0:-1], strict=True):
            hop = min(per_flow[parent], most)
            rate, since = reached[parent]
            held_s = costs.chunk_bytes / hop + costs.take_s + costs.serve_s + rtt_s
            reached[child] = (min(rate, hop), since + held_s)
    del reached[ORIGIN]
    return reached


# -- the scenarios

Row = dict[str, Any]


def scenarios(given: argparse.Namespace) -> dict[str, Network]:
    return {
        "relays alone": make_network(given, workers=0),
        "workers only fetch": make_network(given, workers=given.workers),
        "workers serve": make_network(given, workers=0, serving=given.workers, serving_mbps=given.link_mbps),
        f"workers serve at {given.slow_mbps:g} Mb/s": make_network(
            given, workers=0, serving=given.workers, serving_mbps=given.slow_mbps
        ),
    }


def run(name: str, network: Network, stripes: int, given: argparse.Namespace, costs: Sequence[ChunkCosts]) -> Row:
    """Simulate a full payload and a delta over the same plan; return a row."""
    start = time.perf_counter()
    planned = plan([ORIGIN], network.members, stripes=stripes)
    planning_s = time.perf_counter() - start
    trees = parents(planned, network)
    full = broadcast(trees, network, PAYLOAD_BYTES, costs[0])
    delta = broadcast(trees, network, PAYLOAD_BYTES / given.delta_ratio, costs[1])
    return {
        "scenario": name,
        "trees": planned.stripes,
        "receivers": len(network.members) + len(network.workers),
        "members": len(network.members),
        "depth": planned.depth() + bool(network.workers),
        "planning_ms": planning_s * 1e3,
        "full": asdict(full),
        "delta": asdict(delta),
        "full_share_of_bound": full.bound_s / full.seconds,
        "delta_share_of_bound": delta.bound_s / delta.seconds,
        "origin_bytes_over_size": full.origin_bytes / PAYLOAD_BYTES,
    }


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def table(rows: Iterable[Row]) -> str:
    """Write GitHub's Markdown, as in docs/scale.md."""
    head = ("", "trees", "depth", "full", "bound", "median node", "delta", "bound", "origin sends", "plan")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        full, delta = row["full"], row["delta"]
        cells = (
            row["scenario"],
            str(row["trees"]),
            str(row["depth"]),
            duration(full["seconds"]),
            f"{duration(full['bound_s'])} ({row['full_share_of_bound']:.0%})",
            duration(full["median_seconds"]),
            duration(delta["seconds"]),
            f"{duration(delta['bound_s'])} ({row['delta_share_of_bound']:.0%})",
            f"{row['origin_bytes_over_size']:.2f} S",
            f"{row['planning_ms']:.0f} ms",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--relays", type=int, default=200)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--link-mbps", type=float, default=INTELLECT2_MBPS, help="origin, downlinks, median uplink")
    parser.add_argument("--slow-mbps", type=float, default=100.0, help="median uplink of workers in the last scenario")
    parser.add_argument("--sigma", type=float, default=0.5, help="of the uplinks' logarithms; 0: all equal")
    parser.add_argument("--error", type=float, default=0.0, help="of the planner's knowledge of them, likewise")
    parser.add_argument("--stripes", type=int, default=4)
    parser.add_argument("--delta-ratio", type=float, default=190.0, help="full bytes over a delta's")
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    costs = [chunk_costs(FULL_CHUNK), chunk_costs(DELTA_CHUNK)]
    rows = [
        run(name, network, stripes, given, costs)
        for name, network in scenarios(given).items()
        for stripes in (1, given.stripes)
    ]
    settings = {key: value for key, value in vars(given).items() if key != "json"}
    sections = {"chunk_costs": [asdict(cost) for cost in costs], "settings": settings}
    report("scale", given, {"intellect2_s": INTELLECT2_S}, rows=rows, **sections)
    if not given.json:
        print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
