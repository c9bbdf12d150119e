"""The run's state: what a crash, a cheat or bad luck must never do to it."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import select
from storm import STORMS

from coordinator.errors import BadConfiguration, StorageFault, StoreAway
from coordinator.run.home import Home, create_home, open_home
from coordinator.storage import log, rebuilds, verdicts, work
from coordinator.storage.faults import is_away
from coordinator.storage.folder_blobs import HELD_BYTES, FolderBlobs
from coordinator.storage.schema import SlotState, groups, metadata, nodes, slots, submissions
from coordinator.storage.verdicts import QueueItem
from node.protocol import merkle
from node.protocol.admission import Outcome
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, VerdictEntry
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import decode, digest


@pytest.fixture
def home(tmp_path: Path, database_url: str | None) -> Iterator[Home]:
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=database_url)
    yield home
    home.database.close()


@pytest.fixture
def actors(home: Home) -> Actors:
    actors = Actors(home)
    actors.register("a", "b")
    actors.publish(0)
    return actors


def test_the_migrations_make_the_schema(home: Home) -> None:
    with home.database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_another_key_or_spec_does_not_open_a_runs_folder(home: Home) -> None:
    url = home.database.url
    with pytest.raises(BadConfiguration, match="another key"):
        create_home(home.folder, public_key=bytes(32), spec=home.spec, database_url=url)
    with pytest.raises(BadConfiguration, match="differs"):
        create_home(home.folder, public_key=PUBLIC_KEY, spec=spec_of(steps=99), database_url=url)
    again = open_home(home.folder, database_url=url)
    assert (again.run_id, again.spec) == (home.run_id, home.spec)
    again.database.close()


def test_no_run_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="start `swarmproof coordinator`"):
        open_home(tmp_path)


def test_at_most_max_async_plus_one_steps_of_work_are_in_flight(actors: Actors) -> None:
    actors.register(*(f"n{i}" for i in range(20)))
    leased = [lease for i in range(20) for lease in actors.lease(f"n{i}", held=(0,), count=3)]
    assert len(leased) == 9  # (2 + 1) steps of 3 groups
    assert sorted(lease.slot for lease in leased) == list(range(9))


def test_one_node_cannot_hoard_leases(actors: Actors) -> None:
    first = actors.lease("a", held=(0,), count=100)
    assert len(first) == 3
    assert actors.lease("a", held=(0,), count=100) == []
    actors.submit("a", first[0].lease_id)
    assert actors.lease("a", held=(0,), count=100) == [], "a submission without a verdict counts too"
    assert actors.decide(actors.claim(), Outcome.ADMITTED)
    assert len(actors.lease("a", held=(0,), count=100)) == 1


def test_dropping_a_bad_draw_gains_nothing(actors: Actors) -> None:
    """An abandoned slot comes back as it was: same version, same number, so same problem and seeds."""
    (lease,) = actors.lease("a", held=(0,))
    actors.now += 51
    (again,) = actors.lease("b", held=(0,))
    assert (again.version, again.slot) == (lease.version, lease.slot)
    with pytest.raises(Refusal) as refusal:
        actors.submit("a", lease.lease_id)
    assert refusal.value.reason is Reason.EXPIRED_LEASE


def test_whoever_delivers_after_another_is_told_that_its_lease_has_ended(actors: Actors) -> None:
    """Told that the policy is too old, an operator would look into how policies are fetched, and find nothing."""
    (late,) = actors.lease("a", held=(0,))
    actors.now += 51
    (again,) = actors.lease("b", held=(0,))
    assert again.slot == late.slot

    def assert_expired() -> None:
        with pytest.raises(Refusal) as refusal:
            actors.submit("a", late.lease_id)
        assert refusal.value.reason is Reason.EXPIRED_LEASE

    actors.submit("b", again.lease_id)
    assert_expired()
    actors.decide(actors.claim(), Outcome.ADMITTED)
    assert_expired()
    for _ in range(2):
        actors.work("b")
    assert actors.assign() == 0
    assert_expired()


def test_a_new_node_gets_one_slot_and_one_more_with_each_admitted_group(actors: Actors) -> None:
    actors.register("new", admitted=0)
    for count in (1, 2, 3, 3):
        leased = actors.lease("new", held=(0,), count=9)
        assert len(leased) == count
        for lease in leased[:1]:
            actors.submit("new", lease.lease_id)
            actors.decide(actors.claim(), Outcome.ADMITTED)
        with actors.home.database.write() as connection:
            for lease in leased[1:]:
                work.return_lease(
                    connection, node=who("new"), lease_id=lease.lease_id, spec=actors.home.spec, now=actors.now
                )


def test_free_keys_that_hoard_leases_cannot_keep_proven_nodes_from_working(actors: Actors) -> None:
    """Twenty new keys take whatever they get and let it lapse, for ten lease times, before anybody else asks."""
    hoarders = [f"h{i}" for i in range(20)]
    actors.register(*hoarders, admitted=0)
    for _ in range(10):
        held = [lease for name in hoarders for lease in actors.lease(name, held=(0,), count=9)]
        assert len(held) <= 4, "half of nine slots"
        mine = actors.lease("a", held=(0,), count=2)
        assert len(mine) == 2
        with actors.home.database.write() as connection:
            for lease in mine:
                work.return_lease(
                    connection, node=who("a"), lease_id=lease.lease_id, spec=actors.home.spec, now=actors.now
                )
        actors.now += 51


def test_free_keys_of_a_few_networks_leave_newcomers_of_another_a_slot(actors: Actors) -> None:
    """400 keys that took leases and held them kept a newcomer out for as long as they liked."""
    hoarders = [f"h{i}" for i in range(50)]
    actors.register(*hoarders, "newcomer", "neighbour", admitted=0)
    held = [lease for name in hoarders for lease in actors.lease(name, held=(0,), address="203.0.113.7")]
    assert 0 < len(held) < 4, "half of nine slots are for new nodes"
    assert actors.lease("newcomer", held=(0,), address="198.51.100.1")
    assert not actors.lease("neighbour", held=(0,), address="203.0.113.200"), "of the same network"


def test_what_a_node_gives_back_goes_to_others_first(actors: Actors) -> None:
    """Keys that returned slots and took them again kept everybody else from them, a fifth of a second at a time."""
    actors.register("c")
    (first,) = actors.lease("a", held=(0,), address="203.0.113.7")
    actors.give_back("a", first)
    for name, address in (("a", "203.0.113.7"), ("b", "203.0.113.8")):
        (taken,) = actors.lease(name, held=(0,), address=address)
        assert taken.slot != first.slot
    (taken,) = actors.lease("c", held=(0,), address="198.51.100.1")
    assert taken.slot == first.slot
    actors.give_back("c", taken)
    actors.now += work.OTHERS_FIRST_SECONDS
    (taken,) = actors.lease("a", held=(0,), address="203.0.113.7")
    assert taken.slot == first.slot, "nobody else wanted it"


def test_a_node_that_returns_more_than_it_does_waits(actors: Actors) -> None:
    """Nine proven keys returned 197 leases and took 166 of them again while others waited."""
    actors.register("returner", admitted=1)
    for _ in range(2):
        actors.give_back("returner", *actors.lease("returner", held=(0,)))
    (third,) = actors.lease("returner", held=(0,))
    actors.give_back("returner", third)
    assert actors.lease("returner", held=(0,)) == []
    actors.now += 4
    (lease,) = actors.lease("returner", held=(0,))
    actors.submit("returner", lease.lease_id)
    actors.decide(actors.claim(), Outcome.ADMITTED)
    actors.give_back("returner", *actors.lease("returner", held=(0,)))
    assert actors.lease("returner", held=(0,)), "what it did counts against what it gave back"


def test_letting_a_lease_lapse_makes_a_node_wait(actors: Actors) -> None:
    actors.lease("a", held=(0,))
    actors.now += 51
    assert actors.lease("b", held=(0,)), "whoever asks next ends the lease"
    assert actors.lease("a", held=(0,)) == []
    actors.now += 4
    assert actors.lease("a", held=(0,))


def test_a_slot_that_a_node_lets_lapse_twice_goes_to_others_alone(actors: Actors) -> None:
    """Once an answer may have been lost. A problem that nobody can do would take up a proven node for good."""
    for _ in range(2):
        (lapsed,) = actors.lease("a", held=(0,))
        assert lapsed.slot == 0
        actors.now += 60
        assert actors.lease("a", held=(0,)) == [], "it waits"
        actors.now += 8
    (other,) = actors.lease("a", held=(0,))
    assert other.slot != 0
    (again,) = actors.lease("b", held=(0,))
    assert again.slot == 0


def test_groups_without_signal_are_credited_and_a_step_waits_for_others(
    tmp_path: Path, database_url: str | None
) -> None:
    """Online filtering: else a step would learn from whatever few of its groups are neither all right nor all wrong."""
    spec = spec_of(groups_per_step=2, max_async=0)
    spec = msgspec.structs.replace(spec, batch=msgspec.structs.replace(spec.batch, only_signal=True))
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec, database_url=database_url)
    actors = Actors(home)
    actors.register("a")
    actors.publish(0)
    useful = []
    for best in (0.5, 1.0, 0.5, 0.5, 1.0):
        assert actors.assign() is None
        (lease,) = actors.lease("a", held=(0,))
        submission = actors.submit("a", lease.lease_id)
        actors.decide(actors.claim(), Outcome.ADMITTED, best=best)
        useful += [submission] if best == 1.0 else []
    assert actors.assign() == 0
    with home.database.read() as connection:
        entry = decode(LogEntry, log.leaves(connection, 0, log.size(connection))[-1], max_bytes=2**20)
        (admitted,) = connection.execute(select(nodes.c.admitted).where(nodes.c.node == who("a"))).scalars()
    assert set(entry.submissions) == set(useful)
    assert admitted == 105
    assert actors.reading().problems == []
    home.database.close()


def test_rejections_make_a_node_wait_longer_each_time(actors: Actors) -> None:
    waits = []
    for _ in range(4):
        (lease,) = actors.lease("a", held=(0,))
        actors.submit("a", lease.lease_id)
        actors.decide(actors.claim(), Outcome.REJECTED)
        before = actors.now
        while not (got := actors.lease("a", held=(0,))):
            actors.now += 1
        waits.append(actors.now - before)
        with actors.home.database.write() as connection:
            work.return_lease(
                connection, node=who("a"), lease_id=got[0].lease_id, spec=actors.home.spec, now=actors.now
            )
    assert waits == [4, 8, 10, 10]


def test_a_deferred_submission_waits_its_time_for_anybody_and_has_all_its_attempts_left(actors: Actors) -> None:
    """What waits for a policy must hold up no other work, and must not be given up for having waited."""
    waiting, other = (actors.lease(node, held=(0,))[0] for node in ("a", "b"))
    first = actors.submit("a", waiting.lease_id)
    actors.now += 1
    second = actors.submit("b", other.lease_id)
    for _ in range(10):
        claimed = actors.claim("first")
        assert claimed is not None
        assert (claimed.submission, claimed.attempts) == (first, 0)
        with actors.home.database.write() as connection:
            verdicts.defer(connection, claimed, until=actors.now + 5)
        actors.now += 5
    with actors.home.database.write() as connection:
        verdicts.defer(connection, claimed, until=actors.now + 5)
    taken = actors.claim("first")
    assert taken is not None
    assert taken.submission == second
    assert actors.decide(taken, Outcome.ADMITTED)
    assert actors.claim("first") is None, "not even for the verifier that deferred it"
    actors.now += 5
    again = actors.claim("second")
    assert again is not None
    assert actors.decide(again, Outcome.ADMITTED)
    with actors.home.database.write() as connection:
        verdicts.defer(connection, claimed, until=actors.now)
    assert actors.claim("first") is None, "what is decided stays decided"


@pytest.mark.parametrize("is_over", [False, True], ids=["at work", "deferred after an attempt"])
def test_a_verifier_that_defers_twice_takes_nothing_from_the_next_one(actors: Actors, is_over: bool) -> None:
    """Where the engine fails late in a batch, all of it is put back, with what was put back long before."""
    (lease,) = actors.lease("a", held=(0,))
    actors.submit("a", lease.lease_id)

    def claim(verifier: str) -> QueueItem:
        claimed = actors.claim(verifier)
        assert claimed is not None
        return claimed

    def defer(claimed: QueueItem) -> None:
        with actors.home.database.write() as connection:
            verdicts.defer(connection, claimed, until=actors.now + 1)

    early = claim("first")
    defer(early)
    actors.now += 2
    held = claim("second")
    if is_over:
        actors.decide(held, Outcome.INDETERMINATE)
        defer(claim("second"))
    defer(early)
    actors.now += 2
    if is_over:
        assert claim("third").attempts == 1, "what the second could not decide stays counted"
    else:
        assert actors.claim("third") is None, "the second one would work for nothing"
        assert actors.decide(held, Outcome.ADMITTED)


def test_a_verifier_that_died_loses_nothing(actors: Actors) -> None:
    (lease,) = actors.lease("a", held=(0,))
    name = actors.submit("a", lease.lease_id)
    assert actors.claim("first") is not None
    assert actors.claim("second") is None, "while the first may still be at work"
    again = actors.claim("first")
    assert again is not None, "a verifier that was restarted finds its own work"
    actors.now += 31
    taken = actors.claim("second")
    assert taken is not None
    assert taken.submission == name
    assert actors.decide(taken, Outcome.ADMITTED)
    assert not actors.decide(again, Outcome.REJECTED), "the slower verdict is dropped"
    assert sum(isinstance(entry, VerdictEntry) for entry in actors.entries()) == 1


@pytest.mark.parametrize("failed", range(verdicts.MAX_ATTEMPTS))
def test_a_late_doubt_takes_nothing_from_the_verifier_that_has_the_claim_by_now(actors: Actors, failed: int) -> None:
    """A third one would measure the same once more, or the slot be given up while it is being judged."""
    (lease,) = actors.lease("a", held=(0,))
    actors.submit("a", lease.lease_id)
    for _ in range(failed):
        actors.decide(actors.claim(), Outcome.INDETERMINATE)
    late = actors.claim("first")
    actors.now += 31
    held = actors.claim("second")
    assert held is not None
    assert not actors.decide(late, Outcome.INDETERMINATE)
    assert actors.claim("third") is None
    assert actors.decide(held, Outcome.ADMITTED)


def test_a_doubt_of_a_verifiers_earlier_process_is_late_too(actors: Actors) -> None:
    (lease,) = actors.lease("a", held=(0,))
    actors.submit("a", lease.lease_id)
    late, held = actors.claim("first"), actors.claim("first")
    assert not actors.decide(late, Outcome.INDETERMINATE)
    assert actors.claim("second") is None
    assert actors.decide(held, Outcome.ADMITTED)


@pytest.mark.parametrize("is_deferred", [False, True], ids=["at work", "deferred"])
def test_a_late_verdict_that_decides_counts_once(actors: Actors, is_deferred: bool) -> None:
    """What was measured need not be measured again, and the next verifier's verdict is dropped."""
    (lease,) = actors.lease("a", held=(0,))
    actors.submit("a", lease.lease_id)
    late = actors.claim("first")
    actors.now += 31
    held = actors.claim("second")
    if is_deferred:
        with actors.home.database.write() as connection:
            verdicts.defer(connection, held, until=actors.now)
    assert actors.decide(late, Outcome.ADMITTED)
    assert actors.claim("third") is None
    assert not actors.decide(held, Outcome.ADMITTED)
    assert sum(isinstance(entry, VerdictEntry) for entry in actors.entries()) == 1


