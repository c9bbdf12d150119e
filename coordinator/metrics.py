"""Prometheus metrics of the operator's processes (docs/metrics.md): what each role counts itself.

What the run's database knows is in `coordinator.run_figures`, what every process has in `node.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from coordinator.home import Home
from coordinator.refusals import STATUS
from coordinator.run_figures import RunFigures
from coordinator.storage.timings import register_timings
from node.metrics import WAIT_BUCKETS, WORK_BUCKETS, family, process_registry
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason

if TYPE_CHECKING:
    from coordinator.connections import Crowd
    from coordinator.service import Coordinator
    from coordinator.storage.verdicts import Decision

BATCH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)


class Metrics:
    """Of a process that serves the run's API; what the database knows is read when Prometheus asks."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, coordinator: Coordinator, *, crowd: Callable[[], Crowd | None] = lambda: None) -> None:
        self.registry = role_registry("api", coordinator.home)
        self.registry.register(RunFigures(coordinator.home))
        self.registry.register(_Connections(crowd))
        self.request_seconds = Histogram(
            "veriswarm_request_seconds",
            "Time to answer a request, by route; one that waits for news or a verdict is long.",
            ("method", "route", "status"),
            buckets=WAIT_BUCKETS,
            registry=self.registry,
        )
        self.refusals = Counter(
            "veriswarm_refusals",
            "Requests that were refused, by the reason that the refused was given.",
            ("reason",),
            registry=self.registry,
        )
        for reason in STATUS:
            self.refusals.labels(reason.value)
        self.leases_issued = Counter("veriswarm_leases_issued", "Leases that were given out.", registry=self.registry)
        self.submissions = Counter(
            "veriswarm_submissions", "Submissions that were taken, before any verdict.", registry=self.registry
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
            "gauge", "veriswarm_connections", "Connections that are open.", None if crowd is None else len(crowd)
        )
        said = "Connections that were closed unanswered: too many of one address, or of all."
        yield family("counter", "veriswarm_refused_connections", said, None if crowd is None else crowd.refused)


def leader_registry(home: Home, *, leads: Callable[[], bool]) -> CollectorRegistry:
    """Of a process that does what only one may do at a time; `leads` says whether it is that one now."""
    registry = role_registry("leader", home)
    registry.register(RunFigures(home))
    watch_leadership(registry, leads=leads)
    return registry


def watch_leadership(registry: CollectorRegistry, *, leads: Callable[[], bool]) -> None:
    """Have `registry` say whether this process is the run's leader."""
    leader = Gauge("veriswarm_leader", "1 if this process does the run's periodic work now.", registry=registry)
    leader.set_function(lambda: float(leads()))


class VerifierMetrics:
    """Of a verifier; without a `registry` they are counted for nobody."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.claims = Counter(
            "veriswarm_verifier_claims", "Submissions that this verifier took from the queue.", registry=registry
        )
        self.deferred = Counter(
            "veriswarm_verifier_deferred",
            "Submissions that it put back, because their policy could not be had yet.",
            registry=registry,
        )
        self.late = Counter(
            "veriswarm_verifier_late_verdicts",
            "Verdicts that came to nothing: another verifier was faster.",
            registry=registry,
        )
        self.verdicts = Counter(
            "veriswarm_verifier_verdicts", "Verdicts of this verifier by outcome.", ("outcome",), registry=registry
        )
        for outcome in Outcome:
            self.verdicts.labels(outcome.value)
        self.tokens = Counter("veriswarm_verifier_tokens", "Tokens of what it judged.", registry=registry)
        self.batch_seconds = Histogram(
            "veriswarm_verifier_batch_seconds",
            "From claiming submissions to their verdicts; those that are claimed together share forward passes.",
            buckets=WORK_BUCKETS,
            registry=registry,
        )
        self.batch_submissions = Histogram(
            "veriswarm_verifier_batch_submissions",
            "How many submissions it claimed together.",
            buckets=BATCH_BUCKETS,
            registry=registry,
        )
        self.policy_fetch_seconds = Histogram(
            "veriswarm_verifier_policy_fetch_seconds",
            "What the file of a policy took to come from the relays.",
            buckets=WORK_BUCKETS,
            registry=registry,
        )
        self.policy_failures = Counter(
            "veriswarm_verifier_policy_failures", "Fetches of a policy that failed.", registry=registry
        )
        self.outages = Counter(
            "veriswarm_verifier_outages",
            "How often the database or the disk was away, and work began anew.",
            registry=registry,
        )

    def decided(self, decision: Decision, *, in_time: bool) -> None:
        """Count a verdict, which is stored if it came in time."""
        if not in_time:
            self.late.inc()
            return
        self.verdicts.labels(decision.outcome.value).inc()
        self.tokens.inc(decision.tokens)


class TrainerMetrics:
    """Of the trainer; without a `registry` they are counted for nobody."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.wait_seconds = Counter(
            "veriswarm_trainer_wait_seconds", "Time in which it waited for groups.", registry=registry
        )
        self.step_seconds = Histogram(
            "veriswarm_trainer_step_seconds",
            "A training step, from reading its groups to its checkpoint.",
            buckets=WORK_BUCKETS,
            registry=registry,
        )
        self.publish_seconds = Histogram(
            "veriswarm_trainer_publish_seconds",
            "From trained weights to the policy's announcement.",
            buckets=WORK_BUCKETS,
            registry=registry,
        )
        self.outages = Counter(
            "veriswarm_trainer_outages",
            "How often the database or the disk was away, and work began anew from the last checkpoint.",
            registry=registry,
        )


def role_registry(role: str, home: Home, *, state: Path | None = None) -> CollectorRegistry:
    """With what every process on the run's database has; `state` is its own folder, if it has one."""
    folders = {"data": home.folder} if state is None else {"data": home.folder, "state": state}
    registry = process_registry(role, folders=folders)
    register_timings(registry)
    return registry
