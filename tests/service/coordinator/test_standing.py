"""Who is measured in full, who is sent away, and what becomes of work that was let through when its node is caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from actors import PUBLIC_KEY, ZERO, Actors, spec_of, who
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from storm import STORMS, Storm

from coordinator.run.home import Home, create_home
from coordinator.storage import stakes, standing, training, verdicts, work
from coordinator.storage.schema import SlotState, groups, slots, submissions
from coordinator.storage.totals import partly_measured
from node.protocol.admission import Outcome, Verdict
from node.protocol.evidence import Total, Totals
from node.protocol.messages import LeaseRequest, VerdictEntry, slot_name
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import HonestSpec, LevelSpec, StandingSpec

RULES = StandingSpec(probation=2, full_rate_floor=0.25, vesting=2, ban_after=3)
SEEN, UNSEEN = 0.0, 0.999


@pytest.fixture
def home(tmp_path: Path, database_url: str | None) -> Iterator[Home]:
    home = create_home(
        tmp_path, public_key=PUBLIC_KEY, spec=spec_of(standing=RULES, groups_per_step=3), database_url=database_url
    )
    yield home
    home.database.close()


@pytest.fixture
def actors(home: Home) -> Actors:
    """A run with one node that has passed its probation, with three admitted slots, and a new one."""
    actors = Actors(home)
    actors.register("old", "new", admitted=0)
    actors.publish(0)
    for _ in range(3):
        actors.work("old")
    actors.assign()
    actors.publish(1)
    return actors


def spot(actors: Actors, name: str) -> int | None:
    """The row that the first verdict on a submission left alone with."""
    (found,) = [
        entry.spot
        for entry in actors.entries()
        if isinstance(entry, VerdictEntry) and entry.submission == name and not entry.recheck
    ]
    return found


def second_verdicts(actors: Actors, outcome: Outcome) -> list[str]:
    """Decide everything that waits for a second verdict."""
    done = []
    while (claimed := actors.claim()) is not None:
        assert claimed.recheck
        assert claimed.full
        actors.decide(claimed, outcome)
        done.append(claimed.submission)
    return done


def test_all_of_a_new_nodes_slots_are_measured_in_full(actors: Actors) -> None:
    names = [actors.work("new", draw=UNSEEN) for _ in range(2)]
    assert [spot(actors, name) for name in names] == [None, None]
    third = actors.work("new", draw=UNSEEN)
    assert spot(actors, third) is None, "probation / verified is still 1"


def test_a_proven_nodes_slots_are_measured_in_part_at_the_rate_that_it_earned(actors: Actors) -> None:
    """Three verified of a probation of two: two of three slots are measured in full."""
    assert spot(actors, actors.work("old", draw=0.66)) is None
    assert spot(actors, actors.work("old", draw=0.51)) == 0, "the fourth verified made it one of two"


def test_the_rate_never_falls_below_the_floor(tmp_path: Path, database_url: str | None) -> None:
    home = create_home(
        tmp_path, public_key=PUBLIC_KEY, spec=spec_of(standing=RULES, groups_per_step=20), database_url=database_url
    )
    actors = Actors(home)
    actors.register("old", admitted=0)
    actors.publish(0)
    for _ in range(20):
        actors.work("old", draw=SEEN)
    assert spot(actors, actors.work("old", draw=0.24)) is None
    assert spot(actors, actors.work("old", draw=0.26)) == 0
    home.database.close()


def test_chance_draws_for_each_submission_and_not_for_the_worker(actors: Actors, home: Home) -> None:
    """Draws are as many as submissions, apart from each other, and stay when a verifier dies."""
    names = []
    for _ in range(3):
        actors.now += 1
        names.append(actors.submit("old", actors.lease("old", held=(1,))[0].lease_id))
    with home.database.read() as connection:
        draws = (
            connection.execute(select(submissions.c.draw).where(submissions.c.submission.in_(names))).scalars().all()
        )
    assert len(set(draws)) == 3
    first = actors.claim()
    actors.now += 1000
    again = actors.claim("another")
    assert (again.submission, again.full) == (first.submission, first.full)


def test_a_rejected_node_is_on_probation_again(actors: Actors) -> None:
    actors.work("old", Outcome.REJECTED)
    assert spot(actors, actors.work("old", draw=UNSEEN)) is None


def test_a_node_is_banned_after_its_third_rejection_and_hears_why(actors: Actors) -> None:
    for _ in range(3):
        actors.work("new", Outcome.REJECTED)
    actors.now += 1000
    with pytest.raises(Refusal, match="3 slots of node") as caught:
        actors.lease("new", held=(1,))
    assert caught.value.reason is Reason.BANNED


def test_a_passed_probation_clears_a_nodes_strikes(actors: Actors) -> None:
    for outcome in (Outcome.REJECTED, Outcome.REJECTED, Outcome.ADMITTED, Outcome.ADMITTED, Outcome.REJECTED):
        actors.work("new", outcome)
    actors.now += 1000
    assert actors.lease("new", held=(1,))


def test_training_waits_until_the_work_of_a_caught_node_was_measured_after_all(actors: Actors) -> None:
    unseen = actors.work("old", draw=UNSEEN)
    for _ in range(3):
        actors.work("new")
    actors.work("old", Outcome.REJECTED, draw=SEEN)
    assert actors.assign() is None
    assert second_verdicts(actors, Outcome.ADMITTED) == [unseen]
    assert actors.assign() == 1
    assert actors.reading().problems == []
    account = actors.reading().accounts[who("old")]
    assert (account.vested, account.void) == (15, 5), "what was pending is void, even though it was right"


def test_bad_work_that_was_let_through_is_not_trained_on_once_its_node_is_caught(actors: Actors, home: Home) -> None:
    unseen = actors.work("old", draw=UNSEEN)
    for _ in range(3):
        actors.work("new")
    actors.work("old", Outcome.REJECTED)
    second_verdicts(actors, Outcome.REJECTED)
    assert actors.assign() == 1
    with home.database.read() as connection:
        assert unseen not in [row.submission for row in training.batch(connection, 1)]
        slot = select(slots.c.state).join(submissions).where(submissions.c.submission == unseen)
        assert connection.execute(slot).scalar_one() == SlotState.OPEN, "somebody else does it"
    assert actors.reading().problems == []
    assert actors.reading().reached_training == []


def test_bad_work_that_training_used_is_reported_with_its_step(actors: Actors) -> None:
    unseen = actors.work("old", draw=UNSEEN)
    actors.work("new")
    actors.work("new")
    assert actors.assign() == 1
    actors.publish(2)
    actors.work("old", Outcome.REJECTED)
    second_verdicts(actors, Outcome.REJECTED)
    reading = actors.reading()
    assert reading.problems == []
    assert [(submission, step) for _, submission, step in reading.reached_training] == [(unseen, 1)]


def test_what_has_vested_is_not_measured_again(actors: Actors) -> None:
    actors.work("old", draw=UNSEEN)
    for _ in range(RULES.vesting):
        actors.work("old", draw=SEEN)
    pending = actors.work("old", draw=UNSEEN)
    actors.work("old", Outcome.REJECTED)
    assert second_verdicts(actors, Outcome.ADMITTED) == [pending]
    account = actors.reading().accounts[who("old")]
    assert (account.vested, account.void, account.pending) == (30, 5, 0)


def test_a_second_verdict_that_cannot_be_had_does_not_stop_the_run(actors: Actors, home: Home) -> None:
    """Else a node could freeze training by being caught after relays forgot the policy of its work."""
    unseen = actors.work("old", draw=UNSEEN)
    for _ in range(3):
        actors.work("new")
    actors.work("old", Outcome.REJECTED)
    claimed = actors.claim()
    actors.decide(claimed, Outcome.INDETERMINATE)
    assert actors.assign() is None, "there is time left to try again"
    actors.now += standing.RECHECK_SECONDS
    actors.decide(actors.claim(), Outcome.INDETERMINATE)
    assert actors.assign() == 1
    with home.database.read() as connection:
        assert unseen not in [row.submission for row in training.batch(connection, 1)]
    assert actors.reading().problems == []


def test_a_slot_is_measured_in_full_when_its_node_is_caught_meanwhile(actors: Actors) -> None:
    """Two verifiers: one measures a row of one slot while the other finds that the node cheats."""
    for lease in actors.lease("old", held=(1,), count=2):
        actors.submit("old", lease.lease_id)
    first, second = actors.claim("x"), actors.claim("y")
    actors.decide(second, Outcome.REJECTED)
    actors.decide(replace(first, full=False), Outcome.ADMITTED)
    again = actors.claim("x")
    assert (again.submission, again.full) == (first.submission, True)


def test_a_node_without_the_stake_is_measured_in_full_and_a_rejection_takes_it_once(
    tmp_path: Path, database_url: str | None
) -> None:
    rules = StandingSpec(probation=1, full_rate_floor=0.01, stake=100)
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(standing=rules), database_url=database_url)
    actors = Actors(home)
    actors.register("node", admitted=50)
    actors.publish(0)
    assert spot(actors, actors.work("node", draw=UNSEEN)) is None
    with home.database.write() as connection:
        stakes.enter(connection, who("node"), 100, why="receipt 7", now=0.0)
    with pytest.raises(IntegrityError), home.database.write() as connection:
        stakes.enter(connection, who("node"), 100, why="receipt 7", now=0.0)
    assert spot(actors, actors.work("node", draw=UNSEEN)) == 0
    actors.work("node", Outcome.REJECTED, draw=SEEN)
    with home.database.read() as connection:
        assert stakes.balances(connection) == [(who("node"), 0)]
    home.database.close()


def test_many_identities_at_one_address_share_its_leases(actors: Actors, home: Home) -> None:
    names = [f"sybil{i}" for i in range(6)]
    actors.register(*names, admitted=0)
    here = work.AddressQuota("192.0.2.7", most_leases=2)
    granted = 0
    for name in names:
        with home.database.write() as connection:
            request = LeaseRequest(held_versions=(1,), slots=1, instance="0" * 32)
            reply = work.lease(connection, node=who(name), request=request, spec=home.spec, now=actors.now, quota=here)
        granted += len(reply.leases)
    assert granted == 2
    assert actors.lease("old", held=(1,)), "others are not in their way"


def test_what_is_pending_when_the_run_ends_is_settled(tmp_path: Path, database_url: str | None) -> None:
    home = create_home(
        tmp_path,
        public_key=PUBLIC_KEY,
        spec=spec_of(standing=RULES, groups_per_step=5, steps=1),
        database_url=database_url,
    )
    actors = Actors(home)
    actors.register("node", admitted=0)
    actors.publish(0)
    for _ in range(4):
        actors.work("node")
    actors.work("node", draw=UNSEEN)
    assert actors.assign() == 0
    assert actors.reading().accounts[who("node")].pending == 5
    second_verdicts(actors, Outcome.ADMITTED)
    reading = actors.reading()
    assert (reading.accounts[who("node")].vested, reading.accounts[who("node")].pending) == (25, 0)
    assert reading.problems == []
    home.database.close()


def test_a_late_first_verdict_does_not_pass_for_the_second(actors: Actors) -> None:
    """A verifier was stopped while it had a claim; another was faster, and by now a second verdict is due."""
    unseen = actors.submit("old", actors.lease("old", held=(1,))[0].lease_id)
    late = replace(actors.claim("asleep"), full=False)
    actors.now += 31
    actors.decide(replace(actors.claim("other"), full=False), Outcome.ADMITTED)
    actors.work("old", Outcome.REJECTED)
    again = actors.claim("other")
    assert (again.submission, again.recheck) == (unseen, True)
    assert not actors.decide(late, Outcome.REJECTED)
    assert actors.decide(again, Outcome.ADMITTED)
    assert actors.reading().problems == []


def test_a_slot_that_one_row_makes_a_node_drift_says_which_row(tmp_path: Path, database_url: str | None) -> None:
    """Else an auditor compares the sums of one row with those of all, and calls an honest coordinator a liar."""
    level = LevelSpec(mean=0.001, variance=1e-4, largest=0.1)
    spec = spec_of(standing=RULES, groups_per_step=20)
    limits = msgspec.structs.replace(spec.limits, honest=HonestSpec(margin=level))
    home = create_home(
        tmp_path, public_key=PUBLIC_KEY, spec=msgspec.structs.replace(spec, limits=limits), database_url=database_url
    )
    actors = Actors(home)
    actors.register("node", admitted=0)
    actors.publish(0)
    for _ in range(3):
        actors.work("node")
    shifted = Totals(margin=Total(count=100, sum=0.35))
    rewards = (0.5,) * spec.sampling.group_size
    for number in range(100):
        actors.submit("node", actors.lease("node", held=(0,))[0].lease_id)
        verdict = Verdict(outcome=Outcome.ADMITTED, tokens=5, figures=ZERO, totals=shifted, rewards=rewards, spot=0)
        group = f"{number:064x}"
        with home.database.write() as connection:
            (claimed,) = verdicts.claim(connection, verifier="v", spec=home.spec, now=actors.now, seconds=9.0)
            assert verdicts.record(connection, claimed, verdict, spec=home.spec, now=actors.now, group=group)
        last = actors.entries()[-1]
        assert isinstance(last, VerdictEntry)
        if last.outcome is Outcome.REJECTED:
            break
    assert (last.reason, last.spot) == (Reason.WRONG_TOKEN, 0)
    assert actors.reading().problems == [], number
    with home.database.read() as connection:
        assert partly_measured(connection) == {"due": number}
    home.database.close()


def test_what_is_measured_again_keeps_no_new_node_from_working(actors: Actors, home: Home) -> None:
    """A node with much pending would else stop every newcomer by being caught."""
    for _ in range(6):
        actors.work("old", draw=UNSEEN)
    actors.work("old", Outcome.REJECTED)
    with home.database.read() as connection:
        assert standing.rechecks_due(connection) == 6
    assert actors.lease("new", held=(1,))


def test_a_group_left_out_undecided_may_be_submitted_again_as_it_was(actors: Actors, home: Home) -> None:
    """Honest nodes make the same bytes of a slot: what nobody could measure must not bar them from it."""
    unseen = actors.work("old", draw=UNSEEN)
    actors.work("old", Outcome.REJECTED)
    actors.now += standing.RECHECK_SECONDS
    second_verdicts(actors, Outcome.INDETERMINATE)
    with home.database.read() as connection:
        body, slot = connection.execute(
            select(submissions.c.body, slots.c.number)
            .join(slots, slots.c.id == submissions.c.slot_id)
            .where(submissions.c.submission == unseen)
        ).one()
    (lease,) = actors.lease("new", held=(1,))
    with home.database.write() as connection:
        under = {"node": who("new"), "lease_id": lease.lease_id, "spec": home.spec, "now": actors.now}
        work.check_lease(connection, **under, claimed=slot_name(msgspec.structs.replace(lease, slot=slot)))
        again = work.StoredSubmission(b"again", body=body, body_bytes=1)
        work.submit(connection, again, **under)


def test_bad_bytes_are_not_taken_again(actors: Actors, home: Home) -> None:
    unseen = actors.work("old", draw=UNSEEN)
    actors.work("old", Outcome.REJECTED)
    second_verdicts(actors, Outcome.REJECTED)
    with home.database.read() as connection:
        body = connection.execute(select(submissions.c.body).where(submissions.c.submission == unseen)).scalar_one()
    (lease,) = actors.lease("new", held=(1,))
    again = work.StoredSubmission(b"again", body=body, body_bytes=1)
    with pytest.raises(Refusal) as caught, home.database.write() as connection:
        work.submit(connection, again, node=who("new"), lease_id=lease.lease_id, spec=home.spec, now=actors.now)
    assert caught.value.reason is Reason.DUPLICATE_SUBMISSION


def test_after_the_last_batch_all_rows_are_measured_and_no_work_is_given_out(
    tmp_path: Path, database_url: str | None
) -> None:
    """Nothing vests any more, and what is pending was settled: a slot measured in part would be lost to its node."""
    home = create_home(
        tmp_path,
        public_key=PUBLIC_KEY,
        spec=spec_of(standing=RULES, groups_per_step=2, steps=1),
        database_url=database_url,
    )
    actors = Actors(home)
    actors.register("first", "second", "third")
    actors.publish(0)
    # Two slots are given out anew, beside the two that training takes.
    for outcome in (Outcome.REJECTED, Outcome.REJECTED, Outcome.ADMITTED, Outcome.ADMITTED):
        actors.work("first", outcome)
    (early,), (late,) = actors.lease("second", held=(0,)), actors.lease("third", held=(0,))
    one = actors.submit("second", early.lease_id)
    with home.database.write() as connection:
        connection.execute(update(submissions).values(draw=UNSEEN))
    measured = actors.claim()
    assert not measured.full
    actors.now += 1
    actors.submit("third", late.lease_id)
    with home.database.write() as connection:
        connection.execute(update(submissions).values(draw=UNSEEN))
    assert actors.assign() == 0
    actors.decide(measured, Outcome.ADMITTED)
    again, other = actors.claim(), actors.claim("another")
    assert (again.submission, again.full, again.recheck) == (one, True, False)
    assert other.full
    actors.decide(other, Outcome.REJECTED)
    actors.now += 100
    assert not actors.lease("first", held=(0,))
    home.database.close()


def test_training_does_not_wait_for_second_verdicts_on_what_it_has_used(actors: Actors) -> None:
    """Of old work the relays may have forgotten the policy: a node could stop the run for minutes at will."""
    unseen = actors.work("old", draw=UNSEEN)
    actors.work("new")
    actors.work("new")
    assert actors.assign() == 1
    actors.publish(2)
    fresh = actors.work("old", draw=UNSEEN)
    for _ in range(3):
        actors.work("new")
    actors.work("old", Outcome.REJECTED)
    first = actors.claim()
    assert first.submission == fresh, "what training waits for comes first"
    assert actors.assign() is None
    actors.decide(first, Outcome.ADMITTED)
    assert actors.assign() == 2
    assert [(submission, step) for _, submission, step in actors.reading().reached_training] == [(unseen, 1)]
    second_verdicts(actors, Outcome.ADMITTED)
    assert actors.reading().problems == []
    assert actors.reading().reached_training == []


def test_slots_that_nobody_left_can_take_do_not_keep_the_run_from_its_end(
    tmp_path: Path, database_url: str | None
) -> None:
    """In the last step only as many are in flight as it needs; its only node has failed one of them."""
    home = create_home(
        tmp_path,
        public_key=PUBLIC_KEY,
        spec=spec_of(standing=RULES, groups_per_step=1, steps=1),
        database_url=database_url,
    )
    actors = Actors(home)
    actors.register("node", admitted=0)
    actors.publish(0)
    actors.work("node", Outcome.REJECTED)
    actors.work("node")
    assert actors.assign() == 0
    home.database.close()


@pytest.mark.parametrize(("database_url", "seed"), STORMS, indirect=["database_url"])
def test_in_any_order_of_events_an_auditor_finds_the_rules_kept(
    tmp_path: Path, database_url: str | None, seed: int
) -> None:
    home = create_home(
        tmp_path, public_key=PUBLIC_KEY, spec=spec_of(standing=RULES, steps=20), database_url=database_url
    )
    actors = Actors(home)
    storm = Storm(actors, seed)
    for _ in range(8000):
        storm.step()
        if storm.head == 20:
            break
    assert storm.head == 20, "the run went on to its end"
    assert actors.reading().problems == []
    rechecked = [entry for entry in actors.entries() if isinstance(entry, VerdictEntry) and entry.recheck]
    assert rechecked, "nothing was measured again: this tests nothing"
    with home.database.read() as connection:
        stored = dict(connection.execute(select(groups.c.submission, groups.c.step)).all())
    for entry in rechecked:
        bad = entry.outcome is not Outcome.ADMITTED
        assert not (bad and stored.get(entry.submission, 0) is None), "bad work waits for training"
    home.database.close()


def test_keys_that_cost_nothing_cannot_fail_the_last_slots_again_and_again(actors: Actors) -> None:
    actors.register(*(f"sybil{i}" for i in range(4)), admitted=0)
    tried = []
    for name in ("sybil0", "sybil1"):
        (lease,) = actors.lease(name, held=(1,))
        actors.submit(name, lease.lease_id)
        actors.decide(actors.claim(), Outcome.REJECTED)
        tried.append(lease.slot)
    failed = tried[0]
    assert tried == [failed, failed]
    assert [lease.slot for lease in actors.lease("sybil2", held=(1,))] != [failed]
    assert actors.lease("old", held=(1,))[0].slot == failed
