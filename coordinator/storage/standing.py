"""Effects of a verdict on its node: standing, backoff, stake, and rechecks.

The rules are `node.protocol.standing`'s, which auditors reproduce from the log; this module applies them to the tables.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    and_,
    bindparam,
    case,
    exists,
    func,
    not_,
    or_,
    select,
    update,
)

from coordinator.storage import stakes
from coordinator.storage.prepared import Prepared
from coordinator.storage.schema import RECHECK_DUE, SubmissionState, groups, nodes, submissions
from node.protocol.admission import Outcome
from node.protocol.run import BatchSpec, RunSpec, StandingSpec
from node.protocol.standing import Standing

RECHECK_SECONDS = 120.0
"""How long a second verdict is retried; then it is indeterminate."""
FREE_RETURNS = 16
"""Leases that a proven node may return, beyond what it has done since, before it has to wait: a worker that ends
returns all that it holds."""

_OF_NODE: Final = nodes.c.node == bindparam("of_node")
_STANDING: Final = Prepared(select(nodes.c.verified, nodes.c.strikes).where(_OF_NODE))
_SET_STANDING: Final = (
    update(nodes).where(_OF_NODE).values(verified=bindparam("now_verified"), strikes=bindparam("now_strikes"))
)
_ADD_ADMITTED: Final = Prepared(
    _SET_STANDING.values(
        admitted=nodes.c.admitted + 1,
        tokens=nodes.c.tokens + bindparam("gained"),
        rejected_streak=0,
        returned=case((nodes.c.returned > 0, nodes.c.returned - 1), else_=0),
    )
)
_ADD_REJECTED: Final = _SET_STANDING.values(rejected=nodes.c.rejected + 1)


def standing_of(connection: Connection, node: str) -> Standing:
    """Return a node's current standing."""
    ((verified, strikes),) = _STANDING.rows(connection, {"of_node": node})
    return Standing(verified=verified, strikes=strikes)


def is_measured_in_full(standing: Standing, *, draw: float, staked: int, rules: StandingSpec) -> bool:
    """Return whether all rows of a slot are measured; `draw` is uniform in [0, 1) and unknown to the node."""
    return staked < rules.stake or draw < standing.full_rate(rules)


def apply_refusal(
    connection: Connection, node: str, outcome: Outcome, *, full: bool, spec: RunSpec, now: float
) -> None:
    """Update the node's standing and totals by a first verdict that does not admit; a rejection starts a backoff."""
    values = _after(connection, node, outcome, full=full, spec=spec)
    connection.execute(_ADD_REJECTED if outcome is Outcome.REJECTED else _SET_STANDING, values)
    if outcome is Outcome.REJECTED:
        start_backoff(connection, node, batch=spec.batch, now=now)


def admission(
    connection: Connection, node: str, *, full: bool, tokens: int, spec: RunSpec
) -> tuple[Prepared, dict[str, Any]]:
    """Return the statement that updates the node's standing and totals by a first verdict that admits."""
    return _ADD_ADMITTED, _after(connection, node, Outcome.ADMITTED, full=full, spec=spec) | {"gained": tokens}


def _after(connection: Connection, node: str, outcome: Outcome, *, full: bool, spec: RunSpec) -> dict[str, Any]:
    standing = standing_of(connection, node).after(outcome, full=full, rules=spec.standing)
    return {"of_node": node, "now_verified": standing.verified, "now_strikes": standing.strikes}


def revoke_admission(
    connection: Connection, node: str, outcome: Outcome, *, tokens: int, spec: RunSpec, now: float
) -> None:
    """Undo an admission that a second verdict did not confirm; a rejection is a strike."""
    row = update(nodes).where(nodes.c.node == node)
    connection.execute(row.values(admitted=nodes.c.admitted - 1, tokens=nodes.c.tokens - tokens))
    apply_refusal(connection, node, outcome, full=True, spec=spec, now=now)


def start_backoff(connection: Connection, node: str, *, batch: BatchSpec, now: float) -> None:
    """Withhold leases from a node for a while, twice as long after each failure in a row."""
    streak = connection.execute(
        select(nodes.c.rejected_streak).where(nodes.c.node == node).with_for_update(key_share=True)
    ).scalar_one()
    wait = min(batch.rejection_backoff_max_seconds, batch.rejection_backoff_seconds * 2.0 ** min(streak, 30))
    row = update(nodes).where(nodes.c.node == node)
    connection.execute(row.values(rejected_streak=streak + 1, not_before=now + wait))


def note_return(connection: Connection, node: str, *, batch: BatchSpec, now: float) -> None:
    """Count a returned lease; beyond the node's budget, withhold leases from it for a while, longer each time.

    Returning is what an honest node does that ends or whose engine fails: each node may once, and as many times more as
    it has admitted groups, up to FREE_RETURNS. An admitted group takes one return back.
    """
    row = connection.execute(
        update(nodes)
        .where(nodes.c.node == node)
        .values(returned=nodes.c.returned + 1)
        .returning(nodes.c.returned, nodes.c.admitted, nodes.c.not_before)
    ).one()
    beyond = row.returned - 1 - min(FREE_RETURNS, row.admitted)
    if beyond > 0:
        wait = min(batch.rejection_backoff_max_seconds, batch.rejection_backoff_seconds * 2.0 ** min(beyond - 1, 30))
        wait = max(wait, backoff_seconds(row.not_before, batch=batch, now=now))
        connection.execute(update(nodes).where(nodes.c.node == node).values(not_before=now + wait))


