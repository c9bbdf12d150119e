"""Nobody chooses what is trained on by not delivering it: late slots change hands, steps wait, gaps are logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from sqlalchemy import insert

from coordinator.dashboard.withheld import read_rows
from coordinator.run.home import create_home
from coordinator.storage.deliveries import read_withheld
from coordinator.storage.schema import UNKNOWN_SIGNAL, deliveries, nodes
from node.protocol.admission import Outcome
from node.protocol.messages import BatchEntry, Gap, Lease, MissedSlot, VerdictEntry
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec

Start = Callable[..., Actors]


@pytest.fixture
def start(tmp_path: Path, database_url: str | None) -> Iterator[Start]:
    """A run with policy 0 and proven nodes a, b and c."""
    opened = []

    def started(**rules: int) -> Actors:
        home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(**rules), database_url=database_url)
        opened.append(home)
        actors = Actors(home)
        actors.register("a", "b", "c")
        actors.publish(0)
        return actors

    yield started
    for home in opened:
        home.database.close()


def deliver(actors: Actors, node: str, lease_id: str) -> None:
    actors.submit(node, lease_id)
    actors.decide(actors.claim(), Outcome.ADMITTED)


def groups(actors: Actors, node: str, count: int, *, head: int, seconds: float = 0.0) -> None:
    """Admitted groups of the newest policy, one after the other."""
    for _ in range(count):
        (lease,) = actors.lease(node, held=(head,))
        actors.now += seconds
        deliver(actors, node, lease.lease_id)


def last_batch(actors: Actors) -> BatchEntry:
    return [entry for entry in actors.entries() if isinstance(entry, BatchEntry)][-1]


def overtake(start: Start, node: str, *, count: int = 1, **leasing: str) -> tuple[Actors, list[Lease]]:
    """A run of two groups a step at policy 1, while `node` still holds slots of policy 0, which the next step needs."""
    actors = start(groups_per_step=2, max_async=1)
    groups(actors, "a", 2, head=0)
    leases = actors.lease(node, held=(0,), count=count, **leasing)
    assert actors.assign() == 0
    actors.publish(1)
    return actors, leases


def hold_one_of_step_2(start: Start) -> tuple[Actors, Lease]:
    """A run of four groups a step, each of which took a second, and a slot of the third step that b holds."""
    actors = start(groups_per_step=4, max_async=0, steps=3)
    for step in (0, 1):
        groups(actors, "a", 4, head=step, seconds=1.0)
        assert actors.assign() == step
        actors.publish(step + 1)
    (lease,) = actors.lease("b", held=(2,), address="203.0.113.7")
    return actors, lease


def test_a_step_waits_for_a_withheld_slot_and_then_logs_who_had_it(start: Start) -> None:
    actors, (withheld,) = overtake(start, "b")
    assert last_batch(actors).gaps == (), "the next step may still use it"
    groups(actors, "a", 2, head=1)
    for _ in range(3):
        assert actors.assign() is None, "the slot's last chance"
        actors.now += 9
    actors.now += 4
    assert actors.assign() == 1
    batch = last_batch(actors)
    assert batch.gaps == (Gap(version=0, slot=withheld.slot),)
    assert batch.missed == (MissedSlot(version=0, slot=withheld.slot, node=who("b"), how="overtaken"),)
    with pytest.raises(Refusal) as refusal:
        actors.submit("b", withheld.lease_id)
    assert refusal.value.reason is Reason.STALE_POLICY
    assert actors.reading().problems == []


def test_a_step_does_not_begin_before_its_policy_is_out_where_that_would_cost_a_slot(start: Start) -> None:
    """Slow publishing must not shorten the time that a slow worker has: it can see policies, and no weights."""
    actors = start(groups_per_step=2, max_async=2)
    groups(actors, "a", 2, head=0)
    assert actors.assign() == 0
    (slow,) = actors.lease("b", held=(0,))
    groups(actors, "a", 2, head=0)
    assert actors.assign() is None, "the trainer has no policy 1"
    assert actors.assign(trained=1) == 1, "step 2 may still use the slot"
    actors.publish(1)
    groups(actors, "a", 2, head=1)
    actors.now += 29
    assert actors.assign(trained=2) is None
    actors.publish(2)
    assert actors.assign(trained=2) is None, "the wait for it has only begun"
    deliver(actors, "b", slow.lease_id)
    assert actors.assign(trained=2) == 2
    assert len(last_batch(actors).submissions) == 2
    assert actors.reading().problems == []


def test_what_others_deliver_in_time_is_no_gap(start: Start) -> None:
    actors, (withheld,) = overtake(start, "b", address="203.0.113.7")
    groups(actors, "a", 2, head=1)
    actors.give_back("b", withheld)
    assert actors.assign() is None
    (again,) = actors.lease("c", held=(0, 1), address="198.51.100.1")
    assert (again.version, again.slot) == (0, withheld.slot)
    deliver(actors, "c", again.lease_id)
    assert actors.assign() == 1
    batch = last_batch(actors)
    assert (len(batch.submissions), batch.gaps) == (2, ())
    assert batch.missed == (MissedSlot(version=0, slot=withheld.slot, node=who("b"), how="returned"),)


def test_a_slot_that_a_step_is_about_to_need_goes_from_a_late_node_to_a_proven_one(start: Start) -> None:
    """Whoever holds what it does not want until the lease runs out would stop the run for a lease's time."""
    actors, withheld = hold_one_of_step_2(start)
    groups(actors, "a", 3, head=2, seconds=1.0)
    assert actors.lease("c", held=(2,), address="198.51.100.1") == [], "three seconds are not late"
    actors.now += 1.5
    actors.register("new", admitted=0)
    assert actors.lease("new", held=(2,), address="192.0.2.1") == [], "a key that showed nothing takes over nothing"
    assert actors.lease("c", held=(2,), address="203.0.113.9") == [], "nor does, so soon, one of the same network"
    (again,) = actors.lease("c", held=(2,), address="198.51.100.1")
    assert again.slot == withheld.slot
    with pytest.raises(Refusal) as refusal:
        actors.submit("b", withheld.lease_id)
    assert refusal.value.reason is Reason.EXPIRED_LEASE
    deliver(actors, "c", again.lease_id)
    assert actors.assign() == 2
    assert last_batch(actors).gaps == ()


