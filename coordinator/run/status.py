"""The run's public status, for /v1/status, the live view and the report."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from coordinator.run.leader import last_leader
from coordinator.storage import counters, log, nodes, relays, steps, totals
from coordinator.storage.database import Connection
from coordinator.storage.progress import progress
from coordinator.storage.submissions import latest_by_environment
from node.protocol.admission import Outcome
from node.protocol.environment_spec import PackageSpec
from node.protocol.run import DatasetSpec, ProblemsSpec, RunSpec, StandingSpec
from node.protocol.standing import Standing

if TYPE_CHECKING:
    from coordinator.run.service import Coordinator


ACTIVE_SECONDS = 600.0
MAX_NODES = 1000
MAX_STEPS = 1000
"""Newest steps, and newest policies, in a status."""


def run_status(coordinator: Coordinator, *, now: float) -> dict[str, Any]:
    """Return the run's status at `now` as JSON values."""
    home, health = coordinator.home, coordinator.health(now=now)
    with home.database.read() as connection:
        at = progress(connection)
        finished = steps.finished_steps(connection)
        return {
            "run_id": home.run_id,
            "name": home.spec.name,
            "time": now,
            "health": health.as_json(),
            "head_version": at.head,
            "next_step": at.next_step,
            "total_steps": home.spec.training.steps,
            "finished_steps": finished,
            "finished": finished >= home.spec.training.steps,
            "max_async": home.spec.batch.max_async,
            "datasets": _datasets(home.spec),
            "packages": package_rows(connection, home.spec),
            "steps": _steps(connection),
            "policies": _policies(connection),
            "nodes": _nodes(connection, rules=home.spec.standing, now=now),
            "partly_measured": totals.partly_measured(connection),
            "slots": totals.slot_counts(connection),
            "verdicts": [
                {"outcome": outcome, "reason": reason, "count": count}
                for outcome, reason, count in totals.reason_totals(connection)
            ],
            "relays": _relays(connection),
            "leader": _leader(connection),
            "log_size": log.size(connection),
        }


def _datasets(spec: RunSpec) -> list[dict[str, Any]]:
    return [
        {
            "environment": one.name,
            "digest": one.dataset.digest,
            "bytes": one.dataset.bytes,
            "rows": one.problems.count if isinstance(one.problems, ProblemsSpec) else None,
        }
        for one in spec.environments
        if isinstance(one.dataset, DatasetSpec)
    ]


def package_rows(connection: Connection, spec: RunSpec) -> list[dict[str, Any]]:
    """Return the run's environments of packages, each with how many of its groups of late got a verdict, and how many
    none because the environment or the verifier failed.
    """
    counts = latest_by_environment(connection) if spec.has_packages else {}
    return [
        {
            "environment": one.name,
            "package": one.package.name,
            "version": one.package.version,
            "lock": one.package.lock.digest,
            "judged": counts.get(number, Counter()).total(),
            "undecided": counts.get(number, Counter())[Outcome.INDETERMINATE],
        }
        for number, one in enumerate(spec.environments)
        if isinstance(one.package, PackageSpec)
    ]


def _leader(connection: Connection) -> dict[str, Any] | None:
    last = last_leader(connection)
    return None if last is None else {"name": last.name, "seen_at": last.seen_at}


def _steps(connection: Connection) -> list[dict[str, Any]]:
    return [
        {
            "step": row.step,
            "reward_mean": row.reward_mean,
            "staleness_mean": row.staleness_mean,
            "assigned_at": row.assigned_at,
            "finished_at": row.finished_at,
            "stats": json.loads(row.stats) if row.stats else None,
        }
        for row in steps.newest_steps(connection, most=MAX_STEPS)
    ]


def _policies(connection: Connection) -> list[dict[str, Any]]:
    found = steps.newest_policies(connection, most=MAX_STEPS)
    return [{"version": policy.version, "published_at": policy.published_at} for policy in found]


def _nodes(connection: Connection, *, rules: StandingSpec, now: float) -> list[dict[str, Any]]:
    rows = nodes.list_active(connection, seen_since=now - ACTIVE_SECONDS, most=MAX_NODES)
    reasons = counters.rejections_of(connection, [row.node for row in rows if row.rejected])
    return [
        {
            "node": row.node,
            "engine": row.engine,
            "admitted": row.admitted,
            "rejected": row.rejected,
            "tokens": row.tokens,
            "reasons": reasons.get(row.node, {}),
            "registered_at": row.registered_at,
            "seen_at": row.seen_at,
            "not_before": row.not_before,
            "verified": row.verified,
            "strikes": row.strikes,
            "banned": Standing(row.verified, row.strikes).is_banned(rules),
            "full_rate": Standing(row.verified, row.strikes).full_rate(rules),
        }
        for row in rows
    ]


def _relays(connection: Connection) -> list[dict[str, Any]]:
    return [
        {"node": relay.node, "url": relay.url, "version": relay.version, "seen_at": relay.seen_at}
        for relay in relays.relays_seen_since(connection, 0.0)
    ]