def test_late_verdicts_leave_a_group_that_is_being_rebuilt_alone(actors: Actors) -> None:
    """A first verdict would admit it twice; a rebuild that failed would end the one that is about to succeed."""
    (lease,) = actors.lease("a", held=(0,))
    name = actors.submit("a", lease.lease_id)
    late = actors.claim("first")
    actors.now += 31
    assert actors.decide(actors.claim("second"), Outcome.ADMITTED)
    with actors.home.database.write() as connection:
        rebuilds.request(connection, name)
    early = actors.claim("first")
    actors.now += 31
    held = actors.claim("second")
    assert held.rebuild
    assert not actors.decide(late, Outcome.ADMITTED)
    with actors.home.database.write() as connection:
        for again in (True, False):
            assert not rebuilds.finish(connection, early, blob=None, again=again)
        assert rebuilds.is_queued(connection, name)
        assert rebuilds.finish(connection, held, blob="new")
        assert not rebuilds.finish(connection, early, blob="other")
        assert rebuilds.blob_of(connection, name) == "new"
    assert sum(isinstance(entry, VerdictEntry) for entry in actors.entries()) == 1


def test_doubt_is_nobodys_fault(actors: Actors) -> None:
    (lease,) = actors.lease("a", held=(0,))
    actors.submit("a", lease.lease_id)
    for _ in range(verdicts.MAX_ATTEMPTS):
        claimed = actors.claim()
        assert claimed is not None
        actors.decide(claimed, Outcome.INDETERMINATE)
    assert actors.claim() is None
    (again,) = actors.lease("a", held=(0,))
    assert again.slot == lease.slot, "the slot is given out anew, to the same node too, and without a wait"