def test_junk_that_is_sent_at_once_makes_no_honest_lease_late(start: Start) -> None:
    """Else free keys could have a proven accomplice take over what honest nodes are at work on."""
    actors, honest = hold_one_of_step_2(start)
    for number in range(70):
        name, address = f"key{number}", f"192.0.{number}.1"
        actors.register(name, admitted=0)
        for lease in actors.lease(name, held=(2,), address=address):
            actors.submit(name, lease.lease_id)
            actors.decide(actors.claim(), Outcome.REJECTED)
    actors.now += 2
    assert all(lease.slot != honest.slot for lease in actors.lease("c", held=(2,), address="198.51.100.1"))
    deliver(actors, "b", honest.lease_id)


def test_a_slow_node_keeps_a_slot_that_no_step_needs_yet(start: Start) -> None:
    actors = start(groups_per_step=8, max_async=2)
    (slow,) = actors.lease("b", held=(0,), address="203.0.113.7")
    groups(actors, "a", 8, head=0, seconds=1.0)
    assert all(lease.slot != slow.slot for lease in actors.lease("c", held=(0,), address="198.51.100.1"))
    deliver(actors, "b", slow.lease_id)


def test_each_share_of_missing_slots_costs_a_wait(start: Start) -> None:
    """With one wait for any number, holding all slots at once would leave out any number of them."""
    actors, held = overtake(start, "b", count=2)
    assert len(held) == 2
    groups(actors, "a", 2, head=1)
    actors.now += 49
    assert actors.assign() is None, "two waits of 30 s, as one slot of two is more than a twentieth"
    actors.now += 12
    assert actors.assign() == 1
    assert len(last_batch(actors).gaps) == 2


