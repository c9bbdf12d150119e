"""The whole check: every row that follows from the log, every node of its tree, every blob.

One transaction, of a snapshot or, to repair, of the whole database: stop the run's processes before that. A page of the
log and of a table is in memory at a time, besides what `LogFold` holds; blobs are read eight at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.errors import StorageFault
from coordinator.integrity.blobs import check_blobs
from coordinator.integrity.derivation import NEW_NODE, Columns, DerivedRow, Key, LogFold
from coordinator.integrity.differences import Difference, is_same, shown
from coordinator.integrity.tree import check_tree
from coordinator.run.history import KeptHistory
from coordinator.run.home import Home
from coordinator.storage import counters, derived_rows, locks
from coordinator.storage.database import Connection
from coordinator.storage.schema import SubmissionState
from node.protocol.checkpoints import Checkpoint
from node.protocol.messages import MAX_ENTRY_BYTES, LogEntry, RunEntry
from shardcast.errors import Malformed
from shardcast.wire import decode

_ENTRY: Any = LogEntry  # a union, which type checkers do not take for a type
UNDERIVABLE = frozenset({("policies", "manifest")})
"""Columns of which the log has only a digest."""


def check_state(
    home: Home,
    states: Sequence[Path],
    *,
    repair: bool = False,
    with_blobs: bool = True,
    report: Callable[[Difference], None],
) -> None:
    """Call `report` with each difference between stored state and the log; with `repair`, write what was derived.

    `states` are folders of verifiers or the trainer whose kept checkpoints the log must extend, too. All or none of the
    repairs are written. Raises StorageFault for a log that this release cannot read, BadConfiguration, and OSError.
    """
    kept = kept_checkpoints(home, states)
    transaction = home.database.write if repair else home.database.read
    with transaction() as connection:
        if repair:
            locks.exclusive(connection)
        _StateCheck(home, connection, repair=repair, report=report).run(kept, with_blobs=with_blobs)


def kept_checkpoints(home: Home, states: Iterable[Path]) -> dict[Path, Checkpoint]:
    """Return the kept checkpoints of the data folder and of `states`, by file; raises BadConfiguration."""
    kept = {one.path: one.load() for one in histories(home, states)}
    return {path: checkpoint for path, checkpoint in kept.items() if checkpoint is not None}


def histories(home: Home, states: Iterable[Path]) -> list[KeptHistory]:
    """Return the places of the kept checkpoints, the data folder's first."""
    of_run = KeptHistory(home.folder, run_id=home.run_id, signer=home.public_key)
    return [of_run, *(KeptHistory(state, run_id=home.run_id) for state in states)]