@pytest.mark.parametrize(
    ("database_url", "seed", "max_async"),
    [(*storm, max_async) for storm, max_async in zip(STORMS, (0, 1, 2, 2), strict=True)],
    indirect=["database_url"],
)
def test_any_order_of_events_loses_and_repeats_nothing(
    tmp_path: Path, database_url: str | None, max_async: int, seed: int
) -> None:
    """Workers that are slow, die, cheat or race, in a random order, until the run's last step."""
    home = create_home(
        tmp_path, public_key=PUBLIC_KEY, spec=spec_of(max_async=max_async, steps=6), database_url=database_url
    )
    actors, rng = Actors(home), random.Random(seed)
    names = [f"n{i}" for i in range(5)]
    actors.register(*names, admitted=0)
    actors.publish(0)
    head, training_now, held = 0, False, []
    asleep: list[QueueItem] = []
    for _ in range(6000):
        actors.now += rng.random() * 5
        event = rng.choice(["lease", "submit", "submit", "verify", "verify", "assign", "publish"])
        if event == "lease":
            name = rng.choice(names)
            versions = tuple(range(max(0, head - rng.randint(0, 3)), head + 1))
            held += [(name, lease) for lease in actors.lease(name, held=versions, count=rng.randint(1, 3))]
        elif event == "submit" and held:
            name, lease = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.8:  # else the worker died
                try:
                    actors.submit(name, lease.lease_id)
                except Refusal as refusal:
                    assert refusal.reason in (Reason.STALE_POLICY, Reason.EXPIRED_LEASE)
        elif event == "verify":
            claimed = actors.claim(f"v{rng.randrange(3)}")
            if claimed is not None and rng.random() < 0.2:
                asleep.append(claimed)
                claimed = asleep.pop(0) if len(asleep) > 3 else None
            if claimed is not None and rng.random() < 0.9:  # else the verifier died
                weights = [0.1] * 3 if claimed.node == who("n0") else [0.8, 0.1, 0.1]
                actors.decide(claimed, rng.choices(list(Outcome), weights)[0])
        elif event == "assign" and not training_now:
            training_now = actors.assign() is not None
        elif event == "publish" and training_now:
            head, training_now = head + 1, False
            actors.publish(head)
        if head == 6:
            break
    assert head == 6, "the run went on to its end"
    check_log(actors, max_async=max_async)
    assert actors.reading().problems == [], "no slot was left out without a word"
    home.database.close()


