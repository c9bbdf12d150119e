"""State shared by the HTTP handlers of one coordinator process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from coordinator.http.connections import DEFAULT_CONNECTION_LIMITS, ConnectionQuota
from coordinator.http.descriptor_watch import DescriptorWatch
from coordinator.http.intake import intake_of
from coordinator.http.load_shedding import LoadShedder
from coordinator.http.log_watch import LogWatch
from coordinator.http.metrics import Metrics
from coordinator.http.rate_limits import AddressLimiter, RateLimiter
from coordinator.http.shutdown import Shutdown
from coordinator.http.signed_requests import SignedRequests
from coordinator.http.write_queue import ReadQueue, WriteQueue
from coordinator.run.service import Coordinator
from coordinator.run.status import run_status
from shardcast.wire import encode

STATUS_SECONDS = 1.0
"""Maximum age of the public status, metrics and puzzle, the most expensive of the unauthenticated responses."""


class Cached:
    """Value recomputed once it is STATUS_SECONDS old, by one thread for all concurrent readers."""

    def __init__(self, compute: Callable[[], bytes]) -> None:
        self._compute, self._lock = compute, threading.Lock()
        self._computed: tuple[float, bytes] | None = None

    def get(self) -> bytes:
        """Return the value, at most STATUS_SECONDS old."""
        with self._lock:
            if self._computed is None or time.monotonic() - self._computed[0] >= STATUS_SECONDS:
                self._computed = (time.monotonic(), self._compute())
            return self._computed[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Rate limits in requests per minute: per address, signed per node, registrations (nodes, relays) per address."""

    per_address: int = 6000
    per_node: int = 1200
    registrations: int = 120


class HistoryQueue:
    """Has the log's history kept before receipts are sent, once for all that wait for it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._keeping: asyncio.Future[None] | None = None

    async def kept(self) -> None:
        """Return once it was kept of late; in a thread, since it waits for the disk."""
        if not self._coordinator.is_history_due:
            return
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.ensure_future(run_in_threadpool(self._coordinator.keep_history))
        await asyncio.shield(self._keeping)


class Service:
    """The run's coordinator with its rate limiters, caches and long-poll watchers."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        limits: RequestLimits,
        metrics: Metrics,
        shutdown: Shutdown,
        connections: Callable[[], ConnectionQuota | None],
    ) -> None:
        self.coordinator = coordinator
        self._connections = connections
        self.metrics = metrics
        self.shutdown = shutdown
        self.writes = WriteQueue(coordinator.home.database)
        per_node = RateLimiter(per_minute=limits.per_node, who="node")
        self.reads = ReadQueue(coordinator.home.database)
        self.shedder = LoadShedder(self.writes)
        self.signed = SignedRequests(
            coordinator, limiter=per_node, writes=self.writes, reads=self.reads, shedder=self.shedder
        )
        self.registrations = AddressLimiter(per_minute=limits.registrations)
        self.intake = intake_of(coordinator, self.writes)
        self.descriptors = DescriptorWatch(coordinator.descriptors, shutdown)
        self.history = HistoryQueue(coordinator)
        self.verdicts = LogWatch(coordinator.log_size, coordinator.entries)
        self.figures = Cached(metrics.render)
        self.puzzle = Cached(lambda: encode(coordinator.puzzle(now=time.time())))
        self.status = Cached(lambda: json.dumps(run_status(coordinator, now=time.time())).encode())

    @property
    def has_room_for_waiter(self) -> bool:
        """Whether one more request may wait for a verdict, and hold a connection meanwhile.

        A submission's id is public, so that anybody may wait for any: all of them hold half of the connections at most.
        """
        quota = self._connections()
        limits = DEFAULT_CONNECTION_LIMITS if quota is None else quota.limits
        return 2 * len(self.verdicts) < limits.connections
