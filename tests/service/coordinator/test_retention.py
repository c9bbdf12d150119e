"""`--keep-evidence`: a disk that does not fill up, and what nobody may lose by it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from actors import PUBLIC_KEY, Actors, spec_of
from backups import begin, no_wait
from sqlalchemy import select, update
from swarm import Peer, Swarm, running

from coordinator.backup.create import back_up
from coordinator.backup.restore import restore
from coordinator.errors import StorageFault, StoreAway
from coordinator.integrity.check import check_state
from coordinator.integrity.differences import Difference
from coordinator.run.home import create_home
from coordinator.run.leader import Leader
from coordinator.storage import retention
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.schema import SubmissionState, groups, submissions
from coordinator.training.batches import read_batch
from coordinator.training.rollouts import export_rollouts
from node.audit import evidence
from node.audit.auditor import run_audit
from node.protocol.admission import Outcome
from node.protocol.run import StandingSpec
from shardcast.wire import digest, encode

DAY = 86400.0


@pytest.fixture
def actors(tmp_path: Path, database_url: str | None) -> Iterator[Actors]:
    standing = StandingSpec(ban_after=1000, full_rate_floor=0.01, vesting=2)
    spec = spec_of(standing=standing)
    actors = Actors(create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec, database_url=database_url))
    actors.register("a", "b")
    actors.publish(0)
    yield actors
    actors.home.database.close()


def remove(actors: Actors, *, days: float = 0.0) -> int:
    home = actors.home
    for number in range(1, actors.files + 1):
        if digest(str(number).encode()) in names(actors):
            home.blobs.put(str(number).encode())
    return retention.remove_expired(home.database, home.blobs, spec=home.spec, before=actors.now + 1 - days * DAY)


def names(actors: Actors) -> set[str]:
    """The submissions whose files are kept, by the database."""
    with actors.home.database.read() as connection:
        kept = select(submissions.c.submission).where(submissions.c.state != SubmissionState.EXPIRED)
        return set(connection.execute(kept).scalars())


def stored(actors: Actors) -> set[str]:
    """The blobs there are, but for the run's rules."""
    blobs = actors.home.blobs
    assert isinstance(blobs, FolderBlobs)
    found = {path.name for path in actors.home.folder.glob("blobs/??/*")}
    assert digest(encode(actors.home.spec)) in found, "the rules are for ever"
    return found - {digest(encode(actors.home.spec))}


def trained(actors: Actors, *, resumes_from: int) -> None:
    """A step that took what was admitted ends; the trainer's oldest checkpoint is of `resumes_from`."""
    actors.assign()
    actors.publish(1)
    with actors.home.database.write() as connection:
        retention.note_checkpoints(connection, resumes_from)


def test_only_what_nothing_needs_is_removed(actors: Actors) -> None:
    """Files that training or a second verdict still asks for would stop the run, or let a cheat keep its credit."""
    used = {actors.work("a") for _ in range(3)}
    rejected = actors.work("b", Outcome.REJECTED)
    waiting = actors.submit("a", actors.lease("a", held=(0,))[0].lease_id)
    assert remove(actors) == 1, "nothing was trained yet, so only the rejected one goes"
    assert stored(actors) == names(actors) == {*used, waiting}
    trained(actors, resumes_from=0)
    assert remove(actors) == 0, "the trainer may train this step again"
    with actors.home.database.write() as connection:
        retention.note_checkpoints(connection, 1)
    assert remove(actors, days=1) == 0, "too young"
    assert remove(actors) == 3
    assert stored(actors) == names(actors) == {waiting}
    assert rejected not in names(actors)


def test_what_a_rejection_would_have_measured_again_is_kept_until_it_has_vested(actors: Actors) -> None:
    """Else a node that is caught later keeps the credit of groups of which one row was looked at."""
    partly = actors.work("a", draw=1.0)
    trained_on = [partly, actors.work("a"), actors.work("b")]
    trained(actors, resumes_from=1)
    assert remove(actors) == 2
    assert names(actors) == {partly}, "one full measurement came after it, vesting takes two"
    actors.work("a", draw=0.0)
    assert remove(actors) == 1
    assert not names(actors) & set(trained_on)


def test_what_others_name_as_well_stays(actors: Actors) -> None:
    """A node that sends the run's rules, or another's signed request, as its own file would have them removed."""
    copies = [actors.work("b", Outcome.REJECTED) for _ in range(2)]
    kept = actors.submit("a", actors.lease("a", held=(0,))[0].lease_id)
    rules = digest(encode(actors.home.spec))
    with actors.home.database.write() as connection:
        for copy, body in zip(copies, (kept, rules), strict=True):
            connection.execute(update(submissions).where(submissions.c.submission == copy).values(body=body))
    assert remove(actors) == 2
    assert stored(actors) == {kept}


def test_a_copy_of_a_group_does_not_take_it_from_the_trainer(actors: Actors) -> None:
    """A node can compute its group's file and send it as a body: a run that pauses for long could not go on."""
    for _ in range(3):
        actors.work("a")
    copy = actors.work("b", Outcome.REJECTED)
    trained(actors, resumes_from=0)
    with actors.home.database.write() as connection:
        group = actors.home.blobs.put(b"a group")
        connection.execute(update(groups).values(blob=group))
        connection.execute(update(submissions).where(submissions.c.submission == copy).values(body=group))
    assert remove(actors) == 1
    assert group in stored(actors)


