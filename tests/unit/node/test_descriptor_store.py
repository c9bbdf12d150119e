"""The newest descriptor that a node has seen: whoever could turn it back would turn back revocations and policies."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import pytest
from msgspec import structs
from prepared_replies import DESCRIPTOR, OTHER_KEY, RUN_ID, RUN_KEY, sealed_descriptor

from node.discovery.descriptor import FILE, MAX_ENVELOPE_BYTES, DescriptorStore, OfferResult
from shardcast.errors import LocalFault, Malformed, PeerFault, Stale

START = 1000.0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> DescriptorStore:
    return DescriptorStore(RUN_ID, state=tmp_path, clock=clock)


def envelope(version: int, **changes: object) -> bytes:
    """What the run's key signs: by default for an hour."""
    dates = {"issued_at": int(START), "expires_at": int(START) + 3600}
    return sealed_descriptor(structs.replace(DESCRIPTOR, **({"version": version} | dates | changes)))


def shown(store: DescriptorStore) -> int:
    assert store.last is not None
    return store.last.descriptor.version


def test_the_newer_one_holds_whoever_brings_it(store: DescriptorStore) -> None:
    assert store.offer(envelope(3), source="a coordinator") is OfferResult.NEWER
    assert store.offer(envelope(7), source="a peer") is OfferResult.NEWER
    assert store.newest is store.last
    assert store.newest is not None
    assert store.newest.envelope == envelope(7), "peers are passed the bytes that were signed"
    assert store.newest.run_key == RUN_KEY.public_key().public_bytes_raw()


def test_an_older_one_is_no_news(store: DescriptorStore) -> None:
    """A rollback: somebody keeps the descriptor from before a key was revoked, and shows it around."""
    store.offer(envelope(7, revoked=("ab" * 32,)), source="")
    assert store.offer(envelope(6), source="") is OfferResult.OLDER
    assert store.offer(envelope(0), source="") is OfferResult.OLDER
    assert shown(store) == 7


def test_the_same_one_is_known(store: DescriptorStore) -> None:
    store.offer(envelope(7), source="")
    told: list[int] = []
    store.listen(lambda verified: told.append(verified.descriptor.version))
    assert store.offer(envelope(7), source="") is OfferResult.KNOWN
    assert store.offer(envelope(8), source="") is OfferResult.NEWER
    assert told == [8]


def test_an_equivocal_one_changes_nothing_and_is_kept_as_proof(store: DescriptorStore, tmp_path: Path) -> None:
    first, second = envelope(7), envelope(7, endpoints=("http://192.0.2.66:8700",))
    store.offer(first, source="")
    assert store.offer(second, source="") is OfferResult.EQUIVOCAL
    assert store.last is not None
    assert store.last.envelope == first
    assert {path.read_bytes() for path in (tmp_path / "evidence").iterdir()} == {first, second}
    assert store.offer(envelope(8), source="") is OfferResult.NEWER, "the run goes on"


def test_other_rules_are_never_shown(store: DescriptorStore) -> None:
    """The spec is the log's first entry: an operator who changes limits under way is not followed."""
    store.offer(envelope(7), source="")
    assert store.offer(envelope(8, spec=structs.replace(DESCRIPTOR.spec, seed=1)), source="") is OfferResult.OTHER_RULES
    assert shown(store) == 7
    assert store.offer(envelope(9), source="") is OfferResult.NEWER


def test_an_expired_one_is_refused_and_the_shown_one_expires(store: DescriptorStore, clock: Clock) -> None:
    """A freeze: who withholds news for an hour must not have the node believe that nothing has happened."""
    store.offer(envelope(7), source="")
    clock.now += 3600
    assert store.newest is None
    assert shown(store) == 7, "whom it names may be asked for a fresh one"
    with pytest.raises(Stale):
        store.offer(envelope(8), source="")
    assert store.offer(envelope(9, expires_at=int(START) + 7200), source="") is OfferResult.NEWER
    assert store.newest is not None


def test_the_descriptor_of_another_run_is_refused(store: DescriptorStore) -> None:
    with pytest.raises(Malformed):
        store.offer(sealed_descriptor(key=OTHER_KEY), source="")
    assert store.last is None


