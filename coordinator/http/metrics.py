"""Prometheus metrics of a process that serves the run's API."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from coordinator.http.connections import Crowd
from coordinator.metrics.roles import role_registry
from coordinator.metrics.run import RunFigures
from coordinator.run.service import Coordinator
from node.protocol.reasons import Reason
from node.runtime.metrics import WAIT_BUCKETS, family


class Metrics:
    """Of a process that serves the run's API; what the database knows is read when Prometheus asks."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, coordinator: Coordinator, *, crowd: Callable[[], Crowd | None] = lambda: None) -> None:
        self.registry = role_registry("api", coordinator.home)
        self.registry.register(RunFigures(coordinator.home))
        self.registry.register(_Connections(crowd))
        self.request_seconds = Histogram(
            "swarmproof_request_seconds",
            "Time to answer a request, by route; one that waits for news or a verdict is long.",
            ("method", "route", "status"),
            buckets=WAIT_BUCKETS,
            registry=self.registry,
        )
        self.refusals = Counter(
            "swarmproof_refusals",
            "Requests that were refused, by the reason that the refused was given.",
            ("reason",),
            registry=self.registry,
        )
        for reason in (one for one in Reason if one.status is not None):
            self.refusals.labels(reason.value)
        self.leases_issued = Counter("swarmproof_leases_issued", "Leases that were given out.", registry=self.registry)
        self.submissions = Counter(
            "swarmproof_submissions", "Submissions that were taken, before any verdict.", registry=self.registry
        )

    def refused(self, reason: Reason) -> None:
        """Count a refusal at the door."""
        self.refusals.labels(reason.value).inc()

    def render(self) -> bytes:
        """The exposition format."""
        return bytes(generate_latest(self.registry))


class _Connections(Collector):
    """Who is connected, once there is a server that counts them."""

    def __init__(self, crowd: Callable[[], Crowd | None]) -> None:
        self._crowd = crowd

    def collect(self) -> Iterator[Metric]:
        crowd = self._crowd()
        yield family(
            "gauge", "swarmproof_connections", "Connections that are open.", None if crowd is None else len(crowd)
        )
        said = "Connections that were closed unanswered: too many of one address, or of all."
        yield family("counter", "swarmproof_refused_connections", said, None if crowd is None else crowd.refused)
