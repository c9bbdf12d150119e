"""Rows whose columns follow from the log, read and written by key for `coordinator.integrity`, in bounded memory.

A row's `slot` is the (version, number) of the slot that its `slot_id` names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    delete,
    exists,
    false,
    func,
    insert,
    not_,
    or_,
    select,
    tuple_,
    update,
)

from coordinator.storage import tallies
from coordinator.storage.progress import progress
from coordinator.storage.schema import (
    LeaseState,
    SlotState,
    SubmissionState,
    deliveries,
    groups,
    leases,
    log_entries,
    log_nodes,
    nodes,
    policies,
    problem_means,
    rejections,
    slots,
    steps,
    submissions,
    verdict_tallies,
)
from coordinator.storage.tallies import VerdictKind
from node.protocol.admission import Outcome
from node.protocol.run import BatchSpec

PAGE_ROWS: Final = 500
LEAVES_AT_ONCE: Final = 1000
TABLES: Final[dict[str, Table]] = {
    table.name: table
    for table in (
        submissions,
        groups,
        slots,
        policies,
        steps,
        nodes,
        problem_means,
        verdict_tallies,
        deliveries,
        rejections,
    )
}
_KEYS: Final = {submissions.name: ("submission",), groups.name: ("submission",), slots.name: ("version", "number")}

Key = tuple[Any, ...]

UNJUDGED: Final[dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("outcome", "reason", "detail", "figure", "tokens", "log_index", "decided_at"),
            *("spot", "recheck", "recheck_index"),
        )
    ),
    "void": False,
}
"""What the row of a submission without a verdict says of one."""


def key_columns(table: str) -> tuple[str, ...]:
    """Return the columns by which a table's rows are named here."""
    return _KEYS.get(table) or tuple(column.name for column in TABLES[table].primary_key)


def rows_of(connection: Connection, table: str, keys: Sequence[Key]) -> dict[Key, Mapping[str, Any]]:
    """Return the stored rows with these keys, at most PAGE_ROWS of them."""
    *leading, last = (TABLES[table].c[name] for name in key_columns(table))
    # SQLite reads the whole table for a list of tuples, and an index for each of these.
    ends = defaultdict[Key, list[Any]](list)
    for key in keys:
        ends[key[:-1]].append(key[-1])
    wanted = or_(
        *(
            and_(*(column == value for column, value in zip(leading, start, strict=True)), last.in_(values))
            for start, values in ends.items()
        )
    )
    return dict(_keyed(table, row) for row in connection.execute(_select(table).where(wanted)).mappings())


def all_rows(connection: Connection, table: str) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """Yield all rows of a table by key, holding no cursor between pages."""
    columns = [TABLES[table].c[name] for name in key_columns(table)]
    query, after = _select(table).order_by(*columns).limit(PAGE_ROWS), None
    while True:
        page = query if after is None else query.where(tuple_(*columns) > tuple_(*after))
        found = [_keyed(table, row) for row in connection.execute(page).mappings()]
        yield from found
        if len(found) < PAGE_ROWS:
            return
        after = found[-1][0]


def _select(table: str) -> Select[Any]:
    if "slot_id" not in TABLES[table].c:
        return select(TABLES[table])
    joined = select(TABLES[table], slots.c.version.label("of_version"), slots.c.number.label("of_number"))
    return joined.outerjoin(slots, slots.c.id == TABLES[table].c.slot_id)


def _keyed(table: str, row: Mapping[Any, Any]) -> tuple[Key, Mapping[str, Any]]:
    columns: dict[str, Any] = dict(row)
    if "of_version" in columns:
        columns["slot"] = (columns.pop("of_version"), columns.pop("of_number"))
    return tuple(columns[name] for name in key_columns(table)), columns


def write(connection: Connection, table: str, key: Key, columns: Mapping[str, Any]) -> bool:
    """Update columns of one row; return whether it is there."""
    values = dict(columns)
    if "slot" in values:
        version, number = values.pop("slot")
        at = (slots.c.version == version, slots.c.number == number)
        values["slot_id"] = select(slots.c.id).where(*at).scalar_subquery()
    return connection.execute(update(TABLES[table]).where(_is(table, key)).values(values)).rowcount > 0