def test_no_step_waits_for_slots_whose_policy_every_node_has_lost(start: Start) -> None:
    """Workers that were killed come back with the newest policy alone: a step of 24 waited a quarter of an hour."""
    actors, (lost,) = overtake(start, "a")
    actors.give_back("a", lost)
    groups(actors, "b", 2, head=1)
    assert actors.assign() is None, "a may still have policy 0"
    assert not actors.lease("a", held=(1,), count=0)
    assert actors.assign() == 1
    assert last_batch(actors).gaps == (Gap(version=0, slot=lost.slot),)
    assert actors.reading().problems == []


def test_a_step_waits_for_nodes_that_are_busy_with_a_newer_policy(start: Start) -> None:
    """They name the policy that they would begin with, and have the older ones on disk."""
    actors, (returned,) = overtake(start, "b")
    assert len(actors.lease("a", held=(0, 1))) == 1
    actors.give_back("b", returned)
    for node in ("a", "b"):
        groups(actors, node, 1, head=1)
    assert actors.assign() is None


def test_a_policy_of_a_version_that_no_database_holds_is_no_fault(start: Start) -> None:
    actors = start(groups_per_step=2, max_async=1)
    assert not actors.lease("a", held=(2**53 - 1,))


def test_an_unproven_node_cannot_have_a_step_wait_for_its_policies(start: Start) -> None:
    """Free keys say that they hold everything."""
    actors, (lost,) = overtake(start, "a")
    actors.give_back("a", lost)
    groups(actors, "a", 2, head=1)
    actors.register("stranger", admitted=0)
    assert not actors.lease("stranger", held=(0, 1), count=0)
    assert actors.assign() == 1


def test_junk_for_the_last_slots_cannot_hold_up_a_step_for_ever(start: Start) -> None:
    """Each rejection opens the slot again; past the wait, nobody gets it any more."""
    actors, (late,) = overtake(start, "b")
    groups(actors, "a", 2, head=1)
    actors.now += 29
    actors.submit("b", late.lease_id)
    actors.now += 2
    assert actors.assign() is None, "what was delivered is judged first"
    actors.decide(actors.claim(), Outcome.REJECTED)
    assert all(lease.version == 1 for lease in actors.lease("c", held=(0, 1), count=3))
    assert actors.assign() == 1
    assert last_batch(actors).gaps == (Gap(version=0, slot=late.slot),)
    assert last_batch(actors).missed == (), "a rejected submission is in the log already"
    assert actors.reading().problems == []


def test_a_slot_that_failed_twice_goes_to_the_longest_proven_first(start: Start) -> None:
    """Else a few keys in several networks could pass a slot on until its time is over."""
    actors = start(groups_per_step=4)
    actors.register("veteran", "third", admitted=5000)
    actors.register("recent", admitted=3)
    for name, address in (("veteran", "198.51.100.1"), ("third", "198.51.101.1"), ("recent", "192.0.2.1")):
        actors.give_back(name, *actors.lease(name, held=(0,), address=address))
        actors.now += 6
    (first,) = actors.lease("a", held=(0,), address="203.0.113.7")
    actors.give_back("a", first)
    (taken,) = actors.lease("recent", held=(0,), address="192.0.2.1")
    assert taken.slot != first.slot
    (again,) = actors.lease("veteran", held=(0,), address="198.51.100.1")
    assert again.slot == first.slot


def test_near_the_end_no_other_slot_takes_a_withheld_ones_place(start: Start) -> None:
    """The run ends before the newest policies' last chance, but nothing is leased beyond what its steps need."""
    actors = start(groups_per_step=2, max_async=2, steps=2)
    groups(actors, "a", 2, head=0)
    (withheld,) = actors.lease("b", held=(0,))
    assert actors.assign() == 0
    actors.publish(1)
    groups(actors, "a", 1, head=1)
    assert actors.assign() is None
    actors.give_back("b", withheld)
    (again,) = actors.lease("c", held=(0,), address="198.51.100.1")
    deliver(actors, "c", again.lease_id)
    assert actors.assign() == 1
    assert actors.reading().problems == []


