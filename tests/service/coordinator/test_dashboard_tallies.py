"""The running counts behind status, metrics and pages: the same as a count of everything, in any order of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from actors import PUBLIC_KEY, Actors, spec_of
from sqlalchemy import Connection, func, insert, select
from storm import Storm

from coordinator.run.home import Home, create_home
from coordinator.storage import counters, tallies
from coordinator.storage.database import upgrade
from coordinator.storage.schema import (
    SlotState,
    final_counts,
    leases,
    newcomers,
    nodes,
    profiles,
    rejections,
    slots,
    steps,
    submissions,
    verdict_tallies,
)
from coordinator.storage.steps import finished_steps
from coordinator.storage.tallies import DAY, HOUR, MINUTE, VerdictKind
from coordinator.storage.totals import partly_measured, reason_totals, slot_counts
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason
from node.protocol.run import StandingSpec

RULES = StandingSpec(probation=2, full_rate_floor=0.25, vesting=2, ban_after=1000)
UNSEEN = 0.999
ADMITTED = Verdict(outcome=Outcome.ADMITTED, tokens=1)


@pytest.fixture
def home(tmp_path: Path, database_url: str | None) -> Iterator[Home]:
    spec = spec_of(standing=RULES, groups_per_step=2, steps=100)
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec, database_url=database_url)
    yield home
    home.database.close()


def counted(connection: Connection) -> tuple[Counter[tuple[str, str | None]], dict[str, int], dict[str, int], int]:
    """All of it from the rows themselves, as earlier releases did."""
    outcome = submissions.c.outcome
    query = select(outcome, submissions.c.reason, func.count()).where(outcome.is_not(None))
    rows = connection.execute(query.group_by(outcome, submissions.c.reason))
    reasons = Counter({(row[0], row[1]): row[2] for row in rows})
    second = func.coalesce(submissions.c.recheck, "pending")
    partly = select(second, func.count()).where(submissions.c.spot.is_not(None), outcome == Outcome.ADMITTED)
    states = select(slots.c.state, func.count()).group_by(slots.c.state)
    found = dict(map(tuple, connection.execute(states)))
    tokens = connection.execute(select(func.coalesce(func.sum(nodes.c.tokens), 0))).scalar_one()
    return (
        reasons,
        dict(map(tuple, connection.execute(partly.group_by(second)))),
        {state.value: found.get(state.value, 0) for state in SlotState},
        int(tokens),
    )


def rejections_in_rows(connection: Connection) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    rejected = select(submissions.c.node, submissions.c.reason, func.count()).where(submissions.c.outcome == "rejected")
    for node, reason, count in connection.execute(rejected.group_by(submissions.c.node, submissions.c.reason)):
        found.setdefault(node, {})[reason] = count
    return found


def rejections_of_all(connection: Connection) -> dict[str, dict[str, int]]:
    return counters.rejections_of(connection, connection.execute(select(nodes.c.node)).scalars().all())


def assert_same(home: Home) -> None:
    with home.database.read() as connection:
        assert counters.wrong_counts(connection) == []
        assert rejections_of_all(connection) == rejections_in_rows(connection)
        ended = select(func.count()).where(leases.c.state.in_(counters.ENDED))
        assert sum(counters.ended_leases(connection).values()) == connection.execute(ended).scalar_one()
        reasons, partly, states, tokens = counted(connection)
        assert Counter({(outcome, reason): count for outcome, reason, count in reason_totals(connection)}) == reasons
        assert partly_measured(connection) == partly
        assert slot_counts(connection) == states
        assert tallies.admitted_tokens(tallies.whole_run(connection)) == tokens
        done = select(func.count()).where(steps.c.finished_at.is_not(None))
        assert finished_steps(connection) == connection.execute(done).scalar_one()


def test_counts_are_those_of_the_rows_through_steps_spot_checks_and_second_verdicts(home: Home) -> None:
    actors = Actors(home)
    actors.register("good", "bad", admitted=0)
    actors.publish(0)
    assert_same(home)
    version = 0
    for number in range(30):
        node = "bad" if number % 7 == 3 else "good"
        outcome = Outcome.REJECTED if node == "bad" and number % 2 else Outcome.ADMITTED
        actors.work(node, outcome, draw=UNSEEN if number % 3 else 0.0)
        while (claimed := actors.claim()) is not None:
            actors.decide(claimed, Outcome.REJECTED if number % 5 == 0 else Outcome.ADMITTED)
        assert_same(home)
        if actors.assign() is not None:
            version += 1
            actors.publish(version)
            assert_same(home)
    assert version > 5


@pytest.mark.parametrize("seed", range(2))
def test_counts_are_those_of_the_rows_in_any_order_of_events(home: Home, seed: int) -> None:
    storm = Storm(Actors(home), seed)
    for number in range(150):
        storm.step()
        if number % 10 == 9:
            assert_same(home)


def test_a_group_that_is_taken_back_is_no_longer_anybodys_tokens(home: Home) -> None:
    actors = Actors(home)
    actors.register("node", admitted=0)
    actors.publish(0)
    for _ in range(4):
        actors.work("node")
    actors.work("node", draw=UNSEEN)
    actors.work("node", Outcome.REJECTED)
    again = actors.claim()
    assert again is not None
    assert again.recheck
    actors.decide(again, Outcome.REJECTED)
    assert_same(home)
    with home.database.read() as connection:
        assert tallies.admitted_tokens(tallies.whole_run(connection)) == 20  # of 5 each: four in full, one taken back
        assert partly_measured(connection) == {"rejected": 1}


def test_each_width_counts_each_verdict_once_and_waits_are_summed(home: Home) -> None:
    rejected = Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_TOKEN, tokens=7)
    with home.database.write() as connection:
        for at, waited in ((59.9, 2.0), (60.0, 4.0), (3600.0, -9.0), (86_400.0, 1.0)):
            tallies.count_verdict(connection, VerdictKind.FULL, rejected, waited_seconds=waited, now=at)
    with home.database.read() as connection:
        (whole,) = tallies.whole_run(connection)
        assert (whole.verdicts, whole.tokens, whole.wait_seconds, whole.longest_wait) == (4, 28, 7.0, 4.0)
        starts = {width: [one.start for one in tallies.since(connection, width=width, start=0)] for width in (60, 3600)}
        assert starts == {MINUTE: [0, 60, 3600, 86_400], HOUR: [0, 3600, 86_400]}
        assert [one.verdicts for one in tallies.since(connection, width=DAY, start=0)] == [3, 1]
        assert [one.start for one in tallies.since(connection, width=MINUTE, start=61)] == [3600, 86_400]


def test_tokens_of_a_long_run_do_not_overflow(home: Home) -> None:
    with home.database.write() as connection:
        row = {"width": 0, "start": 0, "kind": "full", "outcome": "admitted", "reason": ""}
        totals = {"verdicts": 2**40, "tokens": 2**50, "wait_seconds": 0.0, "longest_wait": 0.0}
        connection.execute(insert(verdict_tallies).values(**row, **totals))
        tallies.count_verdict(connection, VerdictKind.FULL, ADMITTED, waited_seconds=0.0, now=1.0)
    with home.database.read() as connection:
        assert tallies.admitted_tokens(tallies.whole_run(connection)) == 2**50 + 1


def test_a_rolled_back_verdict_is_not_counted(home: Home) -> None:
    with pytest.raises(RuntimeError), home.database.write() as connection:
        tallies.count_verdict(connection, VerdictKind.FULL, ADMITTED, waited_seconds=0.0, now=1.0)
        raise RuntimeError
    with home.database.read() as connection:
        assert tallies.whole_run(connection) == []


def test_a_database_of_before_the_counters_is_counted_when_it_is_migrated(home: Home) -> None:
    """Else all that it had would be missing from the pages for good."""
    actors = Actors(home)
    actors.register("good", "bad", "late")
    actors.publish(0)
    actors.work("bad", Outcome.REJECTED)
    actors.lease("late", held=(0,))
    actors.now += 100  # so that it lapses
    for _ in range(3):
        actors.work("good")
    assert actors.assign() == 0
    with home.database.write() as connection:
        assert connection.execute(select(func.count()).select_from(final_counts)).scalar_one() > 1
        final_counts.drop(connection)
        rejections.drop(connection)
        connection.exec_driver_sql("ALTER TABLE submissions DROP COLUMN envelope")
        connection.exec_driver_sql("ALTER TABLE heartbeats DROP COLUMN trouble")
        profiles.drop(connection)
        newcomers.drop(connection)
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
        upgrade(connection)
        assert rejections_in_rows(connection)
    assert_same(home)
