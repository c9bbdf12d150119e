"""A node's standing, as anybody may ask for it: it has to be what the log says, and cheap however long the run is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from sqlalchemy import update
from storm import Storm

from coordinator.run.home import Home, create_home
from coordinator.storage import stakes, verdicts
from coordinator.storage.accounts import LogAccounts, standing_report
from coordinator.storage.schema import nodes, submissions
from node.protocol.admission import Outcome, Verdict
from node.protocol.messages import MAX_REJECTIONS, NodeStanding, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import StandingSpec
from shardcast.wire import decode, encode

RULES = StandingSpec(probation=2, full_rate_floor=0.25, vesting=2, ban_after=3, stake=10)
SEEN, UNSEEN = 0.0, 0.999
ESCAPE = "\x1b[2J"


@pytest.fixture
def home(tmp_path: Path, database_url: str | None) -> Iterator[Home]:
    home = create_home(
        tmp_path, public_key=PUBLIC_KEY, spec=spec_of(standing=RULES, groups_per_step=40), database_url=database_url
    )
    yield home
    home.database.close()


@pytest.fixture
def actors(home: Home) -> Actors:
    actors = Actors(home)
    actors.register("node", admitted=0)
    with home.database.write() as connection:
        stakes.enter(connection, who("node"), 10, why="receipt 1", now=0.0)
    actors.publish(0)
    return actors


def standing(actors: Actors, name: str = "node", *, accounts: LogAccounts | None = None) -> NodeStanding:
    accounts = accounts or LogAccounts(rules=actors.home.spec.standing)
    with actors.home.database.read() as connection:
        report = standing_report(connection, who(name), accounts=accounts, spec=actors.home.spec, now=actors.now)
    assert decode(NodeStanding, encode(report), max_bytes=2**16) == report, "it can be sent"
    return report


def test_a_stranger_is_not_banned(actors: Actors) -> None:
    report = standing(actors, "nobody")
    assert (report.known, report.banned, report.rejections) == (False, False, ())
    assert (report.verified, report.most_slots, report.wait_seconds) == (0, 1, 0.0)


def test_a_new_node_sees_how_far_it_has_come(actors: Actors) -> None:
    actors.work("node")
    report = standing(actors)
    assert (report.known, report.verified, report.probation) == (True, 1, 2)
    assert (report.vested, report.unvested, report.full_rate, report.most_slots) == (5, 0, 1.0, 2)
    (lease,) = actors.lease("node", held=(0,))
    assert (standing(actors).leases, standing(actors).unjudged) == (1, 0)
    actors.submit("node", lease.lease_id)
    assert (standing(actors).leases, standing(actors).unjudged) == (0, 1)


def test_credit_vests_and_a_rejection_voids_what_has_not(actors: Actors) -> None:
    for _ in range(4):
        actors.work("node", draw=SEEN)
    actors.work("node", draw=UNSEEN)
    report = standing(actors)
    assert (report.vested, report.unvested, report.full_rate) == (20, 5, 0.5)
    actors.work("node", draw=SEEN)
    actors.work("node", draw=SEEN)
    assert (standing(actors).vested, standing(actors).unvested) == (35, 0)
    actors.work("node", draw=UNSEEN)
    actors.work("node", Outcome.REJECTED)
    report = standing(actors)
    assert (report.vested, report.unvested, report.void, report.stake) == (35, 0, 5, 0)
    assert (report.verified, report.strikes, report.banned) == (0, 1, False)
    assert report.wait_seconds > 0
    while (claimed := actors.claim()) is not None:
        actors.decide(claimed, Outcome.ADMITTED)
    assert (standing(actors).vested, standing(actors).void) == (35, 5), "void stays void, as 7.6 says"


def test_a_banned_node_sees_which_rejections_did_it_and_when(actors: Actors) -> None:
    actors.work("node")
    names, times = [], []
    for _ in range(3):
        names.append(actors.work("node", Outcome.REJECTED))
        times.append(int(actors.now))
    report = standing(actors)
    assert (report.banned, report.banned_at, report.most_slots) == (True, times[-1], 0)
    assert [one.submission for one in report.rejections] == names[::-1]
    assert [one.decided_at for one in report.rejections] == times[::-1]
    entries = actors.entries()
    for one in report.rejections:
        entry = entries[one.log_index]
        assert isinstance(entry, VerdictEntry)
        assert (entry.submission, entry.reason) == (one.submission, one.reason)


def test_what_a_second_verdict_rejected_is_among_them_and_counts(actors: Actors) -> None:
    for _ in range(3):
        actors.work("node")
    unseen = [actors.work("node", draw=UNSEEN) for _ in range(2)]
    caught = actors.work("node", Outcome.REJECTED)
    decided = {}
    while (claimed := actors.claim()) is not None:
        actors.now += 1
        actors.decide(claimed, Outcome.REJECTED)
        decided[claimed.submission] = int(actors.now)
    report = standing(actors)
    assert report.banned
    assert report.rejections[-1].submission == caught
    assert {one.submission: one.decided_at for one in report.rejections[:2]} == decided
    assert sorted(decided) == sorted(unseen)
    assert report.banned_at == max(decided.values())
    assert (report.admitted, report.rejected, report.void) == (3, 3, 0)


def test_only_the_last_ten_are_told_and_the_time_of_the_ban_all_the_same(actors: Actors) -> None:
    """A node that was caught with much that had got through has dozens."""
    for _ in range(3):
        actors.work("node")
    for _ in range(12):
        actors.work("node", draw=UNSEEN)
    actors.work("node", Outcome.REJECTED)
    times = [int(actors.now)]
    while (claimed := actors.claim()) is not None:
        actors.now += 1
        actors.decide(claimed, Outcome.REJECTED)
        times.append(int(actors.now))
    report = standing(actors)
    assert len(report.rejections) == MAX_REJECTIONS < report.strikes == 13
    assert report.banned_at == times[RULES.ban_after - 1]


def test_attack_a_detail_that_would_drive_a_terminal_is_made_harmless(actors: Actors) -> None:
    (lease,) = actors.lease("node", held=(0,))
    actors.submit("node", lease.lease_id)
    claimed = actors.claim()
    verdict = Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_SCHEMA, detail=f"{ESCAPE}{'x' * 1000}")
    with actors.home.database.write() as connection:
        assert verdicts.record(connection, claimed, verdict, spec=actors.home.spec, now=actors.now)
    (one,) = standing(actors).rejections
    assert ESCAPE not in one.detail
    assert len(one.detail) <= 200


def test_a_finished_run_gives_nobody_work_and_bans_nobody(tmp_path: Path, database_url: str | None) -> None:
    home = create_home(
        tmp_path,
        public_key=PUBLIC_KEY,
        spec=spec_of(standing=RULES, groups_per_step=1, steps=1),
        database_url=database_url,
    )
    actors = Actors(home)
    actors.register("node", admitted=0)
    actors.publish(0)
    actors.work("node")
    assert actors.assign() == 0
    report = standing(actors)
    assert (report.most_slots, report.banned, report.full_rate) == (0, False, 1.0)
    home.database.close()


@pytest.mark.parametrize(("database_url", "seed"), [("sqlite", 0), ("postgresql", 4)], indirect=["database_url"])
def test_in_any_order_of_events_the_credit_is_what_the_log_says(
    tmp_path: Path, database_url: str | None, seed: int
) -> None:
    """Else a node believes that it has earned what no auditor can find."""
    rules = StandingSpec(probation=2, full_rate_floor=0.25, vesting=2, ban_after=3)
    home = create_home(
        tmp_path,
        public_key=PUBLIC_KEY,
        spec=spec_of(standing=rules, groups_per_step=4, steps=12),
        database_url=database_url,
    )
    actors = Actors(home)
    storm = Storm(actors, seed)
    looks = random.Random(seed)
    voids = unvested = 0
    followed = LogAccounts(rules=rules)
    while storm.head < 12:
        storm.step()
        if looks.random() > 0.02:
            continue
        accounts = actors.reading().accounts
        for name in storm.names:
            report, account = standing(actors, name, accounts=followed), accounts.get(who(name))
            if account is None:
                continue
            assert (report.vested, report.unvested) == (account.vested, account.pending), name
            assert (report.verified, report.strikes) == (account.standing.verified, account.standing.strikes)
            assert report.banned == account.standing.is_banned(rules)
            voids, unvested = voids + report.void, unvested + report.unvested
    assert voids
    assert unvested
    home.database.close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # whose planner says what it does
def test_asking_reads_no_table_from_end_to_end(actors: Actors) -> None:
    """Anybody may ask, hundreds of times a second; a long run has a million submissions."""
    for outcome in (Outcome.ADMITTED, Outcome.ADMITTED, Outcome.REJECTED):
        actors.work("node", outcome)
    asked: list[str] = []
    with actors.home.database.read() as connection:
        driver: Any = connection.connection.dbapi_connection
        driver.set_trace_callback(asked.append)
        accounts = LogAccounts(rules=actors.home.spec.standing)
        standing_report(connection, who("node"), accounts=accounts, spec=actors.home.spec, now=actors.now)
        driver.set_trace_callback(None)
        plans = [
            (row[-1], statement)
            for statement in asked
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}")
        ]
    assert len(asked) > 5
    scans = [step for step in plans if step[0].startswith("SCAN") and "submissions" in step[0]]
    assert scans == []
    assert all("submissions" not in step[0] or "USING" in step[0] for step in plans), plans


def test_changed_rows_change_nothing_of_what_a_node_is_told(actors: Actors) -> None:
    """Credit, strikes and rejections are those of the log, whatever somebody wrote into the tables."""
    for _ in range(3):
        actors.work("node")
    actors.work("node", draw=UNSEEN)
    actors.work("node", Outcome.REJECTED)
    actors.decide(actors.claim(), Outcome.REJECTED)
    before = standing(actors)
    assert (before.admitted, before.rejected, before.vested, len(before.rejections)) == (3, 2, 15, 2)
    with actors.home.database.write() as connection:
        changed = {"outcome": "admitted", "reason": None, "tokens": 10**6, "recheck_index": None, "log_index": None}
        connection.execute(update(submissions).values(changed))
        raised = {"admitted": 99, "rejected": 0, "tokens": 10**9, "verified": 50, "strikes": 0}
        connection.execute(update(nodes).values(raised))
    assert standing(actors) == before


def test_an_account_that_is_followed_says_what_one_from_the_beginning_does(actors: Actors) -> None:
    accounts = LogAccounts(rules=RULES)
    for outcome in (Outcome.ADMITTED, Outcome.ADMITTED, Outcome.REJECTED, Outcome.ADMITTED):
        actors.work("node", outcome)
        assert standing(actors, accounts=accounts) == standing(actors)
