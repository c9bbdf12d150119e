"""The quick check at every start of a process that signs or appends; a part of a second for 100,000 submissions.

It compares the kept checkpoints with the stored tree, numbers that are counted in two tables, and the newest entries
with their rows. What it does not see, `check_state` does: a change of an older row that leaves every sum as it was, an
inner node that no kept root needs, blobs. The blobs that training needs are checked when they are read, and groups made
anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from coordinator.errors import StateDiffers, StorageFault
from coordinator.integrity.check import UNDERIVABLE, histories
from coordinator.integrity.derivation import Columns, Key, policy_columns, verdict_columns
from coordinator.integrity.differences import Difference, is_same, shown
from coordinator.run.home import Home
from coordinator.storage import derived_rows, log
from coordinator.storage.database import Connection
from node.protocol.merkle import leaf_hash
from node.protocol.messages import MAX_ENTRY_BYTES, BatchEntry, LogEntry, PolicyEntry, VerdictEntry
from shardcast.errors import Malformed
from shardcast.wire import decode

NEWEST: Final = 256
"""Entries whose rows are compared."""
_ENTRY: Any = LogEntry  # a union, which type checkers do not take for a type
_LATER: Final = frozenset({"state", "finished_at"})
"""Columns that depend on later entries."""


def check_start(home: Home, *states: Path) -> None:
    """Raise HistoryLost, StateDiffers, StorageFault or BadConfiguration unless this process may sign and append.

    `states` are the folders, besides the run's own, whose kept checkpoint the log has to extend.
    """
    with home.database.read() as connection:
        for history in histories(home, states):
            history.check(connection)
        found = list(_differences(home, connection))
    if found:
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise StateDiffers(f"stored state is not what the run's log says: {found[0].sentence}{others}")


def _differences(home: Home, connection: Connection) -> Iterator[Difference]:
    size = log.size(connection)
    for one in derived_rows.sums(connection, size=size):
        if one.stored != one.derived:
            yield Difference("sum of", one.what, "", str(one.stored), str(one.derived), can_repair=True)
    yield from _newest(home, connection, size)


def _newest(home: Home, connection: Connection, size: int) -> Iterator[Difference]:
    start = max(0, size - NEWEST)
    leaves = derived_rows.leaves_from(connection, start)
    nodes = derived_rows.tree_nodes(connection, 0, start, size)
    rows: dict[str, dict[Key, Columns]] = {"submissions": {}, "policies": {}, "groups": {}}
    for index, leaf in leaves:
        if nodes.get(index) != leaf_hash(leaf):
            tree = "that in the log's tree"
            yield Difference("log_entries", str(index), "leaf", "another hash", tree, can_repair=False)
        try:
            _expect(rows, index, decode(_ENTRY, leaf, max_bytes=MAX_ENTRY_BYTES))
        except Malformed as error:
            raise StorageFault(f"log entry {index} cannot be read by this release: {error}") from error
    for table, expected in rows.items():
        stored = derived_rows.rows_of(connection, table, list(expected)) if expected else {}
        for key, columns in expected.items():
            yield from _compared(home, table, key, stored.get(key), columns)


def _expect(rows: dict[str, dict[Key, Columns]], index: int, entry: LogEntry) -> None:
    """Note what one entry says of rows whatever came later."""
    match entry:
        case PolicyEntry():
            rows["policies"][entry.version,] = policy_columns(entry)
        case VerdictEntry() if not entry.recheck:
            columns = verdict_columns(index, entry)
            rows["submissions"][entry.submission,] = {name: columns[name] for name in columns if name not in _LATER}
        case VerdictEntry():
            rows["submissions"].setdefault((entry.submission,), {}).update(recheck=entry.outcome, recheck_index=index)
        case BatchEntry():
            rows["groups"] |= {(name,): {"step": entry.step} for name in entry.submissions}


def _compared(home: Home, table: str, key: Key, stored: Any, expected: Columns) -> Iterator[Difference]:
    if stored is None:
        yield Difference(table, shown(key), "", "nothing", "a row", can_repair=False)
        return
    for column, value in expected.items():
        if not is_same(table, column, stored[column], value, run_id=home.run_id, public_key=home.public_key):
            can_repair = (table, column) not in UNDERIVABLE
            yield Difference(table, shown(key), column, shown(stored[column]), shown(value), can_repair)
