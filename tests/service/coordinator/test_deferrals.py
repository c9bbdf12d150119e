"""What waits for a policy or for a disk: all of it is put back, and the log has when that began and when it ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from actors import PUBLIC_KEY, Actors, spec_of

from coordinator.metrics.roles import VerifierMetrics
from coordinator.run.home import Home, create_home
from coordinator.storage.verdicts import QueueItem
from coordinator.verifier.bodies import BodyUnavailable
from coordinator.verifier.deferrals import FORGOTTEN_SECONDS, Deferrals
from node.protocol.submission import Rollout
from node.verification.measure import PolicyUnavailable

AWAY = PolicyUnavailable("policy 0: nobody serves it")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of())
    yield home
    home.database.close()


@pytest.fixture
def claimed(home: Home) -> tuple[QueueItem, QueueItem]:
    """Two submissions of policy 0, which a verifier has claimed."""
    actors = Actors(home)
    actors.register("a", "b")
    actors.publish(0)
    for node in ("a", "b"):
        actors.submit(node, actors.lease(node, held=(0,))[0].lease_id)
    first, second = actors.claim(), actors.claim()
    assert first is not None
    assert second is not None
    return first, second


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_policy_that_is_away_is_one_line_when_work_begins_to_wait_and_one_when_it_goes_on(
    home: Home, claimed: tuple[QueueItem, QueueItem], caplog: pytest.LogCaptureFixture
) -> None:
    """A line for every submission and second hid everything else that an operator had to read."""
    caplog.set_level(logging.INFO, "coordinator.verifier.deferrals")
    metrics, clock = VerifierMetrics(), Seconds()
    deferrals = Deferrals(home, metrics, clock=clock)
    for _ in range(30):
        for one in claimed:
            await deferrals.defer(one, AWAY)
        clock.now += 4
    assert caplog.messages == [
        "submissions that policy 0 drew: deferred, trying again every 1 s: policy 0: nobody serves it",
    ]
    assert metrics.deferred._value.get() == 60
    deferrals.measured(claimed[1], ())
    deferrals.measured(claimed[0], ())
    assert caplog.messages[1:] == ["submissions that policy 0 drew: judged again, after 120 s"]


async def test_a_body_that_cannot_be_read_is_named(
    home: Home, claimed: tuple[QueueItem, QueueItem], caplog: pytest.LogCaptureFixture
) -> None:
    deferrals = Deferrals(home, VerifierMetrics())
    for _ in range(3):
        await deferrals.defer(claimed[0], BodyUnavailable("its body is unavailable: Input/output error"))
    deferrals.measured(claimed[1], ())
    (said,) = caplog.messages
    assert said.startswith(f"submission {claimed[0].submission[:16]}…: deferred")


async def test_a_wait_that_another_verifier_ended_is_not_taken_for_the_next_one(
    home: Home, claimed: tuple[QueueItem, QueueItem], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Seconds()
    deferrals = Deferrals(home, VerifierMetrics(), clock=clock)
    await deferrals.defer(claimed[0], AWAY)
    clock.now += FORGOTTEN_SECONDS + 1
    await deferrals.defer(claimed[1], AWAY)
    assert len(caplog.messages) == 2
    caplog.clear()
    clock.now += FORGOTTEN_SECONDS + 1
    deferrals.measured(claimed[0], ())
    assert caplog.messages == []


async def test_slots_of_one_policy_whose_rollouts_another_drew_to_their_end_wait_for_that_one(
    home: Home, claimed: tuple[QueueItem, QueueItem], caplog: pytest.LogCaptureFixture
) -> None:
    """Else each second had a line that policy 0 is waited for, and one that it is here."""
    deferrals = Deferrals(home, VerifierMetrics())
    caplog.set_level(logging.INFO, "coordinator.verifier.deferrals")
    of_both = [drawn_by(0), drawn_by(0, 1)]
    for _ in range(3):
        deferrals.measured(claimed[1], [drawn_by(0)])
        await deferrals.defer(claimed[0], PolicyUnavailable("policy 1 is being fetched", version=1))
    assert [said.split(":")[0] for said in caplog.messages] == ["submissions that policy 1 drew"]
    deferrals.measured(claimed[0], of_both)
    assert caplog.messages[1:] == ["submissions that policy 1 drew: judged again, after 0 s"]


def drawn_by(*versions: int) -> Rollout:
    tokens = [0] * len(versions)
    return Rollout(
        seed=bytes(32),
        prompt_ids=[0],
        completion_ids=tokens,
        logprobs=[0.0] * len(versions),
        segment_versions=list(versions),
        segment_tokens=[1] * len(versions),
        proofs=[],
    )
