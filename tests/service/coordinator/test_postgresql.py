"""Many processes on one PostgreSQL: what must not happen at once does not, and what may goes on beside it.

Everything else that is said of a run's state is tested on both databases, in the tests of each part.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from swarm import INSTANCE
from vanishing_host import VanishingHost
from waiting import until

from coordinator.errors import BadConfiguration
from coordinator.http.write_queue import WriteQueue
from coordinator.run.home import Home, create_home, open_home
from coordinator.run.leader import Leader, last_leader, leader_thread
from coordinator.run.service import Coordinator
from coordinator.storage import database, locks, verdicts, work
from coordinator.storage.database import JobOutcome
from coordinator.storage.faults import LockHeld, is_away
from coordinator.storage.postgresql import PreparedSession
from coordinator.storage.prepared import Prepared, insert_into, run_all
from coordinator.storage.progress import progress
from coordinator.storage.schema import facts, leases, log_entries, nodes, slots, submissions
from coordinator.storage.signed_requests import SignedRequestLog
from coordinator.storage.verdicts import QueueItem
from node.protocol.admission import Outcome, Verdict
from node.protocol.messages import LeaseReply, LeaseRequest, Registration
from node.protocol.reasons import Reason, Refusal

THREADS = 8
REGISTRATION = Registration(software="x", engine="x", instance=INSTANCE, name="x")


@pytest.fixture
def home(tmp_path: Path, postgresql_url: str) -> Iterator[Home]:
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(groups_per_step=12), database_url=postgresql_url)
    yield home
    home.database.close()


@pytest.fixture
def others(home: Home) -> Iterator[list[Home]]:
    """The same run as other processes have it."""
    opened = [open_home(home.folder, database_url=home.database.url) for _ in range(3)]
    yield [home, *opened]
    for one in opened:
        one.database.close()


def together(*doing: Callable[[], Any]) -> list[Any]:
    barrier = threading.Barrier(len(doing))

    def one(do: Callable[[], Any]) -> Any:
        barrier.wait()
        return do()

    with ThreadPoolExecutor(len(doing)) as pool:
        return list(pool.map(one, doing))


def in_turn(*doing: Callable[[], Any]) -> list[Any]:
    return [do() for do in doing]


def in_turn_from_the_last(*doing: Callable[[], Any]) -> list[Any]:
    return in_turn(*doing[::-1])[::-1]


# Who comes first when two meet is the machine's choice, so that each order is had once on purpose too.
RACES = (in_turn, in_turn_from_the_last, *[together] * 28)


def test_coordinators_that_start_together_begin_one_run(tmp_path: Path, postgresql_url: str) -> None:
    def start() -> Home:
        return create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=postgresql_url)

    homes = together(*[start] * 4)
    with homes[0].database.read() as connection:
        assert connection.execute(select(func.count()).select_from(log_entries)).scalar_one() == 1
    for home in homes:
        home.database.close()


def test_no_slot_is_leased_twice_and_no_more_are_in_flight_than_may_be(others: list[Home]) -> None:
    actors = [Actors(home) for home in others]
    names = [f"n{index}" for index in range(24)]
    actors[0].register(*names)
    actors[0].publish(0)

    def take(index: int) -> list[work.Lease]:
        return [
            lease
            for name in names[index::THREADS]
            for lease in actors[index % len(actors)].lease(name, held=(0,), count=3)
        ]

    taken = [lease for found in together(*[lambda i=i: take(i) for i in range(THREADS)]) for lease in found]
    numbers = [lease.slot for lease in taken]
    assert sorted(numbers) == list(range(36)), "three steps' worth of slots, each once"


def test_verifiers_never_get_the_same_submission(others: list[Home]) -> None:
    actors = [Actors(home) for home in others]
    names = [f"n{index}" for index in range(12)]
    actors[0].register(*names)
    actors[0].publish(0)
    for name in names:
        for lease in actors[0].lease(name, held=(0,), count=3):
            actors[0].submit(name, lease.lease_id)

    def claim_all(index: int) -> list[str]:
        actor = actors[index % len(actors)]
        claims = [actor.claim(f"verifier-{index}-{turn}") for turn in range(10)]
        return [claimed.submission for claimed in claims if claimed is not None]

    claimed = [one for found in together(*[lambda i=i: claim_all(i) for i in range(THREADS)]) for one in found]
    assert len(claimed) == 36
    assert set(Counter(claimed).values()) == {1}


def test_a_lease_that_ends_while_it_is_submitted_is_one_or_the_other(others: list[Home]) -> None:
    """A submission that was taken must not have its slot given to somebody else at the same moment."""
    first, second = Actors(others[0]), Actors(others[1])
    first.register("a", "b")
    first.publish(0)
    for race in RACES:
        first.now = second.now = first.now + 100
        (lease,) = first.lease("a", held=(0,))
        end = lease.expires_at
        first.now, second.now = end - 0.5, end + 0.5  # two machines' clocks

        def submit(lease: work.Lease = lease) -> bool:
            try:
                first.submit("a", lease.lease_id)
            except Refusal:
                return False
            return True

        def lease_again() -> list[work.Lease]:
            return second.lease("b", held=(0,), count=3)

        submitted, again = race(submit, lease_again)
        assert race is together or submitted == (race is in_turn)
        held = [one.lease_id for one in again if one.slot == lease.slot]
        assert not (submitted and held)
        with others[0].database.read() as connection:
            state = connection.execute(select(slots.c.state).where(slots.c.number == lease.slot)).scalar_one()
        assert state == ("submitted" if submitted else "leased" if held else "open")
        for one in again:
            second.give_back("b", one)
        while claimed := first.claim():
            first.decide(claimed, Outcome.ADMITTED)


def test_a_lease_that_is_overtaken_while_it_is_submitted_is_one_or_the_other(others: list[Home]) -> None:
    """A slot whose submission was taken must not be given to somebody else as late at the same moment."""
    actors = Actors(others[0])
    actors.register("a")
    actors.publish(0)
    for race in RACES:
        (lease,) = actors.lease("a", held=(0,))

        def submit(lease: work.Lease = lease) -> bool:
            try:
                actors.submit("a", lease.lease_id)
            except Refusal:
                return False
            return True

        def overtake(lease: work.Lease = lease) -> None:
            with others[1].database.write() as connection:
                locks.leasing(connection)
                work.overtake(connection, lease.lease_id, who("a"), spec=others[1].spec, now=actors.now)

        submitted, _ = race(submit, overtake)
        assert race is together or submitted == (race is in_turn)
        with others[0].database.read() as connection:
            state = connection.execute(select(slots.c.state).where(slots.c.number == lease.slot)).scalar_one()
            held = connection.execute(select(leases.c.state).where(leases.c.lease == lease.lease_id)).scalar_one()
        assert (state, held) == (("submitted", "submitted") if submitted else ("open", "overtaken"))
        actors.now += 100
        while claimed := actors.claim():
            actors.decide(claimed, Outcome.ADMITTED)


@pytest.fixture
def judged_together(others: list[Home]) -> list[QueueItem]:
    """Claimed submissions: two of the nodes a and b each, and one of c; a and b have another lease each."""
    actors = Actors(others[0])
    actors.register("a", "b", "c")
    actors.publish(0)
    for name in ("a", "b", "a", "b", "c"):
        (lease,) = actors.lease(name, held=(0,))
        actors.submit(name, lease.lease_id)
    for name in ("a", "b"):
        assert actors.lease(name, held=(0,))
    claimed = [actors.claim(f"verifier-{number}", seconds=1000.0) for number in range(5)]
    order = [who(name) for name in ("a", "b", "c")]
    return sorted((item for item in claimed if item is not None), key=lambda item: order.index(item.node))


def test_verdicts_in_any_order_of_their_nodes_neither_end_nor_hold_up_requests_for_work(
    others: list[Home], judged_together: list[QueueItem]
) -> None:
    """A lease locks the nodes of what is overdue; a batch of verdicts, those that it judges, in its own order."""
    a, a_again, b, b_again, c = judged_together
    actors, leasing, other = (Actors(home) for home in others[:3])
    verdict = Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_SEED, tokens=5)

    def judge(connection: Any, item: QueueItem) -> bool:
        return verdicts.record(connection, item, verdict, spec=actors.home.spec, now=actors.now)

    def judge_the_others() -> list[bool]:
        with other.home.database.write() as connection:
            return [judge(connection, item) for item in (a_again, b_again)]

    def renew() -> None:
        with other.home.database.write() as connection:
            verdicts.renew(connection, [a, b, c], until=actors.now + 500)

    leasing.now += 60  # the leases of a and b are over
    with ThreadPoolExecutor(2) as pool:
        with actors.home.database.write() as connection:
            assert judge(connection, b)
            pool.submit(renew).result(20)
            assert pool.submit(leasing.lease, "c", held=(0,)).result(20)
            second = pool.submit(judge_the_others)
            assert judge(connection, c)
            assert judge(connection, a)
        assert second.result(20) == [True, True]
    with others[0].database.read() as connection:
        assert connection.execute(select(func.count()).where(submissions.c.outcome.is_not(None))).scalar_one() == 5


async def test_requests_that_share_a_transaction_wait_for_nobody_elses_rows(others: list[Home]) -> None:
    """Two of them, each with what the other waits for, would be a deadlock, and all that share one of them lose it."""
    actors = Actors(others[0])
    actors.register("a", "b", "c")
    actors.publish(0)
    jobs = []
    for name in ("a", "b", "c"):
        (lease,) = actors.lease(name, held=(0,))
        jobs.append(partial(actors.submit, name, lease.lease_id))
    queue = WriteQueue(actors.home.database)
    with others[1].database.write() as connection:
        of_b = select(leases.c.lease).where(leases.c.lease == jobs[1].args[1])
        assert connection.execute(of_b.with_for_update()).scalar_one()
        a, b, c = actors.home.database.execute_together(jobs)
        assert (a.error, b.value, c.error) == (None, None, None)
        assert isinstance(b.error, LockHeld)
        calls, alone = list[bool](), threading.Event()

        def submit() -> str:
            calls.append(True)
            if len(calls) == 2:  # by itself, after it was undone
                alone.set()
            return jobs[1]()

        waiting = asyncio.create_task(queue.run(submit))
        assert await queue.run(lambda: "done") == "done"
        assert await asyncio.to_thread(alone.wait, 20)
        assert not waiting.done()
    assert await waiting
    with others[1].database.read() as connection:
        assert {a.value, c.value} < set(connection.execute(select(submissions.c.submission)).scalars())
        assert connection.execute(select(func.count()).select_from(submissions)).scalar_one() == 3


def test_everybody_at_once_loses_and_repeats_nothing(others: list[Home]) -> None:  # noqa: C901  (three parts)
    """Workers, verifiers and a trainer of a run, each with a connection of its own, as fast as they can."""
    actors = [Actors(home) for home in others]
    names = [f"n{index}" for index in range(8)]
    actors[0].register(*names)
    actors[0].publish(0)
    over = threading.Event()

    def contribute(index: int) -> None:
        rng, actor = random.Random(index), Actors(others[index % len(others)])
        actor.files = 10_000 * (index + 1)
        while not over.is_set():
            with actor.home.database.read() as connection:
                head = progress(connection).head
            for lease in actor.lease(names[index], held=tuple(range(max(0, head - 2), head + 1)), count=3):
                try:
                    if rng.random() < 0.8:
                        actor.submit(names[index], lease.lease_id)
                    else:
                        actor.give_back(names[index], lease)
                except Refusal as refusal:  # its policy grew too old meanwhile
                    assert refusal.reason.value in {"stale_policy", "expired_lease"}

    def verify(index: int) -> None:
        rng, actor = random.Random(index), Actors(others[index % len(others)])
        while not over.is_set():
            if (claimed := actor.claim(f"v{index}")) is not None:
                actor.decide(claimed, Outcome.INDETERMINATE if rng.random() < 0.1 else Outcome.ADMITTED)

    def train() -> None:
        until = time.monotonic() + 200
        actor = Actors(others[-1])
        while time.monotonic() < until:
            step = actor.assign()
            if step is not None:
                if step == 5:
                    break
                actor.publish(step + 1)
        over.set()
        assert step == 5

    together(*[lambda i=i: contribute(i) for i in range(6)], *[lambda i=i: verify(i) for i in range(2)], train)
    assert actors[0].reading().problems == []
    with others[0].database.read() as connection:
        per_slot = select(submissions.c.slot_id).where(submissions.c.outcome == Outcome.ADMITTED)
        admitted = connection.execute(per_slot).scalars().all()
        active = select(func.count()).where(leases.c.state == "active").group_by(leases.c.slot_id)
        assert len(admitted) == len(set(admitted)) >= 60
        assert set(connection.execute(active).scalars()) <= {1}


def test_a_process_that_was_not_told_of_the_database_does_not_begin_another_run(home: Home) -> None:
    with pytest.raises(BadConfiguration, match="postgresql://postgres"):
        open_home(home.folder)
    with pytest.raises(BadConfiguration, match="is in another database"):
        create_home(home.folder, public_key=PUBLIC_KEY, spec=home.spec)
    assert not (home.folder / "swarmproof.sqlite3").exists()


def test_a_password_is_not_left_in_the_folder(tmp_path: Path, postgresql_url: str) -> None:
    url = postgresql_url.replace("postgres:@", "postgres:geheim@")
    create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=url).database.close()
    assert all(b"geheim" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_database_that_went_away_is_away_and_comes_back(home: Home, postgresql: Any) -> None:
    """What a coordinator answers with 503 and a verifier waits for; nothing has to be restarted."""
    with home.database.read():
        pass
    with psycopg.connect(postgresql.get_uri(), autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [_name(home)])
    with pytest.raises(OperationalError) as raised, home.database.write() as connection:
        connection.execute(select(func.count()).select_from(slots))
    assert is_away(raised.value)
    with home.database.write() as connection:
        assert connection.execute(select(func.count()).select_from(slots)).scalar_one() == 0


def test_a_connection_that_breaks_under_a_prepared_statement_is_away_too(home: Home, postgresql: Any) -> None:
    with pytest.raises(OperationalError) as raised, home.database.write() as connection:
        locks.submitting(connection)
        with psycopg.connect(postgresql.get_uri(), autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [_name(home)])
        locks.submitting(connection)
    assert is_away(raised.value)
    with home.database.write() as connection:
        locks.submitting(connection)


NOTE = Prepared(insert_into(facts, "name", "value"))


def noted(*names: str) -> list[tuple[Prepared, dict[str, str]]]:
    return [(NOTE, {"name": name, "value": "x"}) for name in names]


def test_statements_that_are_sent_together_are_executed_in_order_and_fail_as_one(home: Home) -> None:
    count = select(func.count()).select_from(facts).where(facts.c.value == "x")
    with pytest.raises(IntegrityError), home.database.write() as connection:
        run_all(connection, noted("first", "second", "first", "third"))
    with home.database.write() as connection:  # that same connection
        run_all(connection, noted("first", "second"))
        run_all(connection, [])
        assert connection.execute(count).scalar_one() == 2


def test_a_connection_that_breaks_under_statements_sent_together_is_away_too(home: Home, postgresql: Any) -> None:
    with pytest.raises(OperationalError) as raised, home.database.write() as connection:
        run_all(connection, noted("first"))
        with psycopg.connect(postgresql.get_uri(), autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [_name(home)])
        run_all(connection, noted("second", "third"))
    assert is_away(raised.value)
    with home.database.write() as connection:
        run_all(connection, noted("first", "second", "third"))


PAUSE = Prepared(text("SELECT pg_sleep(2)"))


@pytest.mark.parametrize("when", ["while it is waited for", "before it is asked"])
def test_a_server_whose_host_vanished_holds_up_leases_for_seconds(
    tmp_path: Path, postgresql_url: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby has its address by then; without a limit the one thread that leases waits for a quarter of an hour."""
    quickly = {"keepalives_idle": 1, "keepalives_interval": 1, "tcp_user_timeout": 2000}
    monkeypatch.setattr(database, "POSTGRESQL_LINK", {name: quickly[name] for name in database.POSTGRESQL_LINK})
    called = threading.Event()

    def job() -> None:
        with home.database.write(durable=False) as connection:
            called.set()
            PAUSE.rows(connection)

    with VanishingHost(postgresql_url) as host, ThreadPoolExecutor(1) as pool:
        home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=host.url)
        home.database.execute_together([lambda: None], leasing=True)
        if when == "before it is asked":
            host.vanish()
        waiting = pool.submit(home.database.execute_together, [job], leasing=True)
        if when == "while it is waited for":
            assert called.wait(20)
            time.sleep(0.5)  # its statement has arrived, so that nothing is left to be sent again
            host.vanish()
        with pytest.raises(OperationalError) as raised:
            waiting.result(30)
        assert is_away(raised.value)
        assert home.database.execute_together([lambda: "done"], leasing=True)[0].value == "done"
        home.database.close()