def test_a_forged_one_is_refused(store: DescriptorStore) -> None:
    good = envelope(7)
    with pytest.raises(PeerFault):
        store.offer(good[:-1] + bytes([good[-1] ^ 1]), source="")
    with pytest.raises(PeerFault):
        store.offer(bytes(MAX_ENVELOPE_BYTES + 1), source="")
    assert store.last is None


def test_a_replay_after_a_restart_is_no_news(store: DescriptorStore, tmp_path: Path, clock: Clock) -> None:
    """A node that forgot could be told yesterday's descriptor by whoever it meets first."""
    store.offer(envelope(7), source="")
    again = DescriptorStore(RUN_ID, state=tmp_path, clock=clock)
    assert shown(again) == 7
    assert again.newest is not None
    assert again.offer(envelope(6), source="") is OfferResult.OLDER
    assert again.offer(envelope(7), source="") is OfferResult.KNOWN
    assert again.offer(envelope(7, endpoints=("http://h:1",)), source="") is OfferResult.EQUIVOCAL


def test_what_has_expired_while_the_node_was_off_still_holds_off_what_is_older(
    store: DescriptorStore, tmp_path: Path, clock: Clock
) -> None:
    store.offer(envelope(7), source="")
    clock.now += 1e6
    again = DescriptorStore(RUN_ID, state=tmp_path, clock=clock)
    assert again.newest is None
    assert shown(again) == 7
    assert again.offer(envelope(6, expires_at=int(clock.now) + 60), source="") is OfferResult.OLDER
    assert again.newest is None


DAMAGE = [b"", b"VSW1", b"\0" * 300, envelope(7)[:-1], sealed_descriptor(key=OTHER_KEY), bytes(MAX_ENVELOPE_BYTES + 1)]


@pytest.mark.parametrize("damage", DAMAGE, ids=["empty", "cut", "zeros", "short", "another run's", "long"])
def test_a_damaged_file_costs_the_memory_and_not_the_node(
    tmp_path: Path, clock: Clock, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(damage)
    store = DescriptorStore(RUN_ID, state=tmp_path, clock=clock)
    assert store.last is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    store.offer(envelope(7), source="")
    assert shown(DescriptorStore(RUN_ID, state=tmp_path, clock=clock)) == 7


def test_a_disk_that_takes_nothing_stops_no_news(
    store: DescriptorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_path: Path, _data: bytes) -> None:
        raise LocalFault("no space left", code="disk_full")

    monkeypatch.setattr("node.discovery.descriptor.write_atomically", full)
    assert store.offer(envelope(7), source="") is OfferResult.NEWER
    assert shown(store) == 7
    assert "not kept" in caplog.text


def test_without_a_folder_nothing_is_written(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = DescriptorStore(RUN_ID, clock=clock)
    store.offer(envelope(7), source="")
    store.offer(envelope(7, endpoints=("http://h:1",)), source="")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_bring_news_at_once_leave_the_newest(tmp_path: Path, clock: Clock, seed: int) -> None:
    """The trio thread of the peers and the asyncio loop of the coordinator's client both do."""
    store = DescriptorStore(RUN_ID, state=tmp_path, clock=clock)
    versions = list(range(1, 41))
    envelopes = {version: envelope(version) for version in versions}
    news: list[tuple[int, OfferResult]] = []
    told: list[int] = []
    store.listen(lambda verified: told.append(verified.descriptor.version))
    gate = threading.Barrier(4)

    def bring(number: int) -> None:
        order = random.Random(seed * 10 + number).sample(versions, len(versions))
        gate.wait()
        news.extend([(version, store.offer(envelopes[version], source=str(number))) for version in order])

    threads = [threading.Thread(target=bring, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shown(store) == versions[-1]
    newer = [version for version, one in news if one is OfferResult.NEWER]
    assert sorted(newer) == sorted(set(newer)) == sorted(told), "each was news once"
    assert OfferResult.EQUIVOCAL not in {one for _, one in news}
    assert shown(DescriptorStore(RUN_ID, state=tmp_path, clock=clock)) == versions[-1], "an older one was written last"


def test_every_order_of_arrival_leads_to_the_newest(clock: Clock) -> None:
    for order in itertools.permutations((1, 2, 3, 4)):
        store = DescriptorStore(RUN_ID, clock=clock)
        for version in order:
            store.offer(envelope(version), source="")
        assert shown(store) == 4
