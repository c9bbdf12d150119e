"""How many slots nodes that are not proven have in flight, and may have, in all and at one place.

Together they hold at most half of all, so that free keys cannot crowd out others, and those of one place at most
PLACE_SHARE times what they leave free for others.

A count reads a row for each slot in flight. With thousands of workers in a run, all of them new at first, and a count
for each lease, leases would take most of a coordinator's time. So a count of many rows, of all places at once, is kept
for a multiple of what it took, and each slot that is leased meanwhile is added to it: until it is made again it is too
high by what was handed in or back, and too low only by the slots of nodes that were proven and are not any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, and_, bindparam, delete, func, insert, select, text, update
from sqlalchemy.sql import union_all

from coordinator.storage.prepared import Prepared, Rows, insert_into
from coordinator.storage.progress import Progress, progress
from coordinator.storage.schema import leases, newcomers, nodes, submissions
from coordinator.storage.slot_supply import capacity_of
from coordinator.storage.standing import is_unproven
from coordinator.storage.work_statements import IS_ACTIVE, IS_WITHOUT_VERDICT
from node.protocol.run import RunSpec

PLACE_SHARE: Final = 3
"""Keys are free and addresses nearly so: n places that take all they get hold 3 / (1 + 3 n) of the newcomers' slots
each, and leave some for the next one (dynamic thresholds; Choudhury and Hahne, 1998)."""

FEW: Final = 64
"""Slots in flight that are counted each time."""

SECONDS_EACH: Final = 50e-6
"""For how long a count is kept, for each row that it read: some ten times what it takes, 0.5 s with 10,000 workers."""

MOST_SECONDS: Final = 2.0
_ALL: Final = "all"
"""No place, which are networks."""

_IN_FLIGHT = union_all(
    select(leases.c.node).where(IS_ACTIVE), select(submissions.c.node).where(and_(*IS_WITHOUT_VERDICT))
).subquery()
_OF_NODE = _IN_FLIGHT.c.node == nodes.c.node
_COUNT = Prepared(
    select(
        func.count(),
        func.count().filter(is_unproven()),
        func.count().filter(is_unproven(), nodes.c.place == bindparam("of_place")),
    ).where(_OF_NODE)
)
_DROP = Prepared(delete(newcomers))
_KEEP_PLACES = Prepared(
    insert(newcomers).from_select(
        ["place", "taken", "rows", "counted_at"],
        select(nodes.c.place, func.count(), bindparam("of_rows"), bindparam("now"))
        .where(_OF_NODE, is_unproven(), nodes.c.place != "")
        .group_by(nodes.c.place),
    )
)
_KEEP = Prepared(insert_into(newcomers, "place", "taken", "rows", "counted_at"))
_KEPT = Prepared(
    select(newcomers.c.place, newcomers.c.taken, newcomers.c.rows, newcomers.c.counted_at).where(
        newcomers.c.place.in_([_ALL, bindparam("of_place")])
    )
)
_ADD = Prepared(update(newcomers).where(newcomers.c.place == _ALL).values(taken=newcomers.c.taken + bindparam("more")))
_ADD_AT = Prepared(
    text(
        "INSERT INTO newcomers (place, taken, rows, counted_at) "
        "SELECT CAST(:of_place AS TEXT), CAST(:more AS INTEGER), 0, CAST(:now AS DOUBLE PRECISION) "
        "FROM newcomers WHERE place = 'all' "
        "ON CONFLICT (place) DO UPDATE SET taken = newcomers.taken + excluded.taken"
    )
)
"""Of a place, where a count is kept."""


def capacity(connection: Connection, spec: RunSpec) -> int:
    """Return how many slots they may have in flight together, at least 1."""
    return _share(progress(connection), spec=spec)


def free_slots(
    connection: Connection, at: Progress, kept: Callable[[], Rows], *, spec: RunSpec, place: str, now: float
) -> int:
    """Return how many more slots those of a place may take, whose kept counts were asked for.

    Called in the transaction of a lease, which excludes others.
    """
    taken, there = _taken_slots(connection, place, kept, now=now)
    free = _share(at, spec=spec) - taken
    return min(free, PLACE_SHARE * free - there) if place and free > 0 else free


def ask_for_kept(connection: Connection, place: str) -> Callable[[], Rows]:
    """Ask for the counts that are kept; PostgreSQL is not waited for."""
    return _KEPT.ask(connection, {"of_place": place})


def _share(at: Progress, *, spec: RunSpec) -> int:
    return max(1, capacity_of(at, spec=spec) // 2)


def _taken_slots(connection: Connection, place: str, kept_rows: Callable[[], Rows], *, now: float) -> tuple[int, int]:
    """Return how many slots they hold or have submitted without a verdict, in all and at `place`."""
    kept = {row[0]: row[1:] for row in kept_rows()}
    if _ALL in kept:
        taken, rows, counted_at = kept[_ALL]
        if 0 <= now - counted_at < min(SECONDS_EACH * rows, MOST_SECONDS):
            return int(taken), int(kept[place][0]) if place in kept else 0
        _DROP.send(connection)
    ((rows, taken, there),) = _COUNT.rows(connection, {"of_place": place})
    if rows > FEW:
        _KEEP_PLACES.send(connection, {"of_rows": rows, "now": now})
        _KEEP.send(connection, {"place": _ALL, "taken": taken, "rows": rows, "counted_at": now})
    return int(taken), int(there)


def note_leased(connection: Connection, place: str, slots: int, *, now: float) -> None:
    """Add slots that were leased to a node that is not proven to the count, if one is kept."""
    _ADD.send(connection, {"more": slots})
    if place:
        _ADD_AT.send(connection, {"of_place": place, "more": slots, "now": now})