def test_whoever_waits_with_statements_sent_together_holds_up_no_other_thread(home: Home) -> None:
    """The event loop would answer nobody for as long as a lock is held, and whoever has it could not give it back."""
    with ThreadPoolExecutor(1) as pool:
        with home.database.write() as connection:
            run_all(connection, noted("first"))

            def note() -> None:
                with home.database.write() as other:
                    run_all(other, noted("second", "first"))

            waiting = pool.submit(note)
            begun = time.monotonic()
            while time.monotonic() < begun + 0.5:
                time.sleep(0.01)
            assert not waiting.done()
            assert time.monotonic() < begun + 5.0
        with pytest.raises(IntegrityError):
            waiting.result(20)


def test_statements_larger_than_what_the_network_takes_at_once_are_sent_together(home: Home) -> None:
    large = "x" * 2**23
    with home.database.write() as connection:
        run_all(connection, [(NOTE, {"name": name, "value": large}) for name in "abc"])
    with home.database.read() as connection:
        assert connection.execute(select(func.count()).where(facts.c.value == large)).scalar_one() == 3


COUNT = Prepared(select(func.count()).select_from(facts).where(facts.c.value == "x"))


def test_a_statement_that_was_sent_is_executed_before_the_next_one(home: Home) -> None:
    with home.database.write() as connection:
        before = COUNT.send(connection)
        NOTE.send(connection, {"name": "first", "value": "x"})
        assert COUNT.scalar(connection) == 1
        NOTE.send(connection, {"name": "second", "value": "x"})
        assert connection.execute(select(func.count()).where(facts.c.value == "x")).scalar_one() == 2
        NOTE.send(connection, {"name": "third", "value": "x"})
        assert before() == [(0,)]
    with home.database.read() as connection:
        assert COUNT.scalar(connection) == 3


