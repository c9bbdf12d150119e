"""Admission control for inbound connections: how many at once, how fast, and whom to evict when full.

A flood from one network must not keep out others, so connections are limited only when full, and then the most crowded
network is evicted from (after Bitcoin Core's peer eviction). This module decides and counts; it touches no connection.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import trio

from node.discovery.peer_book import subnet_of
from node.p2p.transport import TrioTokenBucket

MAX_HANDSHAKES: Final = 64
"""At once. One more ends the oldest of the most crowded subnet: an honest one takes far less than a second."""
MAX_HANDSHAKES_PER_SUBNET: Final = 16
HANDSHAKES_PER_SECOND: Final = 8.0
BURST_HANDSHAKES: Final = 128
"""Per subnet (`subnet_of`). A handshake takes about 10 ms of a core, so a subnet gets a tenth of one on average."""

MAX_BUCKETS: Final = 4096


@dataclass(eq=False)
class InboundConnection:
    """One inbound connection: cancel `scope` to close it; `busy` returns whether it carries any stream."""

    subnet: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    opened_at: float = field(default_factory=trio.current_time)
    handshaken: bool = False
    busy: Callable[[], bool] = lambda: False


class AdmissionControl:
    """Admits at most `capacity` inbound connections."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._connections: set[InboundConnection] = set()
        self._buckets: dict[str, TrioTokenBucket] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def admit(self, host: str) -> InboundConnection | None:
        """Register a connection from `host`; None if it is not admitted."""
        subnet = subnet_of(host)
        waiting = [connection for connection in self._connections if not connection.handshaken]
        if sum(connection.subnet == subnet for connection in waiting) >= MAX_HANDSHAKES_PER_SUBNET:
            return None
        if not self._bucket(subnet).try_acquire():
            return None
        if len(waiting) >= MAX_HANDSHAKES:
            among, _ = _most_crowded(waiting)
            self._evict(min(among, key=lambda connection: connection.opened_at))
        if not self._make_room(subnet):
            return None
        connection = InboundConnection(subnet)
        self._connections.add(connection)
        return connection

    def release(self, connection: InboundConnection) -> None:
        """Unregister a closed connection."""
        self._connections.discard(connection)

    def _make_room(self, subnet: str) -> bool:
        """Return whether a connection fits, after evicting another one if need be."""
        if len(self._connections) < self._capacity:
            return True
        among, subnets = _most_crowded(self._connections)
        idle = [connection for connection in among if not connection.busy()]
        if idle:
            evicted = min(idle, key=lambda connection: connection.opened_at)
        elif subnets[subnet] < max(subnets.values()):
            evicted = random.choice(among)
        else:
            return False
        self._evict(evicted)
        return True

    def _evict(self, connection: InboundConnection) -> None:
        self._connections.discard(connection)
        connection.scope.cancel()

    def _bucket(self, subnet: str) -> TrioTokenBucket:
        bucket = self._buckets.pop(subnet, None) or TrioTokenBucket(rate=HANDSHAKES_PER_SECOND, burst=BURST_HANDSHAKES)
        self._buckets[subnet] = bucket
        if len(self._buckets) > MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return bucket


def _most_crowded(connections: Collection[InboundConnection]) -> tuple[list[InboundConnection], Counter[str]]:
    """Return the connections of the subnets with most of them, and how many each subnet has."""
    subnets = Counter(connection.subnet for connection in connections)
    largest = max(subnets.values())
    return [connection for connection in connections if subnets[connection.subnet] == largest], subnets
