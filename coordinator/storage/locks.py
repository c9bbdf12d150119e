"""Advisory locks by purpose, on PostgreSQL; no-ops on SQLite, which has one writer at a time.

A transaction begins with the function for its purpose and holds the locks to its end, commit included:

- `exclusive`: assigning a batch decides what is stale, so no slot may change state meanwhile;
- `leasing`: limits how many slots are in flight and numbers new ones, one transaction at a time;
- `deciding`: appends to the log in the order of the verdicts, one transaction at a time;
- `submitting`: changes only the node's own rows; any number at once, except during `exclusive`.

Other shared rows are locked individually. Locks are always taken in one order, but for the rows of jobs that share a
transaction: they wait for a row at most ROW_LOCK_MS, see `together`.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

from coordinator.storage.prepared import Prepared

SPACE: Final = 0x76657269  # "veri"
_BATCHES, _WORK, _LOG, LEADER = 1, 2, 3, 4

ROW_LOCK_MS: Final = 10
"""Less than the server waits before it looks for deadlocks, one of whose transactions it would end."""


def _shared(lock: int) -> str:
    return f"pg_advisory_xact_lock_shared({SPACE}, {lock})"


def _exclusive(lock: int) -> str:
    return f"pg_advisory_xact_lock({SPACE}, {lock})"


_SUBMITTING: Final = Prepared(text(f"SELECT {_shared(_BATCHES)}"))
_LEASING: Final = Prepared(text(f"SELECT {_shared(_BATCHES)}, {_exclusive(_WORK)}"))
_DECIDING: Final = Prepared(text(f"SELECT {_shared(_BATCHES)}, {_exclusive(_LOG)}"))
_BRIEFLY: Final = f"set_config('lock_timeout', '{ROW_LOCK_MS}ms', true)"
_TOGETHER: Final = {
    False: Prepared(text(f"SELECT {_shared(_BATCHES)}, {_BRIEFLY}")),
    True: Prepared(text(f"SELECT {_shared(_BATCHES)}, {_exclusive(_WORK)}, {_BRIEFLY}")),
}
_HELD: Final = "swarmproof_locks"
"""Where a connection's `info` has a transaction and the statements whose locks it holds until its end."""
_EXCLUSIVE: Final = Prepared(text(f"SELECT {_exclusive(_BATCHES)}, {_exclusive(_WORK)}, {_exclusive(_LOG)}"))


def submitting(connection: Connection) -> None:
    """Lock before changing a node's own lease."""
    _acquire(connection, _SUBMITTING)


def leasing(connection: Connection) -> None:
    """Lock before leasing slots, or changing nodes, relays or facts."""
    _acquire(connection, _LEASING)


def deciding(connection: Connection) -> None:
    """Lock before appending to the log or issuing a descriptor; once for a transaction's many verdicts.

    Not for jobs that share a transaction: one that is undone gives its locks back.
    """
    _acquire(connection, _DECIDING)
    _hold(connection, _DECIDING)


def exclusive(connection: Connection) -> None:
    """Lock before assigning a step's batch or changing the schema."""
    _acquire(connection, _EXCLUSIVE)


def together(connection: Connection, *, leasing: bool) -> None:
    """Lock before several jobs of a kind that execute in one transaction, in which each may wait for others' rows
    only briefly: whoever has those may wait for rows of a job before it.

    They do not ask the server for these locks again.
    """
    if connection.dialect.name == "postgresql":
        _TOGETHER[leasing].run(connection)  # not sent: the jobs read the time once they hold it
        _hold(connection, *((_SUBMITTING, _LEASING) if leasing else (_SUBMITTING,)))


def _acquire(connection: Connection, statement: Prepared) -> None:
    if connection.dialect.name != "postgresql":
        return
    transaction, held = connection.info.get(_HELD, (None, ()))
    if transaction is not connection.get_transaction() or statement not in held:
        statement.run(connection)


def _hold(connection: Connection, *statements: Prepared) -> None:
    connection.info[_HELD] = connection.get_transaction(), statements
