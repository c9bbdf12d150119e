"""The past that `benchmarks.load --history` writes is one that a run could have had, and nothing reads all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from sqlalchemy import event

from benchmarks.loading.history import NODES, STEPS, fill
from coordinator.run.home import Home, create_home
from coordinator.storage import counters, derived_rows, log, standing
from coordinator.storage.rollouts import judged
from coordinator.storage.submissions import logged_verdict
from node.protocol.admission import Outcome

PAST = 24_000
"""Submissions, of which one in twelve was rejected, and one in ten had a lease before that lapsed."""

INSTRUCTIONS_EACH = 100
"""SQLite counts no fewer. A row takes 3 where an index has what is looked for, and else some ten."""


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A run whose only node did all of it, and has 2 policies more."""
    home = create_home(
        tmp_path_factory.mktemp("run"), public_key=PUBLIC_KEY, spec=spec_of(groups_per_step=40, steps=2 * STEPS)
    )
    fill(home, PAST, now=1000.0)
    actors = Actors(home)
    actors.register("old")
    with home.database.write() as connection:
        connection.exec_driver_sql("UPDATE submissions SET node = ?", (who("old"),))
    actors.publish(STEPS)
    yield home
    home.database.close()


@contextmanager
def instructions(home: Home) -> Iterator[Counter[str]]:
    """The instructions of SQLite's virtual machine that each statement takes at most, by its text."""
    counted, running = Counter[str](), list[Any](["", 0])

    def begun(statement: str) -> None:
        running[:] = statement, 0
        counted[statement] += 0

    def went_on() -> None:
        running[1] += INSTRUCTIONS_EACH
        counted[running[0]] = max(counted[running[0]], running[1])

    def watch(raw: Any, _record: Any) -> None:
        raw.set_trace_callback(begun)
        raw.set_progress_handler(went_on, INSTRUCTIONS_EACH)

    for engine in home.database._engines:
        engine.dispose()
        event.listen(engine, "connect", watch)
    yield counted
    for engine in home.database._engines:
        event.remove(engine, "connect", watch)
        engine.dispose()


def test_every_count_of_a_written_past_agrees_with_its_rows_and_its_log(tmp_path: Path) -> None:
    """Else the figures would be of a database that no run leaves behind."""
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(steps=2 * STEPS))
    fill(home, 1500, now=10.0**9)
    with home.database.read() as connection:
        assert counters.wrong_counts(connection) == []
        assert all(one.stored == one.derived for one in derived_rows.sums(connection, size=log.size(connection)))
        name = (
            connection.exec_driver_sql("SELECT submission FROM submissions ORDER BY log_index DESC").scalars().first()
        )
        assert logged_verdict(connection, name)
    home.database.close()


def test_work_and_steps_read_nothing_that_grows_with_the_past(past: Home) -> None:
    """Every step looked at all leases that ever lapsed, under the lock for which everybody waits, and every lease of an
    open slot at all that its node was ever rejected for.
    """
    actors = Actors(past)
    with instructions(past) as counted:
        (lease,) = actors.lease("old", held=(STEPS,))
        actors.give_back("old", lease)
        actors.now += 10.0
        for _ in range(40):
            actors.work("old")
        assert actors.assign() == STEPS
    assert len(counted) > 50
    statement, most = counted.most_common(1)[0]
    assert most < PAST // 4, statement


def test_the_end_of_a_run_looks_at_each_nodes_newest_groups_alone(past: Home) -> None:
    """The last step's batch looked for groups without credit among all, and everybody waits for it."""
    with past.database.write() as connection:
        rows = connection.exec_driver_sql(
            "SELECT submission FROM submissions WHERE outcome = 'admitted' ORDER BY log_index"
        )
        names = list(rows.scalars())
        newest, credited = names[-30:], names[100]
        for name in (*newest, credited):
            connection.exec_driver_sql("UPDATE submissions SET spot = 0 WHERE submission = ?", (name,))
    with instructions(past) as counted, past.database.write() as connection:
        standing.settle(connection, spec=past.spec, now=1000.0)
    with past.database.read() as connection:
        due = connection.exec_driver_sql("SELECT submission FROM submissions WHERE recheck = 'due'").scalars()
        assert sorted(due) == sorted(newest)
    statement, most = counted.most_common(1)[0]
    assert most < 50 * NODES < 3 * PAST, statement


def test_an_export_reads_each_submission_once(past: Home) -> None:
    """Each page sorted all of them: of a million, that was 20 s for every 5,000."""
    with instructions(past) as counted:
        found = [one.log_index for one in judged(past.database, (Outcome.ADMITTED,))]
    assert len(found) >= PAST * 11 // 12
    assert found == sorted(found)
    statement, most = counted.most_common(1)[0]
    assert most < 5 * PAST, statement
