"""Metrics of the run, read from its database: the same from every API process and the leader.

Dashboards therefore aggregate them by max, not sum. Each uses an index or a tally (`coordinator.storage.tallies`), so
that no scrape slows down as the run grows.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.metrics.curves import REWARD_OF
from coordinator.run.home import Home
from coordinator.run.status import ACTIVE_SECONDS
from coordinator.storage import log, nodes, pools, tallies
from coordinator.storage.counters import ended_leases
from coordinator.storage.database import Connection
from coordinator.storage.faults import DatabaseFault
from coordinator.storage.heartbeats import read_heartbeats
from coordinator.storage.progress import progress
from coordinator.storage.relays import relays_seen_since
from coordinator.storage.steps import finished_steps, newest_finished_step
from coordinator.storage.submissions import QUEUED, count_waiting
from coordinator.storage.tallies import VerdictKind
from coordinator.storage.totals import active_leases, partly_measured, slot_counts
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason
from node.runtime.metrics import family

_REASONS = [reason for reason in Reason if reason.status is None and reason is not Reason.VERIFIER_FAILED]
_KNOWN = [
    (Outcome.ADMITTED.value, ""),
    *((Outcome.REJECTED.value, reason.value) for reason in _REASONS),
    (Outcome.INDETERMINATE.value, Reason.VERIFIER_FAILED.value),
]
_STEP_FIGURES = {
    "loss": ("swarmproof_step_loss", "Mean loss over the tokens of the newest finished step."),
    "entropy": (
        "swarmproof_step_entropy_nats",
        "Mean entropy of the policy over the tokens of the newest finished step.",
    ),
    "grad_norm": ("swarmproof_step_gradient_norm", "Mean norm of that step's gradients, before they are clipped."),
    "clip_fraction": (
        "swarmproof_step_clipped_ratio",
        "Share of that step's tokens whose ratio of probabilities was beyond the objective's bounds.",
    ),
    "logprob_gap": (
        "swarmproof_step_logprob_gap_nats",
        "Mean difference of the log-probabilities of that step's tokens: the trainer's and the verifier's.",
    ),
    "busiest_expert": (
        "swarmproof_step_busiest_expert_ratio",
        "Share of that step's tokens that met the busiest expert of a layer, mean over the layers.",
    ),
    "learning_rate": ("swarmproof_step_learning_rate", "Learning rate of the newest finished step."),
    "tokens": ("swarmproof_step_tokens", "Tokens that the newest finished step trained on."),
    "groups_kept": ("swarmproof_step_groups_used", "Groups of that step that taught something: not all of one reward."),
    "groups_dropped": (
        "swarmproof_step_groups_unused",
        "Groups of that step of one reward throughout, which teach nothing.",
    ),
    "minibatches_skipped": (
        "swarmproof_step_minibatches_skipped",
        "Minibatches of that step that were left out: their gradient was not finite.",
    ),
    "wait_seconds": (
        "swarmproof_step_wait_seconds",
        "What training waited for the groups of the newest finished step.",
    ),
    "train_seconds": ("swarmproof_step_train_seconds", "What the newest finished step itself took."),
    "publish_seconds": (
        "swarmproof_step_publish_seconds",
        "From the file of that step's policy to its announcement.",
    ),
    "checkpoint_stall_seconds": (
        "swarmproof_step_checkpoint_stall_seconds",
        "What that step's update waited for the checkpoint before it.",
    ),
    "publish_stall_seconds": (
        "swarmproof_step_publish_stall_seconds",
        "What training waited for the policy before that step's to be published, and for its own policy's file.",
    ),
}
"""The metrics of the newest step, by key of the stats that the trainer stored."""


class RunCollector(Collector):
    """Reads the database at each scrape; while it is unavailable, exports `swarmproof_database_up 0` alone."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def collect(self) -> Iterator[Metric]:
        try:
            with self._home.database.read() as connection:
                found = list(self._read(connection))
        except (DatabaseFault, OSError):
            found = []
        yield GaugeMetricFamily(
            "swarmproof_database_up", "1 if the run's database could be read for this scrape.", value=bool(found)
        )
        yield from found

    def _read(self, connection: Connection) -> Iterator[Metric]:
        yield from _progress(connection, total_steps=self._home.spec.training.steps)
        yield from _queue(connection, now=time.time())
        yield from _verdicts(connection)
        yield from _leases(connection)
        yield from self._nodes(connection)
        yield from _newest_step(connection)
        said = "Problems of the run's finite sets by pool, in a run with pools."
        sizes = pools.pool_sizes(connection, spec=self._home.spec)
        yield family("gauge", "swarmproof_problems", said, sizes, label="pool")

    def _nodes(self, connection: Connection) -> Iterator[Metric]:
        since = time.time() - ACTIVE_SECONDS
        active, serving = nodes.count_seen_since(connection, since), len(relays_seen_since(connection, since))
        yield _gauge("swarmproof_nodes", "Registered nodes.", nodes.count_registered(connection))
        yield _gauge("swarmproof_active_nodes", "Nodes that asked for work in the last 10 minutes.", active)
        yield _gauge(
            "swarmproof_banned_nodes",
            "Nodes that get no more work.",
            nodes.count_banned(connection, ban_after=self._home.spec.standing.ban_after),
        )
        yield _gauge("swarmproof_relays", "Relays that announced themselves in the last 10 minutes.", serving)