def test_a_trainer_that_wants_an_expired_group_says_so(actors: Actors) -> None:
    """One that lost its checkpoints would else wait for ever for a verifier that nobody asked."""
    for _ in range(3):
        actors.work("a")
    trained(actors, resumes_from=1)
    assert remove(actors) == 3
    # The second wait of one that waits for ever ends it here.
    stop = CountedWaits(2)
    with pytest.raises(StorageFault, match="step 0 cannot be trained"):
        read_batch(actors.home, 0, stop=stop)


class CountedWaits(threading.Event):
    """A stop that is set after so many waits, without any time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        return self._left <= 0


def test_a_removal_that_was_cut_short_goes_on(actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that dies between the mark and the files, or a store that is away, would leave files for ever."""
    gone = {actors.work("b", Outcome.REJECTED) for _ in range(3)}

    def away(_blobs: FolderBlobs, _name: str) -> None:
        raise StoreAway("away")

    with monkeypatch.context() as context:
        context.setattr(FolderBlobs, "remove", away)
        with pytest.raises(StoreAway):
            remove(actors)
    assert stored(actors) == gone
    assert not names(actors)
    assert remove(actors) == 0
    assert stored(actors) == set()


def test_a_copy_of_the_run_goes_without_what_is_removed(tmp_path: Path) -> None:
    """An operator whose backup, check or export stumbled over removed files would have none of them."""
    actors = begin(tmp_path / "run")
    trained(actors, resumes_from=1)
    assert remove(actors) == 4
    assert back_up(actors.home, tmp_path / "backup").manifest.missing == ()
    actors.home.database.close()
    assert restore(tmp_path / "backup", tmp_path / "again", wait=no_wait).blobs == 2, "the rules, and what waits"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[tuple[Swarm, Peer, list[str]]]:
    """A run with a group of an honest node and two files that are none."""
    with running(tmp_path_factory.mktemp("run"), tiny_policy_path) as swarm:
        peer, other = swarm.peer(), swarm.peer()
        lease = peer.lease()
        found = [swarm.judge(peer, swarm.honest(lease), lease)]
        found += [swarm.verdict(other, other.submit(other.lease().lease_id, junk)) for junk in (b"one", b"other")]
        assert [one.outcome for one in found] == [Outcome.ADMITTED, Outcome.REJECTED, Outcome.REJECTED]
        yield swarm, peer, [one.submission for one in found]


def test_an_audit_names_what_is_gone_and_neither_fails_nor_passes_for_it(
    swarm: tuple[Swarm, Peer, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, peer, (admitted, *junk) = swarm

    def audit(**changes: object) -> tuple[int, dict[str, int], str]:
        asked = {"run_id": served.home.run_id, "sample": None, "all_": True, "seed": 1, "state_dir": tmp_path / "audit"}
        asked |= {"sources": (served.origin_url,), **changes}
        code = asyncio.run(run_audit(served.url, as_json=True, **asked))
        results = json.loads(capsys.readouterr().out)["results"]
        asyncio.run(run_audit(served.url, as_json=False, **asked))
        return (
            code,
            {name: count for name, count in results.items() if count},
            " ".join(capsys.readouterr().out.split()),
        )

    now = time.time()
    Leader(served.home, keep_evidence_days=1).work(now)
    assert audit()[:2] == (0, {"agree": 3}), "a day is not over"
    Leader(served.home, keep_evidence_days=1).work(now + 2 * DAY)

    reply = peer.send("GET", f"/v1/blobs/{junk[0]}")
    assert (reply.status, reply.code) == (410, "evidence_expired")
    assert peer.send("GET", f"/v1/blobs/{admitted}").status == 200, "no step has used it"
    assert peer.send("GET", f"/v1/receipts/{junk[0]}").status == 200
    page = peer.send("GET", f"/submissions/{junk[0]}").body
    assert b"files of this submission are removed" in page
    assert f"/v1/blobs/{junk[0]}".encode() not in page, "no link to what is gone"
    assert f"/v1/blobs/{admitted}".encode() in peer.send("GET", f"/submissions/{admitted}").body
    assert audit()[:2] == (2, {"agree": 1, "unavailable": 2}), "files that go on the day are withheld"

    monkeypatch.setattr(evidence, "MIN_KEPT_SECONDS", 0.5)
    time.sleep(max(0.0, now + 1.0 - time.time()))
    code, results, said = audit()
    assert (code, results) == (3, {"agree": 1, "expired": 2}), "a validator must not take what is gone for checked"
    day = time.strftime("%Y-%m-%d", time.gmtime())
    assert "partial: 1 verdicts derived again. Of 2 the operator has removed the files" in said
    assert f"the newest of these is of {day}" in said
    code, results, said = audit(all_=False, sample=1)
    assert (code, results) == ((2, {"expired": 1}) if "expired" in results else (0, {"agree": 1}))

    differences: list[Difference] = []
    check_state(served.home, (), report=differences.append)
    assert differences == []
    exported = export_rollouts(served.home, tmp_path / "export", rejected=True)
    assert (exported.submissions, exported.expired, exported.missing) == (1, 2, 0)
