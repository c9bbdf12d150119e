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

from node.discovery.peer_book import crowd_of
from node.p2p.transport import TrioTokenBucket

MAX_HANDSHAKES: Final = 64
MAX_HANDSHAKES_PER_CROWD: Final = 16
HANDSHAKES_PER_SECOND: Final = 8.0
BURST_HANDSHAKES: Final = 128
"""Per crowd (`crowd_of`). A handshake takes about 10 ms of a core, so a crowd gets a tenth of one in the long run."""

MAX_BUCKETS: Final = 4096


@dataclass(eq=False)
class InboundConnection:
    """One inbound connection: cancel `scope` to close it; `busy` returns whether it carries any stream."""

    crowd: str
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
        crowd = crowd_of(host)
        waiting = [connection.crowd for connection in self._connections if not connection.handshaken]
        if len(waiting) >= MAX_HANDSHAKES or waiting.count(crowd) >= MAX_HANDSHAKES_PER_CROWD:
            return None
        if not self._bucket(crowd).try_acquire() or not self._make_room(crowd):
            return None
        connection = InboundConnection(crowd)
        self._connections.add(connection)
        return connection

    def release(self, connection: InboundConnection) -> None:
        """Unregister a closed connection."""
        self._connections.discard(connection)

    def _make_room(self, crowd: str) -> bool:
        """Return whether a connection fits, after evicting another one if need be."""
        if len(self._connections) < self._capacity:
            return True
        crowds = Counter(connection.crowd for connection in self._connections)
        largest = max(crowds.values())
        among = [connection for connection in self._connections if crowds[connection.crowd] == largest]
        idle = [connection for connection in among if not connection.busy()]
        if idle:
            evicted = min(idle, key=lambda connection: connection.opened_at)
        elif crowds[crowd] < largest:
            evicted = random.choice(among)
        else:
            return False
        self._connections.discard(evicted)
        evicted.scope.cancel()
        return True

    def _bucket(self, crowd: str) -> TrioTokenBucket:
        bucket = self._buckets.pop(crowd, None) or TrioTokenBucket(rate=HANDSHAKES_PER_SECOND, burst=BURST_HANDSHAKES)
        self._buckets[crowd] = bucket
        if len(self._buckets) > MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return bucket