@pytest.mark.parametrize("by", ["the next one", "SQLAlchemy's", "the commit"])
def test_the_error_of_a_statement_that_was_sent_is_raised_and_nothing_is_written(home: Home, by: str) -> None:
    with home.database.write() as connection:
        run_all(connection, noted("first"))
    with pytest.raises(IntegrityError) as raised, home.database.write() as connection:
        run_all(connection, noted("second"))
        NOTE.send(connection, {"name": "first", "value": "x"})
        if by == "the next one":
            COUNT.rows(connection)
        elif by == "SQLAlchemy's":
            connection.execute(select(facts))
    assert str(raised.value.statement).startswith("INSERT INTO facts")
    with home.database.read() as connection:
        assert COUNT.scalar(connection) == 1


def test_what_was_sent_in_a_transaction_that_is_rolled_back_is_not_sent_in_the_next_one(home: Home) -> None:
    with pytest.raises(ZeroDivisionError), home.database.write() as connection:
        NOTE.send(connection, {"name": "first", "value": "x"})
        raise ZeroDivisionError
    with home.database.write() as connection:  # that same connection
        assert COUNT.scalar(connection) == 0


def test_a_commit_that_the_server_makes_a_rollback_is_none(home: Home) -> None:
    """Who goes on after a statement that failed would be told that it was written."""
    rolled_back = pytest.raises(OperationalError, match="rolled back")
    with rolled_back, home.database.write() as connection, pytest.raises(IntegrityError):
        run_all(connection, noted("first", "first"))
    with home.database.read() as connection:
        assert COUNT.scalar(connection) == 0


