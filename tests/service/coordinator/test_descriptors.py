"""The versions of the run's descriptor: two of one version would be a proof against an honest operator.

Nodes keep the highest version that they have seen. One that went back would be ignored by all of them, and so would
a revocation in it.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, func, select
from waiting import SECONDS, eventually

from coordinator.http import descriptor_watch
from coordinator.http.descriptor_watch import DescriptorWatch
from coordinator.run import descriptors as descriptors_module
from coordinator.run.descriptors import (
    NO_CONTACTS,
    RENEW_SECONDS,
    SETTLE_SECONDS,
    VALID_SECONDS,
    Contacts,
    Descriptors,
    IssuedDescriptor,
)
from coordinator.run.home import Home, create_home
from coordinator.run.relays import RelayRegistry
from coordinator.storage import training
from coordinator.storage.descriptors import KEPT, StoredDescriptor, add_descriptor
from coordinator.storage.schema import descriptors as table
from coordinator.storage.training import PolicyRecord
from node.discovery.descriptor import DescriptorStore, OfferResult
from node.protocol.messages import RelayAnnouncement
from node.protocol.run import Descriptor, EnvironmentSpec, RunSpec, open_descriptor, run_id_of

KEY = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
PUBLIC_KEY = KEY.public_key().public_bytes_raw()
RUN_ID = run_id_of(PUBLIC_KEY)
SPEC = RunSpec(name="test", environments=(EnvironmentSpec(name="arithmetic"),))
NOW = 1_760_000_000.25
LATER = 1.0
"""Past the time for which an answer is given without looking."""
LONG = 100.0
"""For which nobody waits in a test that passes."""


def open_run(folder: Path) -> Home:
    return create_home(folder, public_key=PUBLIC_KEY, spec=SPEC)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = open_run(tmp_path / "data")
    yield opened
    opened.database.close()


def starting(home: Home, contacts: Contacts = NO_CONTACTS) -> Descriptors:
    """The descriptors of a process that has just been started."""
    return Descriptors(home, key=KEY, contacts=replace(contacts, relays=("http://192.0.2.1:8710",)))


def publish(home: Home, version: int) -> None:
    digest = f"{version:064x}"
    with home.database.write() as connection:
        published = PolicyRecord(version=version, manifest_digest=digest, result_digest=digest, manifest=b"")
        training.record_policy(connection, published, now=NOW)


def read(descriptors: Descriptors, now: float) -> Descriptor:
    """As a node reads it."""
    issued = descriptors.newest(now=now)
    descriptor, signer = open_descriptor(issued.envelope, run_id=RUN_ID, now=now)
    assert signer == PUBLIC_KEY
    assert descriptor.version == issued.version
    return descriptor


def test_it_says_what_the_run_is_and_where(home: Home) -> None:
    contacts = Contacts(endpoints=("http://192.0.2.1:8700",), peers=("/ip4/192.0.2.1/tcp/1",), revoked=("ab" * 32,))
    publish(home, 3)
    said = read(starting(home, contacts), NOW)
    assert (said.endpoints, said.peers, said.revoked) == (contacts.endpoints, contacts.peers, contacts.revoked)
    assert (said.spec, said.relays) == (SPEC, ("http://192.0.2.1:8710",))
    assert said.head is not None
    assert (said.head.version, said.head.manifest_digest) == (3, f"{3:064x}")
    assert (said.issued_at, said.expires_at) == (int(NOW), int(NOW) + VALID_SECONDS)


def test_the_same_bytes_are_given_out_while_nothing_changes(home: Home) -> None:
    descriptors = starting(home)
    first = descriptors.newest(now=NOW)
    for seconds in (0.01, 1.0, 60.0, RENEW_SECONDS - 1):
        assert descriptors.newest(now=NOW + seconds).envelope == first.envelope


def test_a_new_policy_is_told_at_once(home: Home) -> None:
    descriptors = starting(home)
    before = read(descriptors, NOW)
    publish(home, 0)
    after = read(descriptors, NOW + LATER)
    assert before.head is None
    assert after.head is not None
    assert after.version > before.version


def test_a_restart_goes_on_above_the_last_version(home: Home) -> None:
    first = starting(home).newest(now=NOW)
    assert starting(home).newest(now=NOW + LATER).envelope == first.envelope, "nothing has changed"
    publish(home, 0)
    assert read(starting(home), NOW + LATER).version > first.version


def test_it_is_renewed_long_before_it_expires(home: Home) -> None:
    """Whoever hears of it late has half an hour left to hear of the next."""
    descriptors = starting(home)
    first = read(descriptors, NOW)
    second = read(descriptors, NOW + RENEW_SECONDS)
    assert second.version > first.version
    assert first.expires_at - (NOW + RENEW_SECONDS) >= VALID_SECONDS / 2 - 1


def test_what_strangers_announce_is_signed_by_nobody(home: Home) -> None:
    """`http://[1.2.3.4]` among the relays, signed by the run's key, ended every audit while it was renewed."""
    descriptors = starting(home)
    first = read(descriptors, NOW)
    registry = RelayRegistry(home.database, fixed=(), salt=b"s")
    for number in range(10, 60):
        message = RelayAnnouncement(url=f"http://192.0.2.{number}:8720")
        registry.announce(f"{number:064x}", message, address="192.0.2.9", now=NOW)
    said = read(descriptors, NOW + RENEW_SECONDS - 1)
    assert (said.version, said.relays) == (first.version, ("http://192.0.2.1:8710",))


