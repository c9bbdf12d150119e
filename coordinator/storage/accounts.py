"""A node's public account: standing, credit, and its last rejections.

Public and unauthenticated, so every query uses an index, however long the run.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, select, union_all

from coordinator.storage import stakes, standing, work
from coordinator.storage.progress import progress
from coordinator.storage.schema import RECHECK_DUE, log_entries, nodes, submissions
from node.client.http import printable
from node.protocol.admission import Outcome
from node.protocol.messages import MAX_ENTRY_BYTES, MAX_REJECTIONS, NodeStanding, Rejection, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import RunSpec, StandingSpec
from node.protocol.standing import Standing
from shardcast.wire import decode

MAX_DETAIL = 200


def standing_report(connection: Connection, node: str, *, spec: RunSpec, now: float) -> NodeStanding:
    """Return the node's account at `now`; an unknown node's is a new one's."""
    row = connection.execute(select(nodes).where(nodes.c.node == node)).first()
    of_slots = Standing() if row is None else Standing(verified=row.verified, strikes=row.strikes)
    banned, over = of_slots.is_banned(spec.standing), progress(connection).is_over(spec)
    stake = stakes.held(connection, node)
    in_part = stake >= spec.standing.stake and not over
    unvested, void = standing.unvested_tokens(connection, node, rules=spec.standing), _void_tokens(connection, node)
    return NodeStanding(
        node=node,
        known=row is not None,
        banned=banned,
        banned_at=_banned_at(connection, node, of_slots, rules=spec.standing) if banned else None,
        verified=of_slots.verified,
        strikes=of_slots.strikes,
        probation=spec.standing.probation,
        ban_after=spec.standing.ban_after,
        admitted=0 if row is None else row.admitted,
        rejected=0 if row is None else row.rejected,
        indeterminate=_count(connection, node, Outcome.INDETERMINATE),
        vested=0 if row is None else max(0, row.tokens - unvested - void),
        unvested=unvested,
        void=void,
        stake=max(0, stake),
        leases=work.held_leases(connection, node),
        unjudged=work.unjudged(connection, node),
        most_slots=0 if banned or over else standing.most_slots(of_slots, batch=spec.batch),
        wait_seconds=0.0 if row is None else standing.backoff_seconds(row.not_before, batch=spec.batch, now=now),
        full_rate=of_slots.full_rate(spec.standing) if in_part else 1.0,
        rejections=tuple(
            Rejection(
                submission=entry.submission,
                reason=entry.reason or Reason.VERIFIER_FAILED,
                detail=printable(entry.detail)[:MAX_DETAIL],
                decided_at=entry.decided_at,
                log_index=index,
            )
            for index, entry in _rejections(connection, node, most=MAX_REJECTIONS)
        ),
    )


def _banned_at(connection: Connection, node: str, held: Standing, *, rules: StandingSpec) -> int | None:
    """Return the time of the strike that banned the node; work in flight may have added later ones."""
    found = _rejections(connection, node, most=1, skip=held.strikes - rules.ban_after)
    return found[0][1].decided_at if found else None


def _rejections(connection: Connection, node: str, *, most: int, skip: int = 0) -> list[tuple[int, VerdictEntry]]:
    """Return the node's newest rejections, first and second verdicts, as (log index, entry), newest first."""
    first = select(submissions.c.log_index.label("place")).where(
        submissions.c.node == node, submissions.c.outcome == Outcome.REJECTED
    )
    second = select(submissions.c.recheck_index.label("place")).where(
        submissions.c.node == node,
        submissions.c.recheck == Outcome.REJECTED,
        submissions.c.recheck_index.is_not(None),  # rows of earlier releases
    )
    both = union_all(first, second).subquery()
    last = select(both.c.place).order_by(both.c.place.desc()).offset(skip).limit(most).subquery()
    query = select(last.c.place, log_entries.c.leaf).join(last, last.c.place == log_entries.c.index)
    return [
        (place, decode(VerdictEntry, bytes(leaf), max_bytes=MAX_ENTRY_BYTES))
        for place, leaf in connection.execute(query.order_by(last.c.place.desc()))
    ]


def _void_tokens(connection: Connection, node: str) -> int:
    """Return the tokens of admitted groups whose pending credit a later rejection voided."""
    query = select(func.coalesce(func.sum(submissions.c.tokens), 0)).where(
        submissions.c.node == node,
        submissions.c.recheck.in_((RECHECK_DUE, Outcome.ADMITTED)),
        submissions.c.void,
    )
    return int(connection.execute(query).scalar_one())


def _count(connection: Connection, node: str, outcome: Outcome) -> int:
    query = select(func.count()).where(submissions.c.node == node, submissions.c.outcome == outcome)
    return int(connection.execute(query).scalar_one())