def writing(home: Home, *names: str, fails: Exception | None = None) -> Callable[[], str]:
    def job() -> str:
        with home.database.write(durable=False) as connection:
            for name in names:
                NOTE.send(connection, {"name": name, "value": "x"})
            if fails is not None:
                raise fails
        return names[0]

    return job


def test_a_job_whose_last_statement_fails_after_it_ended_takes_all_that_share_its_transaction_with_it(
    home: Home,
) -> None:
    """Its statements were sent with the next job's, which may not be told that it is its own fault, nor it that they
    were written.
    """
    with home.database.write() as connection:
        run_all(connection, noted("first"))
    for others in ([], [writing(home, "third")], [writing(home, "third", fails=Refusal(Reason.NOT_FOUND, "none"))]):
        with pytest.raises(OperationalError) as raised:
            home.database.execute_together([writing(home, "second"), writing(home, "first"), *others])
        assert is_away(raised.value)
        with home.database.read() as connection:
            assert COUNT.scalar(connection) == 1


def test_a_statement_that_the_server_does_not_prepare_fails_its_job_alone(home: Home) -> None:
    """What others had sent would be executed after it, and fail as the database's absence for all of them."""

    def job() -> None:
        with home.database.write(durable=False) as connection:
            Prepared(text("SELECT nothing_there FROM facts")).run(connection)

    first, second, third = home.database.execute_together([writing(home, "first"), job, writing(home, "third")])
    assert (first.error, third.error) == (None, None)
    assert isinstance(second.error, ProgrammingError)
    with home.database.read() as connection:
        assert COUNT.scalar(connection) == 2


