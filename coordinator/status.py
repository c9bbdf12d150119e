"""The run as people see it: what /v1/status, the live view and the report are made of."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, func, select

from coordinator.leader import last_leader
from coordinator.storage import log, tallies, work
from coordinator.storage.schema import RECHECK_DUE, SlotState, nodes, policies, relays, slots, steps, submissions
from coordinator.storage.tallies import Kind
from node.protocol.admission import Outcome
from node.protocol.run import StandingSpec
from node.protocol.standing import Standing

if TYPE_CHECKING:
    from coordinator.service import Coordinator


SEEN_LATELY_SECONDS = 600.0
MAX_NODES = 1000
MAX_STEPS = 1000
"""Of the steps and of the policies the newest are told."""

_STEPS_UNDER_WAY = 16
"""More than there ever are."""


@dataclass(frozen=True, slots=True)
class NodeTotals:
    """All nodes together."""

    count: int
    tokens: int


def node_totals(connection: Connection) -> NodeTotals:
    """Registered nodes, and tokens of admitted rollouts."""
    count = connection.execute(select(func.count()).select_from(nodes)).scalar_one()
    return NodeTotals(count=int(count), tokens=tallies.admitted_tokens(tallies.whole_run(connection)))


def reason_totals(connection: Connection) -> list[tuple[str, str | None, int]]:
    """(outcome, reason, how many) over all first verdicts."""
    found = Counter[tuple[str, str]]()
    for tally in tallies.whole_run(connection):
        if tally.kind is not Kind.SECOND:
            found[tally.outcome.value, tally.reason.value if tally.reason else ""] += tally.verdicts
    return [(outcome, reason or None, count) for (outcome, reason), count in sorted(found.items())]


def partly_measured(connection: Connection) -> dict[str, int]:
    """Groups admitted by one row, by what became of them: `pending`, `due`, or the outcome of the second verdict."""
    counted = tallies.whole_run(connection)
    spot = sum(tally.verdicts for tally in counted if tally.kind is Kind.SPOT and tally.outcome is Outcome.ADMITTED)
    second = Counter[str]()
    for tally in counted:
        if tally.kind is Kind.SECOND:
            second[tally.outcome.value] += tally.verdicts
    due = connection.execute(select(func.count()).where(submissions.c.recheck == RECHECK_DUE)).scalar_one()
    found = {"pending": spot - int(due) - second.total(), RECHECK_DUE: int(due), **second}
    return {state: count for state, count in found.items() if count}


def banned_nodes(connection: Connection, *, rules: StandingSpec) -> int:
    """How many nodes get no more work."""
    query = select(func.count()).where(nodes.c.strikes >= rules.ban_after)
    return int(connection.execute(query).scalar_one())


@dataclass(slots=True)
class _Settled:
    """Slots in a final state of the versions before `before`, of which no slot will change its state any more."""

    before: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


_FINAL = (SlotState.USED, SlotState.STALE, SlotState.SET_ASIDE)
_LIVE = tuple(state for state in SlotState if state not in _FINAL)
_settled: WeakKeyDictionary[Engine, _Settled] = WeakKeyDictionary()


def slot_counts(connection: Connection) -> dict[str, int]:
    """How many slots are in each state.

    What is settled is counted once for each process: slots are opened of the newest version only, and one that is used,
    stale or set aside stays so.
    """
    counts = Counter[str]()
    live = select(slots.c.state, func.count(), func.min(slots.c.version)).where(slots.c.state.in_(_LIVE))
    before = work.progress(connection).head
    for state, count, oldest in connection.execute(live.group_by(slots.c.state)):
        counts[state] = int(count)
        before = min(before, oldest)
    settled = _settled.setdefault(connection.engine, _Settled())
    with settled.lock:
        known = settled.before
        is_old = slots.c.version < before  # once: PostgreSQL takes two parameters for two expressions
        final = select(slots.c.state, is_old, func.count()).where(slots.c.state.in_(_FINAL))
        since = final.where(slots.c.version >= known).group_by(slots.c.state, is_old)
        for state, is_settled, count in connection.execute(since):
            (settled.counts if is_settled else counts)[state] += int(count)
        settled.before = max(known, before)
        counts += settled.counts
    return {state.value: counts[state.value] for state in SlotState}


_NODE_COLUMNS = [
    nodes.c[name]
    for name in (
        *("node", "engine", "admitted", "rejected", "tokens", "registered_at", "seen_at", "not_before"),
        *("verified", "strikes"),
    )
]


def run_status(coordinator: Coordinator, *, now: float) -> dict[str, Any]:
    """Everything about the run that is worth a look, as JSON values."""
    home = coordinator.home
    with home.database.read() as connection:
        at = work.progress(connection)
        finished = finished_steps(connection)
        return {
            "run_id": home.run_id,
            "name": home.spec.name,
            "time": now,
            "head_version": at.head,
            "next_step": at.next_step,
            "total_steps": home.spec.training.steps,
            "finished_steps": finished,
            "finished": finished >= home.spec.training.steps,
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
            "leader": _leader(connection),
            "log_size": log.size(connection),
        }


def finished_steps(connection: Connection) -> int:
    """How many steps have given a policy. They do so in their order, and the next begins when one has."""
    newest = select(steps.c.finished_at).order_by(steps.c.step.desc()).limit(_STEPS_UNDER_WAY)
    unfinished = sum(finished_at is None for finished_at in connection.execute(newest).scalars())
    return work.progress(connection).next_step - unfinished


def _leader(connection: Connection) -> dict[str, Any] | None:
    """Who led last, and when."""
    last = last_leader(connection)
    return None if last is None else {"name": last.name, "seen_at": last.seen_at}


def _steps(connection: Connection) -> list[dict[str, Any]]:
    rows = connection.execute(select(steps).order_by(steps.c.step.desc()).limit(MAX_STEPS)).all()
    return [
        {
            "step": row.step,
            "reward_mean": row.reward_mean,
            "staleness_mean": row.staleness_mean,
            "assigned_at": row.assigned_at,
            "finished_at": row.finished_at,
            "stats": json.loads(row.stats) if row.stats else None,
        }
        for row in reversed(rows)
    ]


def _policies(connection: Connection) -> list[dict[str, Any]]:
    newest = select(policies.c.version, policies.c.published_at).order_by(policies.c.version.desc()).limit(MAX_STEPS)
    return [
        {"version": row.version, "published_at": row.published_at} for row in reversed(connection.execute(newest).all())
    ]


def _nodes(connection: Connection, *, rules: StandingSpec, now: float) -> list[dict[str, Any]]:
    """The nodes that did something, or were seen lately: registering alone is free, and buys no place here."""
    names = _names_worth_a_line(connection, now=now)
    rows = connection.execute(
        select(*_NODE_COLUMNS).where(nodes.c.node.in_(names)).order_by(nodes.c.registered_at)
    ).all()
    by_node = _reasons_of(connection, [row.node for row in rows if row.rejected])
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


def _names_worth_a_line(connection: Connection, *, now: float) -> list[str]:
    """At most MAX_NODES, found by indices alone: those with most credit, with most rejections, and seen last."""
    columns = nodes.c
    orders = ((columns.tokens, 0), (columns.rejected, 0), (columns.seen_at, now - SEEN_LATELY_SECONDS))
    found: dict[str, None] = {}
    for column, above in orders:
        query = select(columns.node).where(column > above).order_by(column.desc(), columns.node.desc()).limit(MAX_NODES)
        found |= dict.fromkeys(connection.execute(query).scalars())
    return list(found)[:MAX_NODES]


def _reasons_of(connection: Connection, names: list[str]) -> dict[str, dict[str, int]]:
    by_node: dict[str, dict[str, int]] = {}
    query = select(submissions.c.node, submissions.c.reason, func.count()).where(
        submissions.c.node.in_(names), submissions.c.outcome == Outcome.REJECTED
    )
    for node, reason, count in connection.execute(query.group_by(submissions.c.node, submissions.c.reason)):
        by_node.setdefault(node, {})[reason] = int(count)
    return by_node


def _relays(connection: Connection) -> list[dict[str, Any]]:
    rows = connection.execute(select(relays).order_by(relays.c.node)).all()
    return [{"node": row.node, "url": row.url, "version": row.version, "seen_at": row.seen_at} for row in rows]