def backoff_seconds(not_before: float, *, batch: BatchSpec, now: float) -> float:
    """Return for how many seconds a node gets no lease."""
    wait = max(0.0, not_before - now)
    # Longer than the maximum means that the clock was, or is, wrong.
    return wait if wait <= batch.rejection_backoff_max_seconds else 0.0


def most_slots(standing: Standing, *, batch: BatchSpec) -> int:
    """Return how many leases and submissions without a verdict a node may have together, unless it is banned."""
    return min(batch.max_leases_per_node, standing.verified + 1)


def penalise(connection: Connection, node: str, *, submission: str, spec: RunSpec, now: float) -> int:
    """Take a rejected node's stake and void its pending credit; queue these groups and return their number."""
    stakes.slash(connection, node, submission=submission, now=now)
    unvested = _unvested(connection, node, rules=spec.standing)
    connection.execute(update(submissions).where(is_pending(), unvested).values(void=True))
    return _require_rechecks(connection, unvested, now=now)


def settle(connection: Connection, *, spec: RunSpec, now: float) -> None:
    """Queue all unvested groups for a second verdict at the end of the run, when nothing vests any more."""
    vested = vested_before(nodes.c.node, rules=spec.standing)
    pending = exists().where(
        submissions.c.node == nodes.c.node,
        submissions.c.outcome == Outcome.ADMITTED,
        submissions.c.log_index > func.coalesce(vested, -1),
        _is_partly_measured(),
    )
    for node in connection.execute(select(nodes.c.node).where(pending)).scalars().all():
        _require_rechecks(connection, _unvested(connection, node, rules=spec.standing), now=now)


def _is_partly_measured() -> ColumnElement[bool]:
    """Return the condition of submissions of which one row was measured, and no second verdict is made."""
    return and_(submissions.c.spot.is_not(None), submissions.c.recheck.is_(None))


def _require_rechecks(connection: Connection, which: ColumnElement[bool], *, now: float) -> int:
    """Queue the admitted submissions in `which` of which one row was measured for a second verdict; return how many."""
    due = update(submissions).where(submissions.c.outcome == Outcome.ADMITTED, _is_partly_measured(), which)
    values = {
        "state": SubmissionState.QUEUED,
        "verifier": None,
        "attempts": 0,
        "recheck": RECHECK_DUE,
        "recheck_by": now + RECHECK_SECONDS,
    }
    return connection.execute(due.values(values)).rowcount


def blocks_training() -> ColumnElement[bool]:
    """Return the condition of submissions whose group no step has used.

    Rechecks of others do not affect training, and their policies may be gone from the relays: waiting for these would
    let a node stall training by being rejected again and again.
    """
    return exists().where(groups.c.submission == submissions.c.submission, groups.c.step.is_(None))


def rechecks_due(connection: Connection) -> int:
    """Return how many second verdicts training waits for."""
    query = select(func.count()).where(submissions.c.recheck == RECHECK_DUE, blocks_training())
    return int(connection.execute(query).scalar_one())


def is_pending() -> ColumnElement[bool]:
    """Return the condition of submissions admitted by one row and not settled by a second verdict or a rejection."""
    return and_(
        submissions.c.outcome == Outcome.ADMITTED,
        submissions.c.spot.is_not(None),
        or_(submissions.c.recheck.is_(None), submissions.c.recheck == RECHECK_DUE),
        not_(submissions.c.void),
    )


def _unvested(connection: Connection, node: str, *, rules: StandingSpec) -> ColumnElement[bool]:
    """Return the condition of the node's groups with fewer than `vesting` fully measured admitted ones after them."""
    vested = connection.execute(select(vested_before(node, rules=rules))).scalar()
    mine = submissions.c.node == node
    return mine if vested is None else and_(mine, submissions.c.log_index > vested)


def vested_before(node: str | ColumnElement[str], *, rules: StandingSpec) -> ScalarSelect[int]:
    """Return the log index up to which a node's groups have vested, NULL for none."""
    full = submissions.alias("full")
    return (
        select(full.c.log_index)
        .where(full.c.node == node, full.c.outcome == Outcome.ADMITTED, full.c.spot.is_(None))
        .order_by(full.c.log_index.desc())
        .offset(rules.vesting - 1)
        .limit(1)
        .correlate_except(full)
        .scalar_subquery()
    )


def is_unproven() -> ColumnElement[bool]:
    """Return the condition of nodes without an admitted group, or whose last one was rejected."""
    return or_(nodes.c.admitted == 0, nodes.c.rejected_streak > 0)