def test_a_job_that_is_refused_undoes_what_it_sent_and_nothing_else(home: Home) -> None:
    refusal = Refusal(Reason.NOT_FOUND, "none")
    jobs = [writing(home, "first"), writing(home, "second", fails=refusal), writing(home, "third")]
    outcomes = home.database.execute_together(jobs)
    assert outcomes == [JobOutcome("first", None), JobOutcome(None, refusal), JobOutcome("third", None)]
    with home.database.read() as connection:
        names = select(facts.c.name).where(facts.c.value == "x").order_by(facts.c.name)
        assert connection.execute(names).scalars().all() == ["first", "third"]


def test_a_job_is_called_once_its_locks_are_held(home: Home) -> None:
    """One that read the time before a long wait would take the leases that were issued meanwhile for a clock's step."""
    called = Mock(return_value=None)
    with ThreadPoolExecutor(1) as pool:
        with home.database.write() as connection:
            locks.leasing(connection)
            waiting = pool.submit(home.database.execute_together, [called], leasing=True)
            time.sleep(0.3)
            assert not called.called
        waiting.result(20)
    assert called.called


@pytest.mark.parametrize(("admitted", "most", "given"), [(1, 3, [1, 2, 3]), (0, 4, [1, 2])], ids=["proven", "new"])
def test_a_lease_waits_for_the_server_three_times(
    home: Home, monkeypatch: pytest.MonkeyPatch, admitted: int, most: int, given: list[int]
) -> None:
    """A thread that waits gives the interpreter's lock away, and with a dozen times for each, leases bound the rest.

    A new node's waits once more where no count of newcomers' slots is kept, and the first one has its slot already.
    """
    coordinator = Coordinator(home, key=Ed25519PrivateKey.generate())
    peers = [f"{number:064x}" for number in range(4)]
    with home.database.write() as connection:
        for peer in peers:
            coordinator.register(connection, peer, REGISTRATION, now=1000.0)
            connection.execute(update(nodes).values(admitted=admitted, verified=admitted))
    Actors(home).publish(0)
    request = LeaseRequest(held_versions=(0,), slots=1, instance=INSTANCE)
    signed = SignedRequestLog(home.database)

    def lease(peer: str, nonce: str) -> LeaseReply:
        with signed.consume(nonce, now=1000.0) as connection:
            return coordinator.lease(connection, peer, request, now=1000.0)

    waits, flush = Mock(), PreparedSession.flush
    jobs = [partial(lease, peer, nonce) for peer, nonce in zip(peers, ["a", "b", "a", "d"], strict=True)]
    home.database.execute_together([partial(lease, peers[0], "z")] * 2, leasing=True)  # has the connection's prepared
    with monkeypatch.context() as patch:
        patch.setattr(PreparedSession, "flush", lambda self: [waits(), flush(self)][1])
        outcomes = home.database.execute_together(jobs, leasing=True)
    taken = [outcome.value.leases for outcome in outcomes if outcome.value is not None]
    assert [lease.slot for granted in taken for lease in granted] == given
    refusal = outcomes[2].error
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.REPLAYED_REQUEST
    others = 1 + 2 * (len(taken) - len(given)) + 2 + 1
    assert waits.call_count <= most * len(given) + others, "the locks, who gets none, a replay, and the commit"
    with home.database.read() as connection:
        held = connection.execute(select(slots.c.number).join(leases, leases.c.slot_id == slots.c.id)).scalars().all()
    assert sorted(held) == [0, *given]


