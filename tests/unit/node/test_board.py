"""The newest descriptor that a node has seen: whoever could turn it back would turn back revocations and policies."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import pytest
from msgspec import structs
from prepared_replies import DESCRIPTOR, OTHER_KEY, RUN_ID, RUN_KEY, sealed_descriptor

from node.discovery.descriptor import FILE, MAX_ENVELOPE_BYTES, Board, News
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
def board(tmp_path: Path, clock: Clock) -> Board:
    return Board(RUN_ID, state=tmp_path, clock=clock)


def envelope(version: int, **changes: object) -> bytes:
    """What the run's key signs: by default for an hour."""
    dates = {"issued_at": int(START), "expires_at": int(START) + 3600}
    return sealed_descriptor(structs.replace(DESCRIPTOR, **({"version": version} | dates | changes)))


def shown(board: Board) -> int:
    assert board.last is not None
    return board.last.descriptor.version


def test_the_newer_one_holds_whoever_brings_it(board: Board) -> None:
    assert board.offer(envelope(3), source="a coordinator") is News.NEWER
    assert board.offer(envelope(7), source="a peer") is News.NEWER
    assert board.newest is board.last
    assert board.newest is not None
    assert board.newest.envelope == envelope(7), "peers are passed the bytes that were signed"
    assert board.newest.run_key == RUN_KEY.public_key().public_bytes_raw()


def test_an_older_one_is_no_news(board: Board) -> None:
    """A rollback: somebody keeps the descriptor from before a key was revoked, and shows it around."""
    board.offer(envelope(7, revoked=("ab" * 32,)), source="")
    assert board.offer(envelope(6), source="") is News.OLDER
    assert board.offer(envelope(0), source="") is News.OLDER
    assert shown(board) == 7


def test_the_same_one_is_known(board: Board) -> None:
    board.offer(envelope(7), source="")
    told: list[int] = []
    board.listen(lambda posted: told.append(posted.descriptor.version))
    assert board.offer(envelope(7), source="") is News.KNOWN
    assert board.offer(envelope(8), source="") is News.NEWER
    assert told == [8]


def test_an_equivocal_one_changes_nothing_and_is_kept_as_proof(board: Board, tmp_path: Path) -> None:
    first, second = envelope(7), envelope(7, endpoints=("http://192.0.2.66:8700",))
    board.offer(first, source="")
    assert board.offer(second, source="") is News.EQUIVOCAL
    assert board.last is not None
    assert board.last.envelope == first
    assert {path.read_bytes() for path in (tmp_path / "evidence").iterdir()} == {first, second}
    assert board.offer(envelope(8), source="") is News.NEWER, "the run goes on"


def test_other_rules_are_never_shown(board: Board) -> None:
    """The spec is the log's first entry: an operator who changes limits under way is not followed."""
    board.offer(envelope(7), source="")
    assert board.offer(envelope(8, spec=structs.replace(DESCRIPTOR.spec, seed=1)), source="") is News.OTHER_RULES
    assert shown(board) == 7
    assert board.offer(envelope(9), source="") is News.NEWER


def test_an_expired_one_is_refused_and_the_shown_one_expires(board: Board, clock: Clock) -> None:
    """A freeze: who withholds news for an hour must not have the node believe that nothing has happened."""
    board.offer(envelope(7), source="")
    clock.now += 3600
    assert board.newest is None
    assert shown(board) == 7, "whom it names may be asked for a fresh one"
    with pytest.raises(Stale):
        board.offer(envelope(8), source="")
    assert board.offer(envelope(9, expires_at=int(START) + 7200), source="") is News.NEWER
    assert board.newest is not None


def test_the_descriptor_of_another_run_is_refused(board: Board) -> None:
    with pytest.raises(Malformed):
        board.offer(sealed_descriptor(key=OTHER_KEY), source="")
    assert board.last is None


