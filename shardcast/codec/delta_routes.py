"""Find the cheapest chain of deltas from held versions to a wanted one; IO only through `manifest_of`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from shardcast.manifest import Delta, SignedManifest

MAX_HOPS = 32
"""Longest chain of deltas, and most manifests requested to find it."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One delta of a chain: delta number `index` of `signed`, which leads to `signed`."""

    signed: SignedManifest
    index: int

    @property
    def delta(self) -> Delta:
        return self.signed.manifest.deltas[self.index]


async def cheapest(
    signed: SignedManifest,
    bases: Mapping[str, int],
    *,
    less_than: float,
    manifest_of: Callable[[int], Awaitable[SignedManifest | None]],
) -> list[Hop]:
    """Find the deltas from one of `bases` to `signed` with the fewest bytes (Dijkstra, 1959), in order of application.

    `bases` maps each held result digest to its version. Manifests fetched on the way count towards the cost. Returns an
    empty list if every chain costs `less_than` bytes or more.
    """
    oldest = min(bases.values(), default=signed.manifest.version)
    order = itertools.count()
    frontier: list[tuple[float, int, SignedManifest | None, list[Hop]]] = [(0, next(order), signed, [])]
    requested = dict[int, SignedManifest | None]()
    settled = set[str]()
    while frontier:
        cost, _, reached, hops = heapq.heappop(frontier)
        if reached is None:
            return hops[::-1]
        if reached.digest in settled:
            continue
        settled.add(reached.digest)
        for index, delta in enumerate(reached.manifest.deltas):
            total, longer_chain = cost + delta.payload.payload_bytes, [*hops, Hop(reached, index)]
            if total >= less_than:
                continue
            if delta.base in bases:
                heapq.heappush(frontier, (total, next(order), None, longer_chain))
            elif delta.base_version > oldest:
                if delta.base_version not in requested and len(requested) < MAX_HOPS:
                    requested[delta.base_version] = await manifest_of(delta.base_version)
                earlier = requested.get(delta.base_version)
                # A manifest with another digest belongs to another history.
                if earlier is not None and earlier.manifest.result_digest == delta.base:
                    heapq.heappush(frontier, (total + len(earlier.envelope), next(order), earlier, longer_chain))
    return []