def test_new_contacts_are_told_soon_after_a_restart(home: Home) -> None:
    first = read(starting(home), NOW)
    again = starting(home, Contacts(revoked=("ab" * 32,)))
    assert read(again, NOW + SETTLE_SECONDS).revoked == ("ab" * 32,)
    assert read(again, NOW + SETTLE_SECONDS).version > first.version


def test_coordinators_with_different_contacts_do_not_outbid_each_other_without_end(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    """Two are started without --endpoint: each would sign over the other's version at every look, for ever."""
    one = starting(home, Contacts(endpoints=("http://192.0.2.1:8700",)))
    other = starting(home, Contacts(endpoints=("http://192.0.2.2:8700",)))
    first = read(one, NOW).version
    for tenths in range(1, 601):
        read((one, other)[tenths % 2], NOW + tenths / 10)
    assert read(one, NOW + 60.1).version - first <= 60 / SETTLE_SECONDS + 60, "no faster than the clock"
    with home.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(table)).scalar_one() <= 60 / SETTLE_SECONDS + 1
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2, "each says it once"
    assert "--endpoint" in said[0].getMessage()


def test_a_restart_with_new_contacts_disputes_nothing(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    read(starting(home, Contacts(endpoints=("http://192.0.2.1:8700",))), NOW)
    again = starting(home, Contacts(endpoints=("http://192.0.2.2:8700",)))
    for second in range(60):
        read(again, NOW + second)
    assert caplog.records == []


@pytest.mark.parametrize("back", [0.5, 3600.0, 1e8])
def test_versions_rise_when_the_clock_goes_back(home: Home, back: float) -> None:
    """A clock that was ahead is set right: what was signed before must not pass for newer, nor last for years."""
    descriptors = starting(home)
    before = read(descriptors, NOW)
    after = read(descriptors, NOW - back)
    assert after.version > before.version
    assert after.expires_at == int(NOW - back) + VALID_SECONDS
    assert read(descriptors, NOW - back + LATER).version == after.version, "once is enough"


def test_a_restored_backup_signs_no_version_again(home: Home, tmp_path: Path) -> None:
    """Yesterday's database knows nothing of today's versions; the clock does."""
    starting(home).newest(now=NOW)
    home.database.close()
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    live = open_run(tmp_path / "data")
    signed = []
    for version in range(5):
        publish(live, version)
        signed.append(read(starting(live), NOW + 60 * (version + 1)).version)
    live.database.close()
    restored = open_run(tmp_path / "backup")
    publish(restored, 0)
    assert read(starting(restored), NOW + 600).version > max(signed)
    restored.database.close()


def test_a_run_that_lost_its_database_signs_no_version_again(home: Home, tmp_path: Path) -> None:
    signed = starting(home).newest(now=NOW).version
    anew = open_run(tmp_path / "anew")
    assert starting(anew).newest(now=NOW + LATER).version > signed
    anew.database.close()


def test_few_are_kept(home: Home) -> None:
    descriptors = starting(home)
    for version in range(KEPT + 20):
        publish(home, version)
        descriptors.newest(now=NOW + 2 * version)
    with home.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(table)).scalar_one() == KEPT
    assert starting(home).newest(now=NOW + 2 * version).envelope == descriptors.newest(now=NOW + 2 * version).envelope


