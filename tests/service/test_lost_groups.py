"""One flipped bit in an admitted group, before the step that trains on it.

The run would end, although its log and evidence hold all that the group was made from; and an operator who is told to
restore a backup would lose everything since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select, update
from swarm import Peer, Swarm, running, small_spec

from coordinator.errors import StorageFault
from coordinator.storage import log, training
from coordinator.storage.schema import groups, steps, submissions
from coordinator.training import batches
from coordinator.training.batches import read_batch
from coordinator.training.groups import Group, decode_group, encode_group
from node.protocol.admission import Outcome

SPEC = small_spec()
SPEC = msgspec.structs.replace(
    SPEC,
    batch=msgspec.structs.replace(SPEC.batch, groups_per_step=20),
    standing=msgspec.structs.replace(SPEC.standing, probation=1, full_rate_floor=0.001),
)
"""With nodes that are measured in part once they are known."""


@dataclass(frozen=True)
class Step:
    """A step that has its batch, of one group."""

    swarm: Swarm
    number: int
    submission: str
    blob: Path
    body: Path

    def read(self, stop: threading.Event | None = None) -> list[Group] | None:
        return read_batch(self.swarm.home, self.number, stop=stop or threading.Event())

    def log_size(self) -> int:
        with self.swarm.home.database.read() as connection:
            return log.size(connection)

    def blob_name(self) -> str:
        with self.swarm.home.database.read() as connection:
            query = select(groups.c.blob).where(groups.c.submission == self.submission)
            return str(connection.execute(query).scalar_one())


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Swarm]:
    with running(tmp_path_factory.mktemp("run"), tiny_policy_path, spec=SPEC) as swarm:
        yield swarm


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "REBUILD_POLL_SECONDS", 0.05)


@pytest.fixture(scope="module")
def veteran(swarm: Swarm) -> Peer:
    """A node whose slots are measured in part."""
    return swarm.peer()


@pytest.fixture
def step(swarm: Swarm, veteran: Peer) -> Step:
    return step_of(swarm, veteran)


def step_of(swarm: Swarm, peer: Peer) -> Step:
    """Step 0 with a new group as its batch; its policy is never published, so that slots stay fresh."""
    lease = peer.lease()
    receipt = swarm.judge(peer, swarm.honest(lease), lease)
    assert receipt.outcome is Outcome.ADMITTED
    home, mine = swarm.home, groups.c.submission == receipt.submission
    with home.database.write() as connection:
        connection.execute(update(groups).values(step=None))
        connection.execute(steps.delete())
        connection.execute(steps.insert().values(step=0, assigned_at=0.0, reward_mean=0.0, staleness_mean=0.0))
        connection.execute(update(groups).where(mine).values(step=0))
        blob = connection.execute(select(groups.c.blob).where(mine)).scalar_one()
        query = select(submissions.c.body).where(submissions.c.submission == receipt.submission)
        body = connection.execute(query).scalar_one()
    return Step(swarm, 0, receipt.submission, home.blobs.path(blob), home.blobs.path(body))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["a flipped bit", "a missing file"])
def test_a_lost_group_is_rebuilt_from_its_evidence_and_the_log_stays_as_it_is(
    step: Step, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, size = step.read(), step.log_size()
    damage(step.blob)  # type: ignore[operator]
    caplog.clear()
    assert step.read() == wanted, "bit for bit, where it was measured alone"
    assert step.log_size() == size
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([each for each in said if "waiting for a verifier to measure it again" in each]) == 1
    receipt = step.swarm.peer().send("GET", f"/v1/receipts/{step.submission}")
    assert receipt.status == 200, "the node's receipt stays what it was"


def test_a_group_of_which_one_row_was_measured_is_rebuilt_from_that_row(swarm: Swarm, veteran: Peer) -> None:
    """The other rows' log-probabilities were never the verifier's, and a new measurement must not judge anew."""
    for _ in range(12):  # the k-th in a row is measured whole with odds of at most 1 to k
        step = step_of(swarm, veteran)
        with swarm.home.database.read() as connection:
            query = select(submissions.c.spot).where(submissions.c.submission == step.submission)
            spot = connection.execute(query).scalar_one()
        if spot is not None:
            break
    assert spot is not None
    before = step.read()
    flip(step.blob)
    assert step.read() == before


def test_a_group_that_is_lost_with_its_evidence_is_named_with_what_to_do(step: Step) -> None:
    whole = step.blob.read_bytes()
    flip(step.blob)
    flip(step.body)
    with pytest.raises(StorageFault) as error:
        step.read()
    assert f"group of submission {step.submission} is lost (blob {step.blob.name} is damaged)" in str(error.value)
    assert f"its evidence is lost, too: blob {step.body.name} is damaged" in str(error.value)
    assert "put either blob back from a backup" in str(error.value)
    assert "\n" not in str(error.value)
    step.blob.write_bytes(whole)
    (found,) = step.read() or []
    assert msgspec.structs.replace(found, environment=None) == decode_group(whole)


def test_a_group_that_is_whole_and_cannot_be_trained_on_is_rebuilt(step: Step) -> None:
    """Its digest is right: a broken verifier wrote it so, and the trainer would end in the middle of the step."""
    (before,) = step.read() or []
    short = replace(before.rollouts[0], logprobs=before.rollouts[0].logprobs[1:])
    name = step.swarm.home.blobs.put(
        encode_group(msgspec.structs.replace(before, rollouts=(short, *before.rollouts[1:])))
    )
    with step.swarm.home.database.write() as connection:
        connection.execute(update(groups).where(groups.c.submission == step.submission).values(blob=name))
    (after,) = step.read() or []
    assert without_rounding(after) == without_rounding(before)


@pytest.mark.parametrize("trained", [False, True])
def test_a_group_that_rounds_otherwise_is_taken_before_its_policy_is_out_and_not_after(
    step: Step, trained: bool
) -> None:
    """Until then nobody has seen what it leads to; afterwards it would lead to a second history."""
    (before,) = step.read() or []
    first = before.rollouts[0]
    other = replace(first, logprobs=(first.logprobs[0] - 1e-6, *first.logprobs[1:]))
    blobs = step.swarm.home.blobs
    name = blobs.put(encode_group(msgspec.structs.replace(before, rollouts=(other, *before.rollouts[1:]))))
    with step.swarm.home.database.write() as connection:
        connection.execute(update(groups).where(groups.c.submission == step.submission).values(blob=name))
        if trained:
            training.finish_step(connection, step.number, stats={}, now=time.time())
    flip(blobs.path(name))
    if trained:
        with pytest.raises(StorageFault, match="could not be rebuilt"):
            step.read()
        assert step.blob_name() == name
    else:
        (after,) = step.read() or []
        assert without_rounding(after) == without_rounding(before)
        for one, rollout in zip(before.rollouts, after.rollouts, strict=True):
            # The first forward passes began with a row drawn at random; these end with the last one tried.
            assert rollout.logprobs == pytest.approx(one.logprobs, abs=1e-5)
        assert step.blob_name() != name


def without_rounding(group: Group) -> Group:
    """`group` without the log-probabilities, whose last bits depend on which row was measured first."""
    return msgspec.structs.replace(group, rollouts=tuple(replace(each, logprobs=()) for each in group.rollouts))


def test_damaged_evidence_is_not_served_to_auditors(step: Step, caplog: pytest.LogCaptureFixture) -> None:
    """They would take the run for a forger; the operator, who can put it back, would hear of it last."""
    peer, path = step.swarm.peer(), f"/v1/blobs/{step.body.name}"
    whole = step.body.read_bytes()
    assert peer.send("GET", path).body == whole
    flip(step.body)
    assert peer.send("GET", path).status == 404
    assert f"blob {step.body.name} is damaged, and is not served: put it back from a backup" in caplog.text
    step.body.write_bytes(whole)
    assert peer.send("GET", path).body == whole


def test_a_trainer_that_is_stopped_does_not_wait_for_a_rebuild(step: Step) -> None:
    stop = threading.Event()
    stop.set()
    flip(step.blob)
    assert step.read(stop) is None
    assert step.read(), "and it is whole when the trainer starts again"