def test_a_forged_one_is_refused(board: Board) -> None:
    good = envelope(7)
    with pytest.raises(PeerFault):
        board.offer(good[:-1] + bytes([good[-1] ^ 1]), source="")
    with pytest.raises(PeerFault):
        board.offer(bytes(MAX_ENVELOPE_BYTES + 1), source="")
    assert board.last is None


def test_a_replay_after_a_restart_is_no_news(board: Board, tmp_path: Path, clock: Clock) -> None:
    """A node that forgot could be told yesterday's descriptor by whoever it meets first."""
    board.offer(envelope(7), source="")
    again = Board(RUN_ID, state=tmp_path, clock=clock)
    assert shown(again) == 7
    assert again.newest is not None
    assert again.offer(envelope(6), source="") is News.OLDER
    assert again.offer(envelope(7), source="") is News.KNOWN
    assert again.offer(envelope(7, endpoints=("http://h:1",)), source="") is News.EQUIVOCAL


def test_what_has_expired_while_the_node_was_off_still_holds_off_what_is_older(
    board: Board, tmp_path: Path, clock: Clock
) -> None:
    board.offer(envelope(7), source="")
    clock.now += 1e6
    again = Board(RUN_ID, state=tmp_path, clock=clock)
    assert again.newest is None
    assert shown(again) == 7
    assert again.offer(envelope(6, expires_at=int(clock.now) + 60), source="") is News.OLDER
    assert again.newest is None


DAMAGE = [b"", b"VSW1", b"\0" * 300, envelope(7)[:-1], sealed_descriptor(key=OTHER_KEY), bytes(MAX_ENVELOPE_BYTES + 1)]


@pytest.mark.parametrize("damage", DAMAGE, ids=["empty", "cut", "zeros", "short", "another run's", "long"])
def test_a_damaged_file_costs_the_memory_and_not_the_node(
    tmp_path: Path, clock: Clock, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(damage)
    board = Board(RUN_ID, state=tmp_path, clock=clock)
    assert board.last is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    board.offer(envelope(7), source="")
    assert shown(Board(RUN_ID, state=tmp_path, clock=clock)) == 7


def test_a_disk_that_takes_nothing_stops_no_news(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_path: Path, _data: bytes) -> None:
        raise LocalFault("no space left", code="disk_full")

    monkeypatch.setattr("node.discovery.descriptor.write_atomically", full)
    assert board.offer(envelope(7), source="") is News.NEWER
    assert shown(board) == 7
    assert "not kept" in caplog.text


def test_without_a_folder_nothing_is_written(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    board = Board(RUN_ID, clock=clock)
    board.offer(envelope(7), source="")
    board.offer(envelope(7, endpoints=("http://h:1",)), source="")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_bring_news_at_once_leave_the_newest(tmp_path: Path, clock: Clock, seed: int) -> None:
    """The trio thread of the peers and the asyncio loop of the coordinator's client both do."""
    board = Board(RUN_ID, state=tmp_path, clock=clock)
    versions = list(range(1, 41))
    envelopes = {version: envelope(version) for version in versions}
    news: list[tuple[int, News]] = []
    told: list[int] = []
    board.listen(lambda posted: told.append(posted.descriptor.version))
    gate = threading.Barrier(4)

    def bring(number: int) -> None:
        order = random.Random(seed * 10 + number).sample(versions, len(versions))
        gate.wait()
        news.extend([(version, board.offer(envelopes[version], source=str(number))) for version in order])

    threads = [threading.Thread(target=bring, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shown(board) == versions[-1]
    newer = [version for version, one in news if one is News.NEWER]
    assert sorted(newer) == sorted(set(newer)) == sorted(told), "each was news once"
    assert News.EQUIVOCAL not in {one for _, one in news}
    assert shown(Board(RUN_ID, state=tmp_path, clock=clock)) == versions[-1], "an older one was written last"


def test_every_order_of_arrival_leads_to_the_newest(clock: Clock) -> None:
    for order in itertools.permutations((1, 2, 3, 4)):
        board = Board(RUN_ID, clock=clock)
        for version in order:
            board.offer(envelope(version), source="")
        assert shown(board) == 4