def check_log(actors: Actors, *, max_async: int) -> None:
    """The log alone shows that every admitted group was trained on once, in time, or waits at the end."""
    admitted: dict[str, VerdictEntry] = {}
    slots_done, used = set(), set()
    for entry in actors.entries():
        if isinstance(entry, VerdictEntry) and entry.outcome is Outcome.ADMITTED:
            assert (entry.version, entry.slot) not in slots_done, "one slot was admitted twice"
            slots_done.add((entry.version, entry.slot))
            admitted[entry.submission] = entry
        if isinstance(entry, BatchEntry):
            assert len(entry.submissions) >= actors.home.spec.batch.groups_per_step
            for name in entry.submissions:
                assert name in admitted, "trained on something that was not admitted"
                assert name not in used, "trained on twice"
                assert entry.step - max_async <= admitted[name].version <= entry.step
                used.add(name)
    left = admitted.keys() - used
    with actors.home.database.read() as connection:
        waiting = connection.execute(
            select(groups.c.submission).join(slots).where(slots.c.state == SlotState.ADMITTED)
        ).scalars()
        assert left == set(waiting), "an admitted group was lost"


def test_the_log_proves_itself(actors: Actors) -> None:
    for version in range(1, 40):
        actors.publish(version)
    with actors.home.database.read() as connection:
        size = log.size(connection)
        leaves = log.leaves(connection, 0, size)
        whole = log.root(connection, size)
        for index in (0, 1, size // 2, size - 1):
            merkle.verify_inclusion(
                merkle.leaf_hash(leaves[index]),
                index=index,
                size=size,
                proof=log.inclusion(connection, index, size),
                root_hash=whole,
            )
        for first in (1, 7, 8, size):
            merkle.verify_consistency(
                first=first,
                first_root=log.root(connection, first),
                second=size,
                second_root=whole,
                proof=log.consistency(connection, first, size),
            )
    policies = [entry for entry in actors.entries() if isinstance(entry, PolicyEntry)]
    assert [entry.version for entry in policies] == list(range(40))


def test_two_writers_append_without_losing_an_entry(home: Home) -> None:
    def write(start: int) -> None:
        for version in range(start, start + 40):
            entry = PolicyEntry(version=version, manifest_digest="0" * 64, result_digest="0" * 64)
            with home.database.write() as connection:
                log.append(connection, entry)

    threads = [threading.Thread(target=write, args=(start,)) for start in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {entry.version for entry in Actors(home).entries() if isinstance(entry, PolicyEntry)}
    assert found == {*range(40), *range(100, 140)}


def test_a_transaction_that_fails_leaves_nothing(actors: Actors) -> None:
    before = len(actors.entries())
    with pytest.raises(RuntimeError), actors.home.database.write() as connection:
        log.append(connection, PolicyEntry(version=5, manifest_digest="0" * 64, result_digest="0" * 64))
        raise RuntimeError("the process died here")
    assert len(actors.entries()) == before


def test_a_damaged_blob_is_noticed(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    name = blobs.put(b"evidence")
    assert blobs.get(name, max_bytes=8) == b"evidence"
    blobs.path(name).write_bytes(b"evidencf")
    with pytest.raises(StorageFault, match="damaged"):
        blobs.get(name, max_bytes=8)
    with pytest.raises(StorageFault, match="more than 7 bytes"):
        blobs.get(name, max_bytes=7)


@pytest.mark.parametrize("mount_point", [None, "blobs"])
def test_a_folder_that_is_gone_is_waited_for_and_misses_no_blob(tmp_path: Path, mount_point: str | None) -> None:
    """A disk that is no longer mounted leaves no folder, or an empty one: nothing is lost, and all of it comes back."""
    blobs = FolderBlobs(tmp_path / "blobs")
    name = blobs.put(b"evidence")
    (tmp_path / "blobs").rename(tmp_path / "unmounted")
    if mount_point:
        (tmp_path / mount_point).mkdir()
    for use in (
        lambda: blobs.get(name, max_bytes=8),
        lambda: blobs.verified_path(name),
        lambda: blobs.put(b"another"),
    ):
        with pytest.raises(StoreAway, match="see that its disk is mounted") as raised:
            use()
        assert is_away(raised.value)
    if mount_point:
        (tmp_path / mount_point).rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "blobs")
    assert blobs.get(name, max_bytes=8) == b"evidence"
    with pytest.raises(StorageFault, match="is missing"):
        blobs.get("0" * 64, max_bytes=8)


@pytest.mark.parametrize("mount_point", [False, True])
def test_a_start_without_the_blobs_disk_makes_no_second_folder(tmp_path: Path, *, mount_point: bool) -> None:
    """What a restarted coordinator took would lie below the mount point, and be hidden when the disk is back."""
    run = {"public_key": PUBLIC_KEY, "spec": spec_of()}
    data, away = tmp_path / "run", tmp_path / "unmounted"
    create_home(data, **run).database.close()
    (data / "blobs").rename(away)
    if mount_point:
        (data / "blobs").mkdir()
    with pytest.raises(StoreAway, match="see that its disk is mounted"):
        create_home(data, **run)
    home = open_home(data)
    with pytest.raises(StoreAway):
        home.blobs.put(b"evidence")
    with pytest.raises(StoreAway):
        home.blobs.clear_leftovers()
    home.database.close()
    assert not any((data / "blobs").glob("*"))
    if mount_point:
        (data / "blobs").rmdir()
    away.rename(data / "blobs")
    create_home(data, **run).database.close()


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_blobs_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageFault):
        FolderBlobs(tmp_path).path(name)


@pytest.mark.parametrize("size", [1, HELD_BYTES, HELD_BYTES + 1, 3 * HELD_BYTES])
def test_half_an_upload_leaves_nothing(tmp_path: Path, size: int) -> None:
    blobs = FolderBlobs(tmp_path)
    with pytest.raises(ConnectionError), blobs.incoming(max_bytes=2 * size) as incoming:
        incoming.write(bytes(size))
        raise ConnectionError
    with pytest.raises(ValueError, match="closed"):
        incoming.sync()  # by a thread, after the sender has gone
    with pytest.raises(Refusal), blobs.incoming(max_bytes=2 * size) as incoming:
        incoming.write(bytes(size))
        incoming.sync()
        incoming.write(bytes(size + 1))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("pieces", [[b""], [bytes(HELD_BYTES), b"x"], [b"x"] * 3, [bytes(3 * HELD_BYTES), b"", b"y"]])
def test_an_upload_is_stored_as_it_came(tmp_path: Path, pieces: list[bytes]) -> None:
    blobs, whole = FolderBlobs(tmp_path), b"".join(pieces)
    with blobs.incoming(max_bytes=len(whole)) as incoming:
        for piece in pieces:
            incoming.write(piece)
        incoming.sync()
        incoming.commit()
    assert blobs.get(digest(whole), max_bytes=len(whole)) == whole
    assert list((tmp_path / "incoming").iterdir()) == []


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "incoming").mkdir()
    old, under_way = tmp_path / "incoming" / "half", tmp_path / "incoming" / "another process writes this"
    for path in (old, under_way):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    blobs = FolderBlobs(tmp_path)
    blobs.clear_leftovers()
    assert list((tmp_path / "incoming").iterdir()) == [under_way]


