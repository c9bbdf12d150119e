"""How many slots nodes that are not proven have in flight, in all and at one place.

A count reads a row for each of them. With thousands of workers in a run, all of them new at first, and a count for each
lease, leases would take most of a coordinator's time. So a count of many rows is kept for a multiple of what it took,
and each slot that is leased meanwhile is added to it: until it is counted again it is too high by what was handed in or
back, and too low only by the slots of nodes that were proven and are not any more.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, and_, bindparam, delete, func, select, update

from coordinator.storage.prepared import Prepared, insert_into
from coordinator.storage.schema import leases, newcomers, nodes, submissions
from coordinator.storage.standing import is_unproven
from coordinator.storage.work_statements import IS_ACTIVE, IS_WITHOUT_VERDICT

FEW: Final = 64
"""Rows that are counted each time; a test of the rules sees no count that was kept."""

SECONDS_EACH: Final = 50e-6
"""For how long a count is kept, for each row that it read: fifty times what it takes, 0.5 s with 10,000 workers."""

FORGOTTEN_AFTER_SECONDS: Final = 60.0

_EVERYWHERE: Final = ""

_HELD, _UNJUDGED = (
    select(func.count().label("rows"), func.count().filter(is_unproven()).label("taken"))
    .where(condition, table.c.node == nodes.c.node)
    .subquery()
    for table, condition in ((leases, IS_ACTIVE), (submissions, and_(*IS_WITHOUT_VERDICT)))
)
_COUNT = Prepared(select(_HELD.c.taken + _UNJUDGED.c.taken, _HELD.c.rows + _UNJUDGED.c.rows))

_HELD_BY_NODE, _UNJUDGED_OF_NODE = (
    select(func.count()).where(condition, table.c.node == nodes.c.node).correlate(nodes).scalar_subquery()
    for table, condition in ((leases, IS_ACTIVE), (submissions, and_(*IS_WITHOUT_VERDICT)))
)
_COUNT_THERE = Prepared(  # node by node, or all that is in flight anywhere would be read
    select(func.coalesce(func.sum(_HELD_BY_NODE + _UNJUDGED_OF_NODE), 0), func.count()).where(
        nodes.c.place == bindparam("of_place"), is_unproven()
    )
)
_KEPT = Prepared(
    select(newcomers.c.taken, newcomers.c.rows, newcomers.c.counted_at).where(
        newcomers.c.place == bindparam("of_place")
    )
)
_KEEP = Prepared(insert_into(newcomers, "place", "taken", "rows", "counted_at"))
_DROP = Prepared(delete(newcomers).where(newcomers.c.place == bindparam("of_place")))
_FORGET = Prepared(delete(newcomers).where(newcomers.c.counted_at < bindparam("before")))
_ADD = Prepared(
    update(newcomers)
    .where(newcomers.c.place.in_([_EVERYWHERE, bindparam("of_place")]))
    .values(taken=newcomers.c.taken + bindparam("more"))
)


def taken_slots(connection: Connection, place: str | None = None, *, now: float) -> int:
    """Return how many slots nodes that are not proven hold or have submitted without a verdict, in all or at `place`.

    Called in the transaction of a lease.
    """
    where = {"of_place": _EVERYWHERE if place is None else place}
    kept = _KEPT.first(connection, where)
    if kept is not None:
        taken, rows, counted_at = kept
        if 0 <= now - counted_at < SECONDS_EACH * rows:
            return int(taken)
    ((taken, rows),) = _COUNT.rows(connection) if place is None else _COUNT_THERE.rows(connection, where)
    if kept is not None:
        _DROP.run(connection, where)
    if rows > FEW:
        _KEEP.run(connection, {"place": where["of_place"], "taken": taken, "rows": rows, "counted_at": now})
        _FORGET.run(connection, {"before": now - FORGOTTEN_AFTER_SECONDS})
    return int(taken)


def note_leased(connection: Connection, place: str, slots: int) -> None:
    """Add slots leased to a node that is not proven to the counts that are kept."""
    _ADD.run(connection, {"of_place": place, "more": slots})