def add(connection: Connection, table: str, key: Key, columns: Mapping[str, Any]) -> None:
    """Insert a row; what is not derived of it is 0."""
    unknown = {"wait_seconds": 0.0, "longest_wait": 0.0} if table == verdict_tallies.name else {}
    named = dict(zip(key_columns(table), key, strict=True))
    connection.execute(insert(TABLES[table]).values(named | unknown | dict(columns)))


def remove(connection: Connection, table: str, key: Key) -> None:
    """Delete one row."""
    connection.execute(delete(TABLES[table]).where(_is(table, key)))


def _is(table: str, key: Key) -> Any:
    columns = TABLES[table].c
    return and_(*(columns[name] == value for name, value in zip(key_columns(table), key, strict=True)))


def unlogged_verdicts(connection: Connection, *, logged: int | None) -> Iterator[Key]:
    """Yield submissions whose row has a verdict that the log does not: without a place in it, or with another's.

    `logged` is the log's number of first verdicts: where as many rows have a place, and each verdict has its row, no
    other row has one, and none is looked for.
    """
    claims = or_(*(submissions.c[name].is_not(None) for name in UNJUDGED if name not in ("log_index", "void")))
    without = select(submissions.c.submission).where(submissions.c.log_index.is_(None), claims)
    yield from [(name,) for name in connection.execute(without).scalars()]
    placed = select(func.count()).where(submissions.c.log_index.is_not(None))
    if logged is not None and connection.execute(placed).scalar_one() == logged:
        return
    query = (
        select(submissions.c.submission, log_entries.c.leaf)
        .outerjoin(log_entries, log_entries.c.index == submissions.c.log_index)
        .where(submissions.c.log_index.is_not(None))
        .order_by(submissions.c.submission)
        .limit(PAGE_ROWS)
    )
    after = ""
    while page := connection.execute(query.where(submissions.c.submission > after)).all():
        for name, leaf in page:
            if leaf is None or not bytes(leaf).startswith(f'{{"type":"verdict","submission":"{name}"'.encode()):
                yield (name,)
        after = page[-1].submission


def _revoked() -> ColumnElement[bool]:
    """Return the condition of submissions whose admission a second verdict did not confirm."""
    return submissions.c.recheck.in_((Outcome.REJECTED, Outcome.INDETERMINATE))


def unlogged_groups(connection: Connection) -> list[Key]:
    """Return groups of submissions that the rows of `submissions` do not show as admitted."""
    revoked = and_(func.coalesce(_revoked(), false()), groups.c.step.is_(None))
    wrong = or_(submissions.c.outcome.is_distinct_from(Outcome.ADMITTED), revoked)
    query = select(groups.c.submission).join(submissions, submissions.c.submission == groups.c.submission).where(wrong)
    return [(name,) for name in connection.execute(query.order_by(groups.c.submission)).scalars()]


def unlogged_slots(connection: Connection, *, batch: BatchSpec) -> list[tuple[Key, str, SlotState]]:
    """Return slots in a state that only an admitted group gives, without one: key, state, and what it has to be."""
    of_group = exists().where(groups.c.slot_id == slots.c.id)
    here = (submissions.c.slot_id == slots.c.id, submissions.c.outcome == Outcome.ADMITTED)
    confirmed = exists().where(*here, or_(submissions.c.recheck.is_(None), not_(_revoked())))
    wrong = or_(
        and_(slots.c.state.in_((SlotState.USED, SlotState.ADMITTED)), not_(or_(of_group, confirmed))),
        and_(slots.c.state == SlotState.SET_ASIDE, not_(exists().where(*here))),
    )
    waiting = exists().where(submissions.c.slot_id == slots.c.id, submissions.c.outcome.is_(None))
    leased = exists().where(leases.c.slot_id == slots.c.id, leases.c.state == LeaseState.ACTIVE)
    query = select(slots.c.version, slots.c.number, slots.c.state, waiting.label("waits"), leased.label("leased"))
    floor = progress(connection).floor(batch)
    found = []
    for row in connection.execute(query.where(wrong).order_by(slots.c.id)):
        free = SlotState.STALE if row.version < floor else SlotState.OPEN
        state = SlotState.SUBMITTED if row.waits else SlotState.LEASED if row.leased else free
        found.append(((row.version, row.number), row.state, state))
    return found


