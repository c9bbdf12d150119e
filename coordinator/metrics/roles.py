"""Prometheus metrics that each of the operator's roles counts itself (docs/metrics.md).

`coordinator.metrics.run` has those read from the database, `node.runtime.metrics` those of every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.metrics.run import RunCollector
from coordinator.run.home import Home
from coordinator.storage.timings import register_timings
from node.protocol.admission import Outcome
from node.runtime.metrics import WORK_BUCKETS, process_registry

if TYPE_CHECKING:
    from node.protocol.admission import Verdict

BATCH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 24.0, 32.0)


def leader_registry(home: Home, *, leads: Callable[[], bool]) -> CollectorRegistry:
    """Return the registry of a leader process; `leads` returns whether it leads now."""
    registry = role_registry("leader", home)
    registry.register(RunCollector(home))
    watch_leadership(registry, leads=leads)
    return registry


def watch_leadership(registry: CollectorRegistry, *, leads: Callable[[], bool]) -> None:
    """Register the gauge of whether this process leads."""
    leader = Gauge("swarmproof_leader", "1 if this process does the run's periodic work now.", registry=registry)
    leader.set_function(lambda: float(leads()))


class VerifierMetrics:
    """Metrics of a verifier; without a `registry` they are not exported."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.claims = Counter(
            "swarmproof_verifier_claims", "Submissions that this verifier took from the queue.", registry=registry
        )
        self.deferred = Counter(
            "swarmproof_verifier_deferred",
            "Submissions that it put back, because their policy or their body could not be had yet.",
            registry=registry,
        )
        self.late = Counter(
            "swarmproof_verifier_late_verdicts",
            "Verdicts that came to nothing: another verifier was faster.",
            registry=registry,
        )
        self.verdicts = Counter(
            "swarmproof_verifier_verdicts", "Verdicts of this verifier by outcome.", ("outcome",), registry=registry
        )
        for outcome in Outcome:
            self.verdicts.labels(outcome.value)
        self.tokens = Counter("swarmproof_verifier_tokens", "Tokens of what it judged.", registry=registry)
        self.batch_seconds = Histogram(
            "swarmproof_verifier_batch_seconds",
            "From claiming submissions to their verdicts; those that are claimed together share forward passes.",
            buckets=WORK_BUCKETS,
            registry=registry,
        )
        self.batch_submissions = Histogram(
            "swarmproof_verifier_batch_submissions",
            "How many submissions it claimed together.",
            buckets=BATCH_BUCKETS,
            registry=registry,
        )
        self.policy_fetch_seconds = Histogram(
            "swarmproof_verifier_policy_fetch_seconds",
            "What the file of a policy took to come from the relays.",
            buckets=WORK_BUCKETS,
            registry=registry,
        )
        self.policy_loads = Counter(
            "swarmproof_verifier_policy_loads",
            "Policies that it loaded, or opened to read them layer by layer.",
            registry=registry,
        )
        self.policy_failures = Counter(
            "swarmproof_verifier_policy_failures", "Fetches of a policy that failed.", registry=registry
        )
        self.outages = Counter(
            "swarmproof_verifier_outages",
            "How often the database or the disk was away, and work began anew.",
            registry=registry,
        )

    def decided(self, verdict: Verdict, *, in_time: bool) -> None:
        """Count a verdict; one that is not `in_time` was not stored."""
        if not in_time:
            self.late.inc()
            return
        self.verdicts.labels(verdict.outcome.value).inc()
        self.tokens.inc(verdict.tokens)


class TrainerMetrics:
    """Metrics of the trainer; without a `registry` they are not exported."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.wait_seconds = Counter(
            "swarmproof_trainer_wait_seconds", "Time in which it waited for groups.", registry=registry
        )
        self.step_seconds = Histogram(
            "swarmproof_trainer_step_seconds",
            "A training step, from reading its groups to its policy's file.",
            buckets=WORK_BUCKETS,
            registry=registry,
        )
        self.publish_seconds = Histogram(
            "swarmproof_trainer_publish_seconds",
            "From the policy's file to its announcement.",
            buckets=WORK_BUCKETS,
            registry=registry,
        )
        self.stall_seconds = Counter(
            "swarmproof_trainer_stall_seconds",
            "Time in which training stood still for the last checkpoint, or for the last policy's publication.",
            ["by"],
            registry=registry,
        )
        self.outages = Counter(
            "swarmproof_trainer_outages",
            "How often the database or the disk was away, and work began anew from the last checkpoint.",
            registry=registry,
        )

    def observe_step(self, stats: Mapping[str, float]) -> None:
        """Count a trained step by its statistics."""
        self.step_seconds.observe(stats["train_seconds"])
        for by in ("checkpoint", "publish"):
            self.stall_seconds.labels(by).inc(stats[f"{by}_stall_seconds"])


def role_registry(role: str, home: Home, *, state: Path | None = None) -> CollectorRegistry:
    """Return a registry with the metrics common to all roles; `state` is the process's own folder."""
    folders = {"data": home.folder} if state is None else {"data": home.folder, "state": state}
    registry = process_registry(role, folders=folders)
    register_timings(registry)
    return registry
