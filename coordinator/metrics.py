"""Prometheus metrics of the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coordinator.status import banned_nodes, node_totals, partly_measured, reason_totals, slot_counts
from coordinator.storage import work

if TYPE_CHECKING:
    from coordinator.service import Coordinator


class Metrics:
    """One registry; what the database knows is read when Prometheus asks."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._registry = CollectorRegistry()
        self.request_seconds = Histogram(
            "veriswarm_request_seconds",
            "Time to answer a request, by route.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._registry.register(self)

    def render(self) -> bytes:
        """The exposition format."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at each scrape."""
        home = self._coordinator.home
        with home.database.read() as connection:
            at = work.progress(connection)
            nodes = node_totals(connection)
            reasons = reason_totals(connection)
            depths = slot_counts(connection)
            partly = partly_measured(connection)
            banned = banned_nodes(connection, rules=home.spec.standing)
        yield GaugeMetricFamily("veriswarm_policy_version", "Newest policy, -1 before the first.", value=at.head)
        yield GaugeMetricFamily("veriswarm_next_step", "First training step without a batch.", value=at.next_step)
        slots = GaugeMetricFamily("veriswarm_slots", "Slots by state.", labels=["state"])
        for state, count in depths.items():
            slots.add_metric([state], count)
        yield slots
        verdicts = CounterMetricFamily(
            "veriswarm_verdicts", "Verdicts by outcome and reason.", labels=["outcome", "reason"]
        )
        for outcome, reason, count in reasons:
            verdicts.add_metric([outcome, reason or ""], count)
        yield verdicts
        yield CounterMetricFamily("veriswarm_admitted_tokens", "Tokens of admitted rollouts.", value=nodes.tokens)
        yield GaugeMetricFamily("veriswarm_nodes", "Registered nodes.", value=nodes.count)
        yield GaugeMetricFamily("veriswarm_banned_nodes", "Nodes that get no more work.", value=banned)
        groups = GaugeMetricFamily(
            "veriswarm_partly_measured_groups",
            "Groups admitted by one row, by the outcome of a second verdict: due while training waits for it.",
            labels=["second_verdict"],
        )
        for state, count in partly.items():
            groups.add_metric([state], count)
        yield groups
