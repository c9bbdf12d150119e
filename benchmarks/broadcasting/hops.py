"""Head latency through a chain of an origin and three relays, without caps, each following the one before.

Versions are tiny, so that what is measured is the long poll, a signature, a manifest and what a node does with them.
A version is visible at a node when a long poll there, which was waiting since before the version existed, is answered.
"""

from __future__ import annotations

import http.client
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import SETTLE_S, WorkerNotServed
from benchmarks.broadcasting.processes import Node, NodeSwarm

DEPTH, SIZE_BYTES = 3, 64 * 1024

_BETWEEN_S = 0.3
"""For the watchers to poll again: a version that arrives while nobody waits says nothing of a long poll."""


def visible_at(node: Node, version: int, patience_s: float) -> float:
    """Return when a long poll for `version` was answered, by `time.monotonic`. Raise WorkerNotServed."""
    connection = http.client.HTTPConnection("127.0.0.1", int(node.url.rpartition(":")[2]), timeout=patience_s)
    try:
        connection.request("GET", f"/v1/head?after={version - 1}&wait={patience_s:.0f}")
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise WorkerNotServed(f"{node.name} shows no version {version} after {patience_s:.0f} s")
        return time.monotonic()
    finally:
        connection.close()


def publish(origin: Node, path: Path, version: int, patience_s: float) -> float:
    """Publish other bytes than before; return when that was done."""
    path.write_bytes(blake3(version.to_bytes(8, "big")).digest(length=SIZE_BYTES))
    origin.send(publish=str(path), version=version)
    at: float = origin.reply(patience_s)["at"]
    return at


def delays(chain: Sequence[Node], path: Path, *, versions: int, patience_s: float) -> list[list[float]]:
    """Return for each version the seconds from the end of publishing to each node of `chain`, the origin first."""
    found = list[list[float]]()
    with ThreadPoolExecutor(len(chain)) as pool:
        for version in range(1, versions + 1):
            watching = [pool.submit(visible_at, node, version, patience_s) for node in chain]
            time.sleep(_BETWEEN_S)
            published = publish(chain[0], path, version, patience_s)
            found.append([each.result() - published for each in watching])
    return found


def measure(*, versions: int, patience_s: float, within: Path | None) -> dict[str, float]:
    """Return medians over versions, without the first, which opens connections. Raise WorkerNotServed."""
    with NodeSwarm(within) as swarm:
        chain = [ours.start_origin(swarm)]
        for _ in range(DEPTH):
            chain.append(ours.start_relay(swarm, [chain[-1].url]))
        chain[-1].ready()
        time.sleep(SETTLE_S)
        # A server waits for 30 s at most.
        rows = delays(chain, swarm.folder / "tiny", versions=versions + 1, patience_s=min(30.0, patience_s))[1:]
    by_depth = [statistics.median(row[depth] for row in rows) * 1e3 for depth in range(DEPTH + 1)]
    return {
        "head_ms_per_hop": statistics.median(row[DEPTH] for row in rows) * 1e3 / DEPTH,
        "head_ms_per_hop_worst": max(row[DEPTH] for row in rows) * 1e3 / DEPTH,
        **{f"head_ms_depth{depth}": by_depth[depth] for depth in range(1, DEPTH + 1)},
    }
