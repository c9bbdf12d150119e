"""The cheapest chain of deltas from what is held to what is wanted: pure, but for the manifests it asks for."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from shardcast.manifest import Delta, SignedManifest

MAX_HOPS = 32
"""Deltas of one chain, and so manifests that are asked for to find it."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One delta of a chain: to `signed`, by its delta number `index`."""

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
    """Deltas to apply, in order, to get from one of `bases` to `signed` by the fewest bytes (Dijkstra, 1959).

    `bases` has the version of every result digest that is held. Empty if every chain costs `less_than` bytes or
    more; manifests on the way count, too.
    """
    oldest = min(bases.values(), default=signed.manifest.version)
    order = itertools.count()
    frontier: list[tuple[float, int, SignedManifest | None, list[Hop]]] = [(0, next(order), signed, [])]
    asked = 0
    while frontier:
        cost, _, reached, way = heapq.heappop(frontier)
        if reached is None:
            return way[::-1]
        for index, delta in enumerate(reached.manifest.deltas):
            total, further = cost + delta.payload.payload_bytes, [*way, Hop(reached, index)]
            if total >= less_than:
                continue
            if delta.base in bases:
                heapq.heappush(frontier, (total, next(order), None, further))
            elif delta.base_version > oldest and asked < MAX_HOPS:
                asked += 1
                earlier = await manifest_of(delta.base_version)
                # Whose digest is not the one that the delta starts from, is another history's.
                if earlier is not None and earlier.manifest.result_digest == delta.base:
                    heapq.heappush(frontier, (total + len(earlier.envelope), next(order), earlier, further))
    return []