def test_submissions_table_is_what_receipts_read(actors: Actors) -> None:
    (lease,) = actors.lease("a", held=(0,))
    name = actors.submit("a", lease.lease_id)
    actors.decide(actors.claim(), Outcome.ADMITTED)
    with actors.home.database.read() as connection:
        row = connection.execute(select(submissions).where(submissions.c.submission == name)).one()
        (leaf,) = log.leaves(connection, row.log_index, row.log_index + 1)
    entry = decode(LogEntry, leaf, max_bytes=2**20)  # type: ignore[arg-type]
    assert (entry.submission, entry.outcome, entry.tokens) == (name, row.outcome, row.tokens)


def test_a_verifier_takes_several_submissions_at_once_and_nobody_else_any_of_them(home: Home) -> None:
    actors = Actors(home)
    actors.register("a", "b")
    actors.publish(0)
    names = [actors.submit(node, actors.lease(node, held=(0,))[0].lease_id) for node in ("a", "b")]
    with home.database.write() as connection:
        taken = verdicts.claim(connection, verifier="first", spec=home.spec, now=actors.now, seconds=30.0, most=8)
        assert verdicts.claim(connection, verifier="second", spec=home.spec, now=actors.now, seconds=30.0, most=8) == []
    assert [one.submission for one in taken] == names


