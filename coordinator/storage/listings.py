"""Submissions as lists, newest first: of a node, of a training step, by the beginning of an id, by what they were.

Each reads at most a fixed number of rows, by index: what has none is looked for among the newest MOST_SEARCHED.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, select

from coordinator.storage.schema import LeaseState, SubmissionState, groups, leases, nodes, slots, submissions
from coordinator.storage.submissions import QUEUED
from node.protocol.admission import Outcome

MOST_SEARCHED: Final = 10_000
MOST_GROUPS: Final = 2_000
"""Newest admitted groups of a node whose credit is drawn over time."""


@dataclass(frozen=True, slots=True)
class ListedSubmission:
    """A submission in a list; outcome, reason, tokens and place in the log are None before its verdict.

    `reward` is its group's mean, None unless it was admitted, and `step` the training step that used it.
    """

    submission: str
    node: str
    version: int
    slot: int
    environment: int | None
    candidate: int | None
    received_at: float
    outcome: str | None
    reason: str | None
    tokens: int | None
    log_index: int | None
    decided_at: float | None
    reward: float | None
    step: int | None


def _listed(of: Any = submissions) -> Select[Any]:
    """Select the columns of ListedSubmission from `of`, submissions or a part of them."""
    columns = of.c
    return (
        select(
            columns.submission,
            columns.node,
            slots.c.version,
            slots.c.number,
            slots.c.environment,
            slots.c.candidate,
            columns.received_at,
            columns.outcome,
            columns.reason,
            columns.tokens,
            columns.log_index,
            columns.decided_at,
            groups.c.reward_mean,
            groups.c.step,
        )
        .join(slots, slots.c.id == columns.slot_id)
        .outerjoin(groups, groups.c.submission == columns.submission)
    )


def _read(connection: Connection, query: Select[Any]) -> list[ListedSubmission]:
    return [ListedSubmission(*row) for row in connection.execute(query)]


def judged_of_node(
    connection: Connection, node: str, *, outcomes: Iterable[Outcome] = tuple(Outcome), before: int | None, most: int
) -> list[ListedSubmission]:
    """Return a node's newest `most` submissions with one of these verdicts, of log entries below `before`."""
    found: list[ListedSubmission] = []
    for outcome in outcomes:
        query = _listed().where(submissions.c.node == node, submissions.c.outcome == outcome)
        if before is not None:
            query = query.where(submissions.c.log_index < before)
        found += _read(connection, query.order_by(submissions.c.log_index.desc()).limit(most))
    return sorted(found, key=lambda row: row.log_index or 0, reverse=True)[:most]


def unjudged_of_node(connection: Connection, node: str, *, most: int) -> list[ListedSubmission]:
    """Return at most `most` submissions of a node that wait for their first verdict."""
    waiting = submissions.c.node == node, submissions.c.state.in_(QUEUED), submissions.c.outcome.is_(None)
    return _read(connection, _listed().where(*waiting).limit(most))


def credit_of(connection: Connection, node: str) -> list[tuple[float, int]]:
    """Return (when, tokens) of a node's newest MOST_GROUPS credited groups, oldest first."""
    columns = submissions.c
    query = (
        select(columns.decided_at, columns.tokens)
        .where(columns.node == node, columns.outcome == Outcome.ADMITTED, columns.void.is_(False))
        .order_by(columns.log_index.desc())
        .limit(MOST_GROUPS)
    )
    return [(row.decided_at, row.tokens) for row in reversed(connection.execute(query).all())]


def of_step(connection: Connection, step: int, *, most: int) -> list[ListedSubmission]:
    """Return at most `most` submissions that a training step used."""
    return _read(connection, _listed().where(groups.c.step == step).order_by(groups.c.slot_id).limit(most))


def of_slot(connection: Connection, version: int, slot: int, *, most: int) -> list[ListedSubmission]:
    """Return at most `most` submissions for one slot."""
    is_it = slots.c.version == version, slots.c.number == slot
    return _read(connection, _listed().where(*is_it).limit(most))


def submissions_by_id(connection: Connection, beginning: str, ending: str, *, most: int) -> list[ListedSubmission]:
    """Return at most `most` submissions whose id begins and ends so; `beginning` is not empty."""
    where = _begins_and_ends(submissions.c.submission, beginning, ending)
    return _read(connection, _listed().where(*where).order_by(submissions.c.submission).limit(most))


def nodes_by_id(connection: Connection, beginning: str, ending: str, *, most: int) -> list[str]:
    """Return at most `most` nodes whose id begins and ends so; `beginning` is not empty."""
    query = select(nodes.c.node).where(*_begins_and_ends(nodes.c.node, beginning, ending))
    return list(connection.execute(query.order_by(nodes.c.node).limit(most)).scalars())


def _begins_and_ends(column: ColumnElement[str], beginning: str, ending: str) -> tuple[ColumnElement[bool], ...]:
    # Hexadecimal digits sort before "g", in every collation.
    return column >= beginning, column < f"{beginning}g", column.like(f"%{ending}")


def newest_judged(
    connection: Connection,
    *,
    most: int,
    reason: str | None = None,
    outcome: str | None = None,
    reward: tuple[float, float] | None = None,
) -> list[ListedSubmission]:
    """Return at most `most` of the newest MOST_SEARCHED judged submissions, of those with this reason or outcome, or a
    mean reward within these bounds.
    """
    columns = submissions.c
    is_filtered = any(one is not None for one in (reason, outcome, reward))
    newest = (
        select(submissions)
        .where(columns.state == SubmissionState.DONE)
        .order_by(columns.received_at.desc())
        .limit(MOST_SEARCHED if is_filtered else most)
        .subquery()
    )
    query = _listed(newest)
    if reason is not None:
        query = query.where(newest.c.reason == reason)
    if outcome is not None:
        query = query.where(newest.c.outcome == outcome)
    if reward is not None:
        query = query.where(groups.c.reward_mean.between(*reward))
    return _read(connection, query.order_by(newest.c.received_at.desc()).limit(most))


def nodes_at_work(connection: Connection, *, since: float, now: float) -> set[str]:
    """Return the nodes that hold a lease at `now`, or have submitted at `since` or later."""
    holding = select(leases.c.node).where(leases.c.state == LeaseState.ACTIVE, leases.c.expires_at > now)
    sent = select(submissions.c.node).where(
        submissions.c.state.in_(tuple(SubmissionState)), submissions.c.received_at >= since
    )
    return set(connection.execute(holding.union(sent)).scalars())