def _progress(connection: Connection, *, total_steps: int) -> Iterator[Metric]:
    at, finished = progress(connection), finished_steps(connection)
    yield _gauge("swarmproof_policy_version", "Newest policy, -1 before the first.", at.head)
    yield _gauge("swarmproof_next_step", "First training step without a batch.", at.next_step)
    yield family("counter", "swarmproof_steps_finished", "Training steps whose policy is published.", finished)
    yield _gauge("swarmproof_steps_planned", "Training steps of the whole run.", total_steps)
    yield _gauge("swarmproof_log_entries", "Size of the run's log.", log.size(connection))
    seen = GaugeMetricFamily(
        "swarmproof_role_seen_timestamp_seconds",
        "When the last process of a role said that it is there.",
        labels=["role"],
    )
    newest = {one.role: one.seen_at for one in reversed(read_heartbeats(connection))}
    for role, at_ in sorted(newest.items()):
        seen.add_metric([role.value], at_)
    yield seen
    slots = GaugeMetricFamily("swarmproof_slots", "Slots by state.", labels=["state"])
    for state, count in slot_counts(connection).items():
        slots.add_metric([state], count)
    yield slots


def _queue(connection: Connection, *, now: float) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "swarmproof_queue_submissions", "Submissions that wait for a verdict, second ones too.", labels=["state"]
    )
    oldest = now
    for state in QUEUED:
        waiting, since = count_waiting(connection, state)
        depth.add_metric([state.value], waiting)
        oldest = oldest if since is None else min(oldest, since)
    yield depth
    said = "Since the oldest of them arrived that waits for its first verdict, 0 if none does."
    yield _gauge("swarmproof_queue_oldest_seconds", said, max(0.0, now - oldest))


def _verdicts(connection: Connection) -> Iterator[Metric]:
    count = CounterMetricFamily(
        "swarmproof_verdicts", "First verdicts by outcome and reason.", labels=["outcome", "reason"]
    )
    tokens = CounterMetricFamily("swarmproof_verdict_tokens", "Tokens of what got a first verdict.", labels=["outcome"])
    second = CounterMetricFamily("swarmproof_second_verdicts", "Second verdicts by outcome.", labels=["outcome"])
    counted, of_outcome, again, waited = Counter[tuple[str, str]](), Counter[str](), Counter[str](), 0.0
    counted.update(dict.fromkeys(_KNOWN, 0))  # so that the first verdict is an increase for `rate()`
    of_outcome.update(dict.fromkeys(map(str, Outcome), 0))
    for tally in tallies.whole_run(connection):
        outcome = tally.outcome.value
        if tally.kind is VerdictKind.SECOND:
            again[outcome] += tally.verdicts
            continue
        counted[outcome, "" if tally.reason is None else tally.reason.value] += tally.verdicts
        of_outcome[outcome] += tally.tokens
        waited += tally.wait_seconds
    for labels, verdicts in counted.items():
        count.add_metric(labels, verdicts)
    for outcome, sum_ in of_outcome.items():
        tokens.add_metric([outcome], sum_)
    for outcome, verdicts in again.items():
        second.add_metric([outcome], verdicts)
    yield from (count, tokens, second)
    said = "What all submissions waited for their first verdicts, from arrival on, together."
    yield family("counter", "swarmproof_verdict_wait_seconds", said, waited)
    groups = GaugeMetricFamily(
        "swarmproof_partly_measured_groups",
        "Groups admitted by one row, by the outcome of a second verdict: due while training waits for it.",
        labels=["second_verdict"],
    )
    for state, groups_of_state in partly_measured(connection).items():
        groups.add_metric([state], groups_of_state)
    yield groups


def _leases(connection: Connection) -> Iterator[Metric]:
    yield _gauge("swarmproof_active_leases", "Leases that nodes hold.", active_leases(connection))
    ended = CounterMetricFamily(
        "swarmproof_leases_ended",
        "Leases that ended without a submission: returned, expired or overtaken.",
        labels=["how"],
    )
    for state, count in ended_leases(connection).items():
        ended.add_metric([state.value], count)
    yield ended


def _newest_step(connection: Connection) -> Iterator[Metric]:
    row = newest_finished_step(connection)
    stats: dict[str, Any] = json.loads(row.stats) if row is not None and row.stats else {}
    yield family(
        "gauge",
        "swarmproof_step_reward",
        "Mean reward of the newest finished step.",
        None if row is None else row.reward_mean,
    )
    yield family(
        "gauge",
        "swarmproof_step_staleness",
        "How many policies the groups of that step were behind, on average.",
        None if row is None else row.staleness_mean,
    )
    for key, (name, said) in _STEP_FIGURES.items():
        yield family("gauge", name, said, stats.get(key))
    said = "Mean reward of that step's completions of each environment, in a run of several (at most 100)."
    apart = {key.removeprefix(REWARD_OF): value for key, value in stats.items() if key.startswith(REWARD_OF)}
    yield family("gauge", "swarmproof_step_environment_reward", said, apart, label="environment")


def _gauge(name: str, said: str, value: float) -> Metric:
    return family("gauge", name, said, value)