def test_a_prepared_statement_outlives_what_is_rolled_back(home: Home) -> None:
    """By itself psycopg deallocates all of a connection's at a rollback, and every later request there would fail."""
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), home.database.write() as connection:
            progress(connection)
            for _ in range(10):  # from the sixth on psycopg would have it prepared
                connection.execute(select(func.count()).select_from(slots))
            1 / 0  # noqa: B018


def test_nobody_listening_is_waited_for_and_then_said(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="cannot be reached"):
        create_home(
            tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url="postgresql://nobody@127.0.0.1:1/none"
        )


def test_what_was_committed_lazily_is_on_disk_after_sync(home: Home, postgresql: Any) -> None:
    """A submission may be seen before it is durable, but its sender is told only afterwards."""
    with psycopg.connect(postgresql.get_uri(), autocommit=True) as watch:
        with home.database.write(durable=False) as connection:
            home_actors_note(connection)
        written = watch.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0]
        home.database.sync()
        assert watch.execute(_IS_FLUSHED, [written]).fetchone()[0]


def test_what_asked_for_a_sync_among_others_is_on_disk_with_their_commit(home: Home, postgresql: Any) -> None:
    inserted = list[str]()

    def note() -> None:
        with home.database.write(durable=False) as connection:
            home_actors_note(connection)
            inserted.append(connection.exec_driver_sql("SELECT pg_current_wal_insert_lsn()").scalar_one())
        home.database.sync()

    with psycopg.connect(postgresql.get_uri(), autocommit=True) as watch:
        assert home.database.execute_together([note, lambda: None]) == [
            JobOutcome(None, None, True),
            JobOutcome(None, None),
        ]
        assert watch.execute(_IS_FLUSHED, inserted).fetchone()[0]