class _StateCheck:
    def __init__(
        self, home: Home, connection: Connection, *, repair: bool, report: Callable[[Difference], None]
    ) -> None:
        self._home, self._connection = home, connection
        self._run_id = home.run_id  # derived at each call
        self._repair, self._report = repair, report
        self._batches = defaultdict[str, list[DerivedRow]](list)

    def run(self, kept: Mapping[Path, Checkpoint], *, with_blobs: bool) -> None:
        if not check_tree(self._connection, kept, repair=self._repair, report=self._report):
            lost = "not compared: nothing confirms the log that they follow from"
            self._report(Difference("all other tables", "", "", lost, "unknown", can_repair=False))
            return
        self._check_counters()  # before any repair of the rows that they count
        fold = LogFold(run_id=self._run_id, spec=self._home.spec)
        self._follow(fold)
        for table, rows in fold.tables.items():
            self._compare_table(table, rows)
        self._check_unlogged(fold)
        if self._repair:
            counters.recount(self._connection)
        if with_blobs:
            check_blobs(self._home, self._connection, report=self._report)

    def _check_counters(self) -> None:
        for of, state, stored, counted in counters.wrong_counts(self._connection):
            self._differs("final_counts", (of, state), "number", stored, counted, can_repair=True)

    def _follow(self, fold: LogFold) -> None:
        start = 0
        while page := derived_rows.leaves_from(self._connection, start):
            for index, leaf in page:
                for expected in fold.follow(index, self._entry(index, leaf)):
                    self._expect(expected)
            start += len(page)
        for expected in fold.end():
            self._expect(expected)
        for table in list(self._batches):
            self._flush(table)

    def _entry(self, index: int, leaf: bytes) -> LogEntry:
        try:
            entry: LogEntry = decode(_ENTRY, leaf, max_bytes=MAX_ENTRY_BYTES)
        except Malformed as error:
            raise StorageFault(f"log entry {index} cannot be read by this release: {error}") from error
        if isinstance(entry, RunEntry) and entry.spec_digest != self._home.spec.digest:
            self._differs("facts", ("spec",), "value", self._home.spec.digest, entry.spec_digest, can_repair=False)
        return entry

    def _expect(self, expected: DerivedRow) -> None:
        batch = self._batches[expected.table]
        batch.append(expected)
        if len(batch) >= derived_rows.PAGE_ROWS:
            self._flush(expected.table)

    def _flush(self, table: str) -> None:
        batch = self._batches.pop(table)
        stored = derived_rows.rows_of(self._connection, table, list({one.key for one in batch}))
        for one in batch:
            self._compare(table, one.key, stored.get(one.key), one.columns)

    def _compare(self, table: str, key: Key, stored: Mapping[str, Any] | None, derived: Columns | None) -> None:
        if stored is None or derived is None:
            if (stored is None) != (derived is None):
                self._compare_presence(table, key, derived)
            return
        changed = {
            column: value
            for column, value in derived.items()
            if not is_same(table, column, stored[column], value, run_id=self._run_id, public_key=self._home.public_key)
        }
        for column, value in changed.items():
            self._differs(table, key, column, stored[column], value, can_repair=(table, column) not in UNDERIVABLE)
        wanted = {column: value for column, value in changed.items() if (table, column) not in UNDERIVABLE}
        if wanted and self._repair:
            derived_rows.write(self._connection, table, key, wanted)

    def _compare_presence(self, table: str, key: Key, derived: Columns | None) -> None:
        """Report a row that is there and should not be, or the reverse; only counters and means can be made anew."""
        if derived is None:
            self._differs(table, key, "", "a row", None, can_repair=True)
            if self._repair:
                derived_rows.remove(self._connection, table, key)
            return
        can_add = table in ("verdict_tallies", "problem_means", "deliveries", "rejections")
        self._differs(table, key, "", None, "a row", can_repair=can_add)
        if can_add and self._repair:
            derived_rows.add(self._connection, table, key, derived)

    def _compare_table(self, table: str, derived: dict[Key, Columns]) -> None:
        seen = set()
        for key, stored in derived_rows.all_rows(self._connection, table):
            seen.add(key)
            self._compare(table, key, stored, derived.get(key, dict(NEW_NODE) if table == "nodes" else None))
        for key in derived.keys() - seen:
            self._compare_presence(table, key, derived[key])

    def _check_unlogged(self, fold: LogFold) -> None:
        """Rows that claim what no entry of the log says."""
        for key in derived_rows.unlogged_verdicts(self._connection, logged=fold.first_verdicts):
            self._differs("submissions", key, "", "a verdict", None, can_repair=True)
            if self._repair:
                unjudged = derived_rows.UNJUDGED | {"state": SubmissionState.QUEUED}
                derived_rows.write(self._connection, "submissions", key, unjudged)
        for key in derived_rows.unlogged_groups(self._connection):
            self._compare_presence("groups", key, None)
        for key, state, derived in derived_rows.unlogged_slots(self._connection, batch=self._home.spec.batch):
            self._differs("slots", key, "state", state, derived, can_repair=True)
            if self._repair:
                derived_rows.write(self._connection, "slots", key, {"state": derived})

    def _differs(self, table: str, key: Key, column: str, stored: object, derived: object, *, can_repair: bool) -> None:
        self._report(Difference(table, shown(key), column, shown(stored), shown(derived), can_repair))
