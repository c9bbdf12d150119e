"""What a verdict does to its node: standing, waiting, stake, and what has to be measured again.

The rules are `node.protocol.standing`'s, which anybody follows in the log; here they meet the tables.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, and_, exists, func, not_, or_, select, update

from coordinator.storage import stakes
from coordinator.storage.schema import RECHECK_DUE, SubmissionState, groups, nodes, submissions
from node.protocol.admission import Outcome
from node.protocol.run import BatchSpec, RunSpec, StandingSpec
from node.protocol.standing import Standing

RECHECK_SECONDS = 120.0
"""So long a verifier tries for a second verdict; afterwards the group is left out undecided."""


def standing_of(connection: Connection, node: str) -> Standing:
    """A node's standing as it is now."""
    row = connection.execute(select(nodes.c.verified, nodes.c.strikes).where(nodes.c.node == node)).one()
    return Standing(verified=row.verified, strikes=row.strikes)


def is_measured_in_full(standing: Standing, *, draw: float, staked: int, rules: StandingSpec) -> bool:
    """Whether all rows of a slot are measured; `draw` is uniform in [0, 1) and unknown to the node."""
    return staked < rules.stake or draw < standing.full_rate(rules)


def follow(
    connection: Connection, node: str, outcome: Outcome, *, full: bool, tokens: int, spec: RunSpec, now: float
) -> None:
    """Take a first verdict into the node's standing and totals; a rejected node waits."""
    standing = standing_of(connection, node).after(outcome, full=full, rules=spec.standing)
    row = update(nodes).where(nodes.c.node == node)
    connection.execute(row.values(verified=standing.verified, strikes=standing.strikes))
    if outcome is Outcome.ADMITTED:
        gained = {"admitted": nodes.c.admitted + 1, "tokens": nodes.c.tokens + tokens, "rejected_streak": 0}
        connection.execute(row.values(gained))
    elif outcome is Outcome.REJECTED:
        connection.execute(row.values(rejected=nodes.c.rejected + 1))
        make_wait(connection, node, batch=spec.batch, now=now)


def take_back(connection: Connection, node: str, outcome: Outcome, *, tokens: int, spec: RunSpec, now: float) -> None:
    """A second verdict did not bear the first out: the group does not count, and a rejected one is a strike."""
    row = update(nodes).where(nodes.c.node == node)
    connection.execute(row.values(admitted=nodes.c.admitted - 1, tokens=nodes.c.tokens - tokens))
    follow(connection, node, outcome, full=True, tokens=0, spec=spec, now=now)


def make_wait(connection: Connection, node: str, *, batch: BatchSpec, now: float) -> None:
    """Give a node no work for a while, twice as long each time in a row."""
    streak = connection.execute(
        select(nodes.c.rejected_streak).where(nodes.c.node == node).with_for_update()
    ).scalar_one()
    wait = min(batch.rejection_backoff_max_seconds, batch.rejection_backoff_seconds * 2.0 ** min(streak, 30))
    row = update(nodes).where(nodes.c.node == node)
    connection.execute(row.values(rejected_streak=streak + 1, not_before=now + wait))


def wait_seconds(not_before: float, *, batch: BatchSpec, now: float) -> float:
    """For how long a node gets no work from now on."""
    wait = max(0.0, not_before - now)
    # Nobody waits longer: it was set while this machine's clock was wrong, or is set back now.
    return wait if wait <= batch.rejection_backoff_max_seconds else 0.0


def most_slots(standing: Standing, *, batch: BatchSpec) -> int:
    """How many slots a node that is not banned may have in leases and submissions without a verdict."""
    return min(batch.max_leases_per_node, standing.verified + 1)


def punish(connection: Connection, node: str, *, submission: str, spec: RunSpec, now: float) -> int:
    """A node was caught: take its stake, and queue what it had admitted in part. Returns how many groups that is."""
    stakes.slash(connection, node, submission=submission, now=now)
    unvested = _unvested(connection, node, rules=spec.standing)
    connection.execute(update(submissions).where(is_pending(), unvested).values(void=True))
    return _require_rechecks(connection, unvested, now=now)


def settle(connection: Connection, *, spec: RunSpec, now: float) -> None:
    """The run is over: queue whatever is not yet its node's, so that nobody loses credit by it."""
    partly = select(submissions.c.node).where(submissions.c.spot.is_not(None), submissions.c.recheck.is_(None))
    for node in connection.execute(partly.distinct()).scalars().all():
        _require_rechecks(connection, _unvested(connection, node, rules=spec.standing), now=now)


def _require_rechecks(connection: Connection, which: ColumnElement[bool], *, now: float) -> int:
    """Queue admitted submissions of which one row was measured for a second verdict; no training on them before it."""
    due = update(submissions).where(
        submissions.c.outcome == Outcome.ADMITTED,
        submissions.c.spot.is_not(None),
        submissions.c.recheck.is_(None),
        which,
    )
    values = {
        "state": SubmissionState.QUEUED,
        "verifier": None,
        "attempts": 0,
        "recheck": RECHECK_DUE,
        "recheck_by": now + RECHECK_SECONDS,
    }
    return connection.execute(due.values(values)).rowcount


def is_waited_for() -> ColumnElement[bool]:
    """Submissions whose group no step has used. Of others a second verdict changes nothing, and relays may have
    forgotten their policies: if training waited for these, a node could stop it by being caught again and again."""
    return exists().where(groups.c.submission == submissions.c.submission, groups.c.step.is_(None))


def rechecks_due(connection: Connection) -> int:
    """How many second verdicts training waits for."""
    query = select(func.count()).where(submissions.c.recheck == RECHECK_DUE, is_waited_for())
    return int(connection.execute(query).scalar_one())


def is_pending() -> ColumnElement[bool]:
    """Submissions admitted by one row that no second verdict and no rejection has settled."""
    return and_(
        submissions.c.outcome == Outcome.ADMITTED,
        submissions.c.spot.is_not(None),
        or_(submissions.c.recheck.is_(None), submissions.c.recheck == RECHECK_DUE),
        not_(submissions.c.void),
    )


def unvested_tokens(connection: Connection, node: str, *, rules: StandingSpec) -> int:
    """Tokens that may still become the node's, or void."""
    pending = select(func.coalesce(func.sum(submissions.c.tokens), 0))
    pending = pending.where(is_pending(), _unvested(connection, node, rules=rules))
    return int(connection.execute(pending).scalar_one())


def _unvested(connection: Connection, node: str, *, rules: StandingSpec) -> ColumnElement[bool]:
    """The node's admitted groups with fewer than `vesting` fully measured ones after them."""
    full = (
        select(submissions.c.log_index)
        .where(
            submissions.c.node == node,
            submissions.c.outcome == Outcome.ADMITTED,
            submissions.c.spot.is_(None),
        )
        .order_by(submissions.c.log_index.desc())
        .offset(rules.vesting - 1)
        .limit(1)
    )
    vested_before = connection.execute(full).scalar()
    mine = submissions.c.node == node
    return mine if vested_before is None else and_(mine, submissions.c.log_index > vested_before)


def is_unproven() -> ColumnElement[bool]:
    """Nodes without an admitted group, or whose last was rejected."""
    return or_(nodes.c.admitted == 0, nodes.c.rejected_streak > 0)