_IS_FLUSHED = "SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn"


def home_actors_note(connection: Any) -> None:
    connection.exec_driver_sql("INSERT INTO facts VALUES ('note', 'x')")


def _name(home: Home) -> str:
    return home.database.url.split("/run_")[1].split("?")[0].join(["run_", ""])


@pytest.mark.parametrize(
    ("database_url", "ending"),
    [("sqlite", "stopped"), ("postgresql", "stopped"), ("postgresql", "cut off")],
    indirect=["database_url"],
)
def test_one_leads_and_another_takes_over(
    tmp_path: Path, database_url: str | None, postgresql: Any, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.run.leader.POLL_SECONDS", 0.1)
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=database_url)
    second = open_home(tmp_path, database_url=database_url)
    with leader_thread(Leader(second, name="second")) as successor:
        until(lambda: successor.leading)
        with leader_thread(Leader(home, name="first")) as first:
            time.sleep(0.5)  # several polls
            assert not first.leading
            if ending == "cut off":
                with psycopg.connect(postgresql.get_uri(), autocommit=True) as connection:
                    locked = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4"
                    connection.execute(locked)
                until(lambda: first.leading or successor.leading)
            else:
                with home.database.read() as connection:
                    assert last_leader(connection).name == "second"
    with leader_thread(Leader(home, name="first")) as first:
        until(lambda: first.leading)
    with home.database.read() as connection:
        assert last_leader(connection).name == "first"
    for one in (home, second):
        one.database.close()


def test_a_leader_ends_leases_though_nobody_asks_for_work(tmp_path: Path, database_url: str | None) -> None:
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=database_url)
    actors = Actors(home)
    actors.register("a")
    actors.publish(0)
    (lease,) = actors.lease("a", held=(0,))
    leader = Leader(home)
    leader.work(actors.now)
    with home.database.read() as connection:
        assert work.held_leases(connection, who("a")) == 1
    leader.work(lease.expires_at + 1.0)
    with home.database.read() as connection:
        assert work.held_leases(connection, who("a")) == 0
    home.database.close()
