"""The run as people see it: what /v1/status, the live view and the report are made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, func, or_, select

from coordinator.storage import log, work
from coordinator.storage.schema import SlotState, nodes, policies, relays, slots, steps, submissions
from node.protocol.admission import Outcome
from node.protocol.run import StandingSpec
from node.protocol.standing import Standing

if TYPE_CHECKING:
    from coordinator.service import Coordinator


SEEN_LATELY_SECONDS = 600.0
MAX_NODES = 1000


@dataclass(frozen=True, slots=True)
class NodeTotals:
    """All nodes together."""

    count: int
    tokens: int


def node_totals(connection: Connection) -> NodeTotals:
    """Registered nodes, and tokens of admitted rollouts."""
    count, tokens = connection.execute(select(func.count(), func.coalesce(func.sum(nodes.c.tokens), 0))).one()
    return NodeTotals(count=int(count), tokens=int(tokens))


def reason_totals(connection: Connection) -> list[tuple[str, str | None, int]]:
    """(outcome, reason, how many) over all verdicts."""
    query = (
        select(submissions.c.outcome, submissions.c.reason, func.count())
        .where(submissions.c.outcome.is_not(None))
        .group_by(submissions.c.outcome, submissions.c.reason)
        .order_by(submissions.c.outcome, submissions.c.reason)
    )
    return [(outcome, reason, int(count)) for outcome, reason, count in connection.execute(query)]


def partly_measured(connection: Connection) -> dict[str, int]:
    """Groups admitted by one row, by what became of them: `pending`, `due`, or the outcome of the second verdict."""
    state = func.coalesce(submissions.c.recheck, "pending")
    partly = submissions.c.spot.is_not(None), submissions.c.outcome == Outcome.ADMITTED
    query = select(state, func.count()).where(*partly).group_by(state)
    return {name: int(count) for name, count in connection.execute(query)}


def banned_nodes(connection: Connection, *, rules: StandingSpec) -> int:
    """How many nodes get no more work."""
    query = select(func.count()).where(nodes.c.strikes >= rules.ban_after)
    return int(connection.execute(query).scalar_one())


def slot_counts(connection: Connection) -> dict[str, int]:
    """How many slots are in each state."""
    counts = connection.execute(select(slots.c.state, func.count()).group_by(slots.c.state))
    by_state = {state: int(count) for state, count in counts}
    return {state.value: by_state.get(state.value, 0) for state in SlotState}


def run_status(coordinator: Coordinator, *, now: float) -> dict[str, Any]:
    """Everything about the run that is worth a look, as JSON values."""
    home = coordinator.home
    with home.database.read() as connection:
        at = work.progress(connection)
        finished = connection.execute(select(func.count()).where(steps.c.finished_at.is_not(None))).scalar_one()
        return {
            "run_id": home.run_id,
            "name": home.spec.name,
            "time": now,
            "head_version": at.head,
            "next_step": at.next_step,
            "total_steps": home.spec.training.steps,
            "finished_steps": int(finished),
            "finished": int(finished) >= home.spec.training.steps,
            "max_async": home.spec.batch.max_async,
            "steps": _steps(connection),
            "policies": _policies(connection),
            "nodes": _nodes(connection, rules=home.spec.standing, now=now),
            "partly_measured": partly_measured(connection),
            "slots": slot_counts(connection),
            "verdicts": [
                {"outcome": outcome, "reason": reason, "count": count}
                for outcome, reason, count in reason_totals(connection)
            ],
            "relays": _relays(connection),
            "log_size": log.size(connection),
        }


def _steps(connection: Connection) -> list[dict[str, Any]]:
    rows = connection.execute(select(steps).order_by(steps.c.step)).all()
    return [
        {
            "step": row.step,
            "reward_mean": row.reward_mean,
            "staleness_mean": row.staleness_mean,
            "assigned_at": row.assigned_at,
            "finished_at": row.finished_at,
            "stats": json.loads(row.stats) if row.stats else None,
        }
        for row in rows
    ]


def _policies(connection: Connection) -> list[dict[str, Any]]:
    rows = connection.execute(select(policies.c.version, policies.c.published_at).order_by(policies.c.version)).all()
    return [{"version": row.version, "published_at": row.published_at} for row in rows]


def _nodes(connection: Connection, *, rules: StandingSpec, now: float) -> list[dict[str, Any]]:
    """The nodes that did something, or were seen lately: registering alone is free, and buys no place here."""
    by_node: dict[str, dict[str, int]] = {}
    reasons = select(submissions.c.node, submissions.c.reason, func.count()).where(
        submissions.c.outcome == Outcome.REJECTED
    )
    for node, reason, count in connection.execute(reasons.group_by(submissions.c.node, submissions.c.reason)):
        by_node.setdefault(node, {})[reason] = int(count)
    worth_a_line = or_(nodes.c.admitted > 0, nodes.c.rejected > 0, nodes.c.seen_at >= now - SEEN_LATELY_SECONDS)
    query = select(nodes).where(worth_a_line).order_by(nodes.c.registered_at).limit(MAX_NODES)
    rows = connection.execute(query).all()
    return [
        {
            "node": row.node,
            "engine": row.engine,
            "admitted": row.admitted,
            "rejected": row.rejected,
            "tokens": row.tokens,
            "reasons": by_node.get(row.node, {}),
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
    rows = connection.execute(select(relays).order_by(relays.c.node)).all()
    return [{"node": row.node, "url": row.url, "seen_at": row.seen_at} for row in rows]
