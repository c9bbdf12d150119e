"""Prometheus metrics of a process that serves the run's API."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from coordinator.http.connections import ConnectionQuota
from coordinator.metrics.roles import role_registry
from coordinator.metrics.run import RunCollector
from coordinator.run.service import Coordinator
from node.protocol.reasons import Reason
from node.runtime.metrics import WAIT_BUCKETS, family


class Metrics:
    """Metrics of an API process; those of the run are read from the database at each scrape."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self, coordinator: Coordinator, *, connections: Callable[[], ConnectionQuota | None] = lambda: None
    ) -> None:
        self.registry = role_registry("api", coordinator.home)
        self.registry.register(RunCollector(coordinator.home))
        self.registry.register(_Connections(connections))
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
        """Count a refused request."""
        self.refusals.labels(reason.value).inc()

    def render(self) -> bytes:
        """Return all metrics in the exposition format."""
        return bytes(generate_latest(self.registry))


class _Connections(Collector):
    """Connection counts, without a value until a server counts them."""

    def __init__(self, connections: Callable[[], ConnectionQuota | None]) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        quota = self._connections()
        text = "Connections that are open."
        yield family("gauge", "swarmproof_connections", text, None if quota is None else len(quota))
        text = "Connections that were closed unanswered: too many of one address, or of all."
        yield family("counter", "swarmproof_refused_connections", text, None if quota is None else quota.refused)