def leaves_from(connection: Connection, start: int) -> list[tuple[int, bytes]]:
    """Return up to LEAVES_AT_ONCE entries from index `start` on, with their indexes."""
    query = select(log_entries.c.index, log_entries.c.leaf).where(log_entries.c.index >= start)
    found = connection.execute(query.order_by(log_entries.c.index).limit(LEAVES_AT_ONCE))
    return [(index, bytes(leaf)) for index, leaf in found]


def tree_nodes(connection: Connection, level: int, start: int, end: int) -> dict[int, bytes]:
    """Return the stored hashes of nodes start .. end - 1 of a level of the log's tree, by index."""
    at = (log_nodes.c.level == level, log_nodes.c.index >= start, log_nodes.c.index < end)
    found = connection.execute(select(log_nodes.c.index, log_nodes.c.hash).where(*at))
    return {index: bytes(value) for index, value in found}


def put_tree_node(connection: Connection, level: int, index: int, value: bytes) -> None:
    """Insert or replace one node of the log's tree."""
    at = (log_nodes.c.level == level, log_nodes.c.index == index)
    if connection.execute(update(log_nodes).where(*at).values(hash=value)).rowcount == 0:
        connection.execute(insert(log_nodes).values(level=level, index=index, hash=value))


def surplus_tree_nodes(connection: Connection, size: int) -> list[tuple[int, int]]:
    """Return the (level, index) of stored nodes that a log of `size` entries does not have."""
    levels = connection.execute(select(log_nodes.c.level).distinct()).scalars().all()
    found: list[tuple[int, int]] = []
    for level in levels:
        beyond = select(log_nodes.c.index).where(log_nodes.c.level == level, log_nodes.c.index >= size >> level)
        found += [(level, index) for index in connection.execute(beyond).scalars()]
    return found


def remove_tree_node(connection: Connection, level: int, index: int) -> None:
    """Delete one node of the log's tree."""
    connection.execute(delete(log_nodes).where(log_nodes.c.level == level, log_nodes.c.index == index))


@dataclass(frozen=True, slots=True)
class Sums:
    """The same number, counted in two tables."""

    what: str
    stored: int
    derived: int


def sums(connection: Connection, *, size: int) -> list[Sums]:
    """Count what must agree between the tables and a log of `size` entries, reading no leaf.

    A change of one table shows in one of them, unless it is balanced by another.
    """
    counted = tallies.whole_run(connection)
    first = [one for one in counted if one.kind is not VerdictKind.SECOND]
    second = [one for one in counted if one.kind is VerdictKind.SECOND]
    outcomes = {
        row[0]: (int(row[1]), int(row[2]))
        for row in connection.execute(
            select(submissions.c.outcome, func.count(), func.coalesce(func.sum(submissions.c.tokens), 0))
            .where(submissions.c.log_index.is_not(None))
            .group_by(submissions.c.outcome)
        )
    }
    revoked = sum(one.verdicts for one in second if one.outcome is not Outcome.ADMITTED)
    of_nodes = select(*(func.coalesce(func.sum(nodes.c[name]), 0) for name in ("admitted", "rejected", "tokens")))
    admitted, rejected, tokens = connection.execute(of_nodes).one()

    def rows(table: Table) -> int:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())

    def verdicts(outcome: Outcome) -> int:
        return sum(one.verdicts for one in first if one.outcome is outcome)

    entries = 1 + rows(policies) + rows(steps) + sum(one.verdicts for one in counted)
    found = [
        Sums("log entries, and what is recorded of them", size, entries),
        Sums("nodes' admitted groups", int(admitted), verdicts(Outcome.ADMITTED) - revoked),
        Sums(
            "nodes' rejected groups",
            int(rejected),
            sum(one.verdicts for one in counted if one.outcome is Outcome.REJECTED),
        ),
        Sums("nodes' tokens", int(tokens), tallies.admitted_tokens(counted)),
    ]
    for outcome in Outcome:
        count, of_tokens = outcomes.get(outcome.value, (0, 0))
        found.append(Sums(f"{outcome} submissions", count, verdicts(outcome)))
        derived = sum(one.tokens for one in first if one.outcome is outcome)
        found.append(Sums(f"tokens of {outcome} submissions", of_tokens, derived))
    return found


def is_waiting(state: str) -> bool:
    """Return whether a submission in `state` waits for a verdict."""
    return state in (SubmissionState.QUEUED, SubmissionState.VERIFYING)
