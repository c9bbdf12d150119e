"""Running counts of what only grows: leases that ended, slots that were opened and in a final state, each node's
rejections by reason.

They are updated in the transaction of what they count, so that a page or a scrape reads a few rows instead of all that
ever was. What still changes (leases that run, slots in flight) is bounded by the run's capacity and counted when asked,
but not for a lease: thousands of workers have as many slots in flight, and each asks for the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    CompoundSelect,
    Connection,
    Select,
    Table,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    text,
    union_all,
)
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.storage.prepared import Prepared
from coordinator.storage.schema import LeaseState, SlotState, final_counts, leases, rejections, slots
from node.protocol.reasons import Reason

ENDED: Final = (LeaseState.RETURNED, LeaseState.EXPIRED, LeaseState.OVERTAKEN)
SETTLED: Final = (SlotState.USED, SlotState.STALE, SlotState.SET_ASIDE)
_OPENED: Final = "opened"
"""Counts all slots, beside those in the states SETTLED."""


def _counting(table: Table, states: Sequence[LeaseState | SlotState]) -> Select[Any]:
    counted = select(literal(table.name).label("of"), table.c.state, func.count().label("number"))
    return counted.where(table.c.state.in_(states)).group_by(table.c.state)


_ALL_SLOTS = select(literal(slots.name), literal(_OPENED), func.count()).select_from(slots)
_COUNTED: Final[Sequence[tuple[Table, Select[Any] | CompoundSelect[Any]]]] = (
    (leases, _counting(leases, ENDED)),
    (slots, union_all(_counting(slots, SETTLED), _ALL_SLOTS)),
)
_INSERT: Final = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}

FinalState = LeaseState | SlotState


def adding_to(table: Table) -> dict[str, Any]:
    """Return, by dialect, the statement that adds a row's counters to those that are there: all columns but the key."""
    return {dialect: _adding(insert_into(table), table) for dialect, insert_into in _INSERT.items()}


def _adding(added: Any, table: Table) -> Any:
    sums = {one.name: one + added.excluded[one.name] for one in table.columns if not one.primary_key}
    return added.on_conflict_do_update(index_elements=list(table.primary_key), set_=sums)


_ADD_FINAL: Final = Prepared(
    text(
        'INSERT INTO final_counts ("of", state, number) VALUES (:of, :state, :number) '
        'ON CONFLICT ("of", state) DO UPDATE SET number = final_counts.number + excluded.number'
    )
)
_ADD_REJECTION: Final = adding_to(rejections)

_NUMBER = final_counts.c.number
_SIGNED = case((final_counts.c.state == _OPENED, _NUMBER), else_=-_NUMBER)
UNSETTLED: Final = (
    select(cast(func.coalesce(func.sum(_SIGNED), 0), BigInteger))
    .where(final_counts.c.of == slots.name)
    .scalar_subquery()
)
"""How many slots there are in no state of SETTLED, from a few rows."""


def _table_of(state: FinalState) -> str:
    return leases.name if isinstance(state, LeaseState) else slots.name


def count_final(connection: Connection, state: FinalState, number: int = 1) -> None:
    """Count `number` leases or slots that have come into a state that they do not leave."""
    if number:
        _ADD_FINAL.send(connection, {"of": _table_of(state), "state": state.value, "number": number})


def count_opened(connection: Connection, number: int) -> None:
    """Count `number` new slots."""
    if number:
        _ADD_FINAL.send(connection, {"of": slots.name, "state": _OPENED, "number": number})


def count_rejection(connection: Connection, node: str, reason: Reason | None) -> None:
    """Count a first verdict that rejected a submission of `node`."""
    values = {"node": node, "reason": reason.value if reason else "", "rejected": 1}
    connection.execute(_ADD_REJECTION[connection.dialect.name], values)


def settled_slots(connection: Connection) -> Counter[str]:
    """Return how many slots are in each of the states SETTLED."""
    stored = _stored(connection, slots)
    return Counter({state.value: stored.get(state, 0) for state in SETTLED})


def ended_leases(connection: Connection) -> dict[LeaseState, int]:
    """Return how many leases ended without a submission, by how: each of ENDED."""
    stored = _stored(connection, leases)
    return {state: stored.get(state, 0) for state in ENDED}


def _stored(connection: Connection, table: Table) -> dict[str, int]:
    query = select(final_counts.c.state, final_counts.c.number).where(final_counts.c.of == table.name)
    return {state: int(number) for state, number in connection.execute(query)}


def rejections_of(connection: Connection, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return how often each of these nodes was rejected by a first verdict, by reason."""
    by_node: dict[str, dict[str, int]] = {}
    for row in connection.execute(select(rejections).where(rejections.c.node.in_(names))):
        by_node.setdefault(row.node, {})[row.reason] = row.rejected
    return by_node


def wrong_counts(connection: Connection) -> list[tuple[str, str, int, int]]:
    """Count all slots, and all rows in final states; return (table, state, stored, counted) where the stored count is
    another.
    """
    found = []
    for table, counting in _COUNTED:
        stored = _stored(connection, table)
        counted = {row.state: int(row.number) for row in connection.execute(counting)}
        numbers = ((state, stored.get(state, 0), counted.get(state, 0)) for state in sorted({*stored, *counted}))
        found += [(table.name, *each) for each in numbers if each[1] != each[2]]
    return found


def recount(connection: Connection) -> None:
    """Count all slots and the rows in final states anew."""
    connection.execute(delete(final_counts))
    for _, counting in _COUNTED:
        connection.execute(insert(final_counts).from_select(["of", "state", "number"], counting))
