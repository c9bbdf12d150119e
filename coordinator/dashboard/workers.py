"""The table of workers, paginated by index in each of its orders."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.storage import nodes, profiles
from coordinator.storage.database import Connection
from coordinator.storage.nodes import ORDERS, NodeRow
from coordinator.storage.profiles import NodeProfile
from coordinator.storage.standing import backoff_seconds
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec

ROWS: Final = 25
TODAY: Final = "today"
"""The order by what was admitted today, of which there is one page."""

HERE_SECONDS: Final = 120.0
"""A worker asks for leases or relays more often than this."""

_PREFIX: Final = re.compile(r"[0-9a-f]{0,64}")
_AFTER: Final = re.compile(r"([0-9.]{1,20}):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class TableQuery:
    """A page of the table: order, the (value, id) of the row before it, and a prefix of node ids."""

    sort: str = "credit"
    after: tuple[float, str] | None = None
    find: str = ""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker; `today` are the tokens admitted today, None where the order is another.

    `nickname` and `device` are "" where it does not say.
    """

    node: str
    nickname: str
    device: str
    engine: str
    state: str
    said: str
    admitted: int
    rejected: int
    tokens: int
    today: int | None
    verified: int
    strikes: int
    standing: str
    full_rate: float
    seen_at: float


@dataclass(frozen=True, slots=True)
class WorkerTable:
    """At most ROWS workers; `next_after` is the query parameter of the next page, "" on the last."""

    query: TableQuery
    rows: Sequence[WorkerRow]
    next_after: str


def parse_query(sort: str, after: str, find: str) -> TableQuery:
    """Parse the query parameters of the table; raises Refusal."""
    find = find.strip().lower()
    if sort not in (*ORDERS, TODAY) or not _PREFIX.fullmatch(find):
        raise Refusal(Reason.BAD_REQUEST, "Sort by credit, today, seen or rejected; an id has hexadecimal digits.")
    if not after:
        return TableQuery(sort, None, find)
    parts = _AFTER.fullmatch(after)
    try:
        return TableQuery(sort, (float(parts[1]), parts[2]), find) if parts else TableQuery(sort, None, find)
    except ValueError as error:
        raise Refusal(Reason.BAD_REQUEST, "Not a place in this table.") from error


def read_workers(
    connection: Connection,
    query: TableQuery,
    *,
    spec: RunSpec,
    at_work: Collection[str],
    now: float,
    best: Sequence[tuple[str, int]] = (),
) -> WorkerTable:
    """Read the requested rows, at most ROWS of them.

    `at_work` are the ids of the nodes that are, and `best` those of the order TODAY, each with its tokens.
    """
    today = dict(best)
    if query.sort == TODAY and not query.find:
        rows = nodes.list_named(connection, list(today)[:ROWS])
    elif query.find:
        after = "" if query.after is None else query.after[1]
        rows = nodes.list_by_prefix(connection, query.find, after=after, most=ROWS + 1)
    else:
        rows = nodes.list_by(connection, query.sort, after=query.after, most=ROWS + 1)
    said = profiles.list_of(connection, [row.node for row in rows[:ROWS]])
    shown = [
        _worker(row, said[row.node], spec=spec, at_work=at_work, today=today.get(row.node), now=now)
        for row in rows[:ROWS]
    ]
    last = rows[ROWS - 1] if len(rows) > ROWS else None
    return WorkerTable(query, shown, "" if last is None else f"{_value(last, query.sort)}:{last.node}")


def _value(row: NodeRow, sort: str) -> str:
    return {"credit": str(row.tokens), "seen": repr(row.seen_at), "rejected": str(row.rejected)}[sort]


def _worker(
    row: NodeRow, profile: NodeProfile, *, spec: RunSpec, at_work: Collection[str], today: int | None, now: float
) -> WorkerRow:
    state, said = _state(row, spec=spec, at_work=at_work, now=now)
    return WorkerRow(
        node=row.node,
        nickname=profile.nickname,
        device="" if profile.hardware is None else profile.hardware.device,
        engine=row.engine,
        state=state,
        said=said,
        admitted=row.admitted,
        rejected=row.rejected,
        tokens=row.tokens,
        today=today,
        verified=row.verified,
        strikes=row.strikes,
        standing=row.standing.word(spec.standing),
        full_rate=row.standing.full_rate(spec.standing),
        seen_at=row.seen_at,
    )


def _state(row: NodeRow, *, spec: RunSpec, at_work: Collection[str], now: float) -> tuple[str, str]:
    if row.standing.is_banned(spec.standing):
        return "banned", "gets no more work"
    if row.node in at_work:
        return "at work", "holds a slot, or has submitted within two minutes"
    if backoff_seconds(row.not_before, batch=spec.batch, now=now) > 0:
        return "waiting", "gets no work for a while, after a rejection or a lease that ran out"
    if now - row.seen_at <= HERE_SECONDS:
        return "idle", "was heard of within two minutes, and has no slot"
    return "away", "was not heard of for two minutes"