def test_a_clock_that_was_ahead_holds_up_no_step(start: Start) -> None:
    actors = start(groups_per_step=2, max_async=1)
    groups(actors, "a", 2, head=0)
    actors.lease("b", held=(0,))
    assert actors.assign() == 0
    actors.now += 86_400
    actors.publish(1)
    actors.now += 1
    groups(actors, "a", 2, head=1)
    actors.now -= 86_400
    assert actors.assign() == 1


@pytest.mark.parametrize(
    ("database_url", "held_back"),
    [("sqlite", "returned"), ("sqlite", "held"), ("postgresql", "held")],
    indirect=["database_url"],
)
def test_a_third_of_the_nodes_that_withhold_what_they_dislike_change_nothing(start: Start, held_back: str) -> None:
    """Without waiting, 36 slots of the kind that was withheld were never trained on, and their share fell from 0.53
    to 0.39.
    """
    actors = start(groups_per_step=6, max_async=1, steps=12)
    nodes = {name: f"198.51.{at}.1" for at, name in enumerate(("a", "b", "c"))}
    head = 0
    for _ in range(4000):
        actors.now += 0.5
        for name, address in nodes.items():
            held = (head,) if head == 0 else (head - 1, head)
            for lease in actors.lease(name, held=held, address=address):
                if name == "c" and lease.slot % 2:  # the kind that it dislikes
                    if held_back == "returned":
                        actors.give_back(name, lease)
                else:
                    deliver(actors, name, lease.lease_id)
        if actors.assign() is not None:
            head += 1
            actors.publish(head)
        if head == 12:
            break
    assert head == 12, "the run went on to its end"
    batches = [entry for entry in actors.entries() if isinstance(entry, BatchEntry)]
    assert sum(len(batch.gaps) for batch in batches) == 0
    used = {name for batch in batches for name in batch.submissions}
    trained = {(entry.version, entry.slot) for entry in actors.entries() if isinstance(entry, VerdictEntry)}
    assert len(trained) == len(used)
    assert trained == {(version, slot) for version, last in dict(sorted(trained)).items() for slot in range(last + 1)}
    assert {miss.node for batch in batches for miss in batch.missed} == {who("c")}
    reading = actors.reading()
    assert reading.problems == []
    with actors.home.database.read() as connection:
        withheld = read_withheld(connection)
    logged = reading.withholding
    for node, counted in withheld.items():
        assert counted.by_environment == logged.by_environment[node]
        assert counted.by_signal == logged.by_signal[node]
    assert set(withheld) == {who("c")}


def test_the_runs_page_blames_nobody_because_many_are_looked_at(start: Start) -> None:
    """Each as uneven as one in 60 honest nodes is: alone it is worth a look, among a hundred it is what chance does."""
    spec = msgspec.structs.replace(spec_of(), environments=tuple(map(EnvironmentSpec, ("arithmetic", "reverse"))))
    actors = start()
    for names in ([0], range(1, 100)):
        with actors.home.database.write() as connection:
            for name in map(str, names):
                known = {"software": "", "engine": "", "registered_at": 0.0, "seen_at": 0.0}
                connection.execute(insert(nodes).values(node=name, **known))
                for environment, delivered, missed in ((0, 20, 1), (1, 10, 7)):
                    counted = {"environment": environment, "signal": UNKNOWN_SIGNAL}
                    connection.execute(
                        insert(deliveries).values(node=name, delivered=delivered, missed=missed, **counted)
                    )
            rows = read_rows(connection, spec=spec)
        assert {bool(row.kind) for row in rows} == {bool(row.odds) for row in rows} == {len(rows) == 1}
