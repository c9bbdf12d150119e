"""Admission control for inbound connections: how many at once, how fast, and whom to evict when full.

A flood from one network must not keep out others, so connections are limited only when full, and then the most crowded
network is evicted from (after Bitcoin Core's peer eviction). This module decides and counts; it touches no connection.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from node.discovery.peer_book import subnet_of
from node.p2p.transport import TrioTokenBucket

MAX_HANDSHAKES: Final = 64
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
        waiting = [connection.subnet for connection in self._connections if not connection.handshaken]
        if len(waiting) >= MAX_HANDSHAKES or waiting.count(subnet) >= MAX_HANDSHAKES_PER_SUBNET:
            return None
        if not self._bucket(subnet).try_acquire() or not self._make_room(subnet):
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
        subnets = Counter(connection.subnet for connection in self._connections)
        largest = max(subnets.values())
        among = [connection for connection in self._connections if subnets[connection.subnet] == largest]
        idle = [connection for connection in among if not connection.busy()]
        if idle:
            evicted = min(idle, key=lambda connection: connection.opened_at)
        elif subnets[subnet] < largest:
            evicted = random.choice(among)
        else:
            return False
        self._connections.discard(evicted)
        evicted.scope.cancel()
        return True

    def _bucket(self, subnet: str) -> TrioTokenBucket:
        bucket = self._buckets.pop(subnet, None) or TrioTokenBucket(rate=HANDSHAKES_PER_SECOND, burst=BURST_HANDSHAKES)
        self._buckets[subnet] = bucket
        if len(self._buckets) > MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return bucket