def test_renewed_claims_are_nobody_elses_until_they_end_and_what_was_lost_is_not_taken_back(home: Home) -> None:
    """A verdict may take an hour where a policy is read from disk, and its verifier may die in the first minute."""
    actors = Actors(home)
    actors.register("a", "b")
    actors.publish(0)
    names = [actors.submit(node, actors.lease(node, held=(0,))[0].lease_id) for node in ("a", "b")]

    def claim(verifier: str, *, at: float) -> list[QueueItem]:
        with home.database.write() as connection:
            return verdicts.claim(
                connection, verifier=verifier, spec=home.spec, now=actors.now + at, seconds=30.0, most=32
            )

    def renew(claimed: list[QueueItem], *, at: float) -> None:
        with home.database.write() as connection:
            verdicts.renew(connection, claimed, until=actors.now + at + 30.0)

    taken = claim("first", at=0)
    renew(taken, at=20)
    assert claim("second", at=49) == []
    over = claim("second", at=51)
    assert [one.submission for one in over] == names
    renew(taken, at=60)
    assert claim("third", at=82) != [], "the first has nothing to renew any more"
    with home.database.write() as connection:
        for one in over:
            verdicts.defer(connection, one, until=actors.now)
    assert claim("fourth", at=83) == [], "nor has the second anything to put back"


def test_a_page_of_the_log_is_bounded_in_bytes_and_never_empty(actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand entries of large groups would be a gigabyte for whoever asks."""
    for version in range(1, 6):
        actors.publish(version)
    with actors.home.database.read() as connection:
        whole = log.leaves(connection, 0, log.size(connection))
        monkeypatch.setattr(log, "MAX_BYTES_PER_READ", len(whole[0]) + len(whole[1]) - 1)
        pages = [log.leaves(connection, 0, 100)]
        while sum(map(len, pages)) < len(whole):
            pages.append(log.leaves(connection, sum(map(len, pages)), 100))
    assert [leaf for page in pages for leaf in page] == whole
    assert len(pages[0]) == 2
