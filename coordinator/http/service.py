"""What the HTTP handlers of one coordinator process share."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.http.descriptor_watch import DescriptorWatch
from coordinator.http.intake import intake_of
from coordinator.http.log_watch import LogWatch
from coordinator.http.metrics import Metrics
from coordinator.http.rate_limits import AddressLimiter, RateLimiter
from coordinator.http.shutdown import Ending
from coordinator.http.signed_requests import SignedRequests
from coordinator.run.service import Coordinator
from coordinator.run.status import run_status

STATUS_SECONDS = 1.0
"""Age at which the public status and metrics are computed anew: nothing else costs as much, and anybody may ask."""


class Cached:
    """A value recomputed once it is STATUS_SECONDS old, by one thread for all that ask meanwhile."""

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
    """Requests a minute: all from one address, signed ones of one node, announcements of nodes and relays from one
    address.
    """

    per_address: int = 6000
    per_node: int = 1200
    registrations: int = 120


class Service:
    """The run's coordinator and everything that its handlers need besides."""

    def __init__(self, coordinator: Coordinator, *, limits: RequestLimits, metrics: Metrics, ending: Ending) -> None:
        self.coordinator = coordinator
        self.metrics = metrics
        self.ending = ending
        self.signed = SignedRequests(coordinator, limiter=RateLimiter(per_minute=limits.per_node, who="node"))
        self.newcomers = AddressLimiter(per_minute=limits.registrations)
        self.intake = intake_of(coordinator)
        self.descriptors = DescriptorWatch(coordinator.descriptors, ending)
        self.verdicts = LogWatch(coordinator.log_size, coordinator.entries)
        self.figures = Cached(metrics.render)
        self.status = Cached(lambda: json.dumps(run_status(coordinator, now=time.time())).encode())