def test_nothing_is_given_out_that_the_database_has_not_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be forgotten with the process, and its version signed again for something else."""
    descriptors = starting(home)
    read(descriptors, NOW)
    publish(home, 0)

    def full(connection: Connection, issued: StoredDescriptor) -> None:
        add_descriptor(connection, issued)
        raise OSError("no space left")

    monkeypatch.setattr(descriptors_module, "add_descriptor", full)
    with pytest.raises(OSError, match="no space"):
        descriptors.newest(now=NOW + LATER)
    monkeypatch.undo()
    again = starting(home)
    assert again.newest(now=NOW + LATER).envelope == descriptors.newest(now=NOW + LATER).envelope


def sign_for_a_while(folder: Path, contacts: Contacts, had_part: list[Event], queue: multiprocessing.Queue) -> None:
    """What a coordinator process does, with policies that come as fast as they can, until both had a part."""
    home = open_run(folder)
    descriptors, seen, began, number = starting(home, contacts), {}, time.monotonic(), 0
    while (passed := time.monotonic() - began) < 3.0 or not all(part.is_set() for part in had_part):
        if passed > SECONDS:
            break
        issued = descriptors.newest(now=time.time())
        seen.setdefault(issued.version, set()).add(issued.envelope)
        number += 1
        if len(seen) > 10:
            had_part[0].set()
        if contacts.endpoints:
            publish(home, number)
    queue.put(seen)
    home.database.close()


@pytest.mark.system
def test_two_processes_on_one_database_never_sign_one_version_twice(home: Home, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue = context.Queue()
    given = (Contacts(endpoints=("http://192.0.2.1:8700",)), NO_CONTACTS)
    one, other = context.Event(), context.Event()
    had_part = ([one, other], [other, one])
    arguments = [(tmp_path / "data", *each, queue) for each in zip(given, had_part, strict=True)]
    processes = [context.Process(target=sign_for_a_while, args=each) for each in arguments]
    for process in processes:
        process.start()
    seen = [queue.get(timeout=2 * SECONDS) for _ in processes]
    for process in processes:
        process.join(60)
    together: dict[int, set[bytes]] = {}
    for one in seen:
        for version, envelopes in one.items():
            together.setdefault(version, set()).update(envelopes)
    assert all(len(envelopes) == 1 for envelopes in together.values())
    assert len(together) > 10
    assert all(len(one) > 5 for one in seen), "both had a part"
    store = DescriptorStore(RUN_ID)
    for version in sorted(together):
        (envelope,) = together[version]
        assert store.offer(envelope, source="") is OfferResult.NEWER


def test_threads_of_one_process_get_one_version(home: Home) -> None:
    descriptors, found = starting(home), []
    gate = threading.Barrier(8)

    def ask() -> None:
        gate.wait()
        found.append(descriptors.newest(now=NOW).envelope)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


# -- waiting for the next one


@pytest.fixture
def watch(home: Home) -> DescriptorWatch:
    return DescriptorWatch(starting(home))


async def test_who_waits_is_told_of_a_policy_at_once(home: Home, watch: DescriptorWatch) -> None:
    first = await watch.newest(after=None, wait_seconds=0.0)
    waiting = [asyncio.create_task(watch.newest(after=first.version, wait_seconds=LONG)) for _ in range(5)]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in waiting)
    began = time.monotonic()
    await asyncio.to_thread(publish, home, 0)
    found = await asyncio.gather(*waiting)
    assert time.monotonic() - began < LONG / 2
    assert len({one.version for one in found}) == 1
    assert found[0].version > first.version


async def test_who_waits_for_nothing_new_gets_the_newest_when_his_time_is_over(watch: DescriptorWatch) -> None:
    first = await watch.newest(after=None, wait_seconds=0.0)
    began = time.monotonic()
    assert (await watch.newest(after=first.version, wait_seconds=0.2)).envelope == first.envelope
    assert 0.19 <= time.monotonic() - began < LONG / 2


async def test_who_is_behind_or_ahead_is_not_kept_waiting(watch: DescriptorWatch) -> None:
    """Ahead is whoever saw what a coordinator signed that has gone back to a backup since."""
    first = await watch.newest(after=None, wait_seconds=0.0)
    for after in (0, first.version - 1, first.version + 1, 2**53 - 1):
        began = time.monotonic()
        assert (await watch.newest(after=after, wait_seconds=LONG)).envelope == first.envelope
        assert time.monotonic() - began < LONG / 2


async def test_a_crowd_that_waits_is_bounded(watch: DescriptorWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a connection and a task; strangers may ask for as many as they like."""
    monkeypatch.setattr(descriptor_watch, "MAX_WAITERS", 3)
    first = await watch.newest(after=None, wait_seconds=0.0)
    waiting = [asyncio.create_task(watch.newest(after=first.version, wait_seconds=LONG)) for _ in range(3)]
    await eventually(lambda: watch._waiting.total() == 3)
    began = time.monotonic()
    assert (await watch.newest(after=first.version, wait_seconds=LONG)).version == first.version
    assert time.monotonic() - began < LONG / 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert watch._waiting.total() == 0


