"""What several processes must not do at once, where the database lets them: PostgreSQL.

SQLite has one writer at a time, and nothing here does anything. On PostgreSQL a transaction begins with the one of
these functions that says what it is for, and holds its advisory locks to its end, commit included:

- assigning a batch decides what is stale, so that no slot may change hands meanwhile: alone among all;
- leasing counts slots in flight and numbers new ones: one at a time;
- deciding appends to the log, whose order is that of the verdicts: one at a time;
- submitting changes only what is the node's own: any number, while no batch is assigned.

What two of a kind may read and change besides, they lock by row. The locks are always taken in one order.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, TextClause, text

SPACE: Final = 0x76657269  # "veri"
_BATCHES, _WORK, _LOG, LEADER = 1, 2, 3, 4


def _shared(lock: int) -> str:
    return f"pg_advisory_xact_lock_shared({SPACE}, {lock})"


def _alone(lock: int) -> str:
    return f"pg_advisory_xact_lock({SPACE}, {lock})"


_SUBMITTING: Final = text(f"SELECT {_shared(_BATCHES)}")
_LEASING: Final = text(f"SELECT {_shared(_BATCHES)}, {_alone(_WORK)}")
_DECIDING: Final = text(f"SELECT {_shared(_BATCHES)}, {_alone(_LOG)}")
_ALONE: Final = text(f"SELECT {_alone(_BATCHES)}, {_alone(_WORK)}, {_alone(_LOG)}")


def submitting(connection: Connection) -> None:
    """Before work of a node's own lease is taken."""
    _hold(connection, _SUBMITTING)


def leasing(connection: Connection) -> None:
    """Before slots are given out, or who takes part changes."""
    _hold(connection, _LEASING)


def deciding(connection: Connection) -> None:
    """Before anything is appended to the log, or a descriptor is issued."""
    _hold(connection, _DECIDING)


def alone(connection: Connection) -> None:
    """Before a step gets its batch, or the schema changes."""
    _hold(connection, _ALONE)


def _hold(connection: Connection, statement: TextClause) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(statement)