async def test_attack_one_address_that_takes_every_place_leaves_some_to_others(
    watch: DescriptorWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one stranger could keep all news from those whose peers are gone."""
    monkeypatch.setattr(descriptor_watch, "MAX_WAITERS_PER_ADDRESS", 2)
    first = await watch.newest(after=None, wait_seconds=0.0)

    def wait(address: str) -> asyncio.Task[IssuedDescriptor]:
        return asyncio.create_task(watch.newest(after=first.version, wait_seconds=LONG, address=address))

    hoarding = [wait("192.0.2.1") for _ in range(10)]
    honest = wait("198.51.100.1")
    await eventually(lambda: sum(not task.done() for task in hoarding) == 2)
    await asyncio.sleep(0.3)
    assert sum(not task.done() for task in hoarding) == 2
    assert not honest.done()
    for task in (*hoarding, honest):
        task.cancel()
    await asyncio.gather(*hoarding, honest, return_exceptions=True)


async def test_a_database_that_fails_once_leaves_nobody_waiting(
    watch: DescriptorWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await watch.newest(after=None, wait_seconds=0.0)
    waiting = asyncio.create_task(watch.newest(after=first.version, wait_seconds=LONG))
    await eventually(lambda: watch._waiting.total() == 1)
    monkeypatch.setattr(watch._descriptors, "newest", fail)
    with pytest.raises(OSError, match="the disk"):
        await asyncio.wait_for(waiting, 60)
    monkeypatch.undo()
    assert (await watch.newest(after=first.version, wait_seconds=0.2)).version == first.version


def fail(*, now: float) -> None:
    raise OSError("the disk is away")


def test_nothing_is_read_while_nobody_waits(watch: DescriptorWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    real: Callable[..., object] = watch._descriptors.newest

    def counted(*, now: float) -> object:
        looks.append(now)
        return real(now=now)

    monkeypatch.setattr(watch._descriptors, "newest", counted)

    async def ask() -> None:
        first = await watch.newest(after=None, wait_seconds=0.0)
        await watch.newest(after=first.version, wait_seconds=0.2)
        await eventually(lambda: watch._reader is not None and watch._reader.done())
        looks.clear()
        await asyncio.sleep(0.3)

    asyncio.run(ask())
    assert looks == []
