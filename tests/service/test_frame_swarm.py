"""A run whose policy sees a terminal's frames: who replays it is paid, and who shows other frames is caught."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from swarm import Swarm, running, small_spec
from verifying import generated

from benchmarks.modelling.policies import random_policy
from coordinator.calibration.cheats import FORGERIES, ForgedFrameEngine
from node.protocol.messages import Lease
from node.protocol.run import EnvironmentSpec
from node.protocol.submission import Rollout


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("frames")
    spec = small_spec(environments=(EnvironmentSpec(name="terminal"),))
    spec = msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, max_new_tokens=24))
    with running(folder / "run", random_policy("frame-action", folder / "policy"), spec=spec) as swarm:
        yield swarm


def forged(swarm: Swarm, lease: Lease, forgery: str) -> list[Rollout]:
    """What a worker draws that shows the run's policy other frames, with tokens and proofs that fit them."""
    engine = ForgedFrameEngine(swarm.home.spec, FORGERIES[forgery])
    return generated(engine, swarm.policy_path, swarm.requests(lease), version=0)


def test_an_honest_worker_is_admitted(swarm: Swarm) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    receipt = swarm.judge(peer, swarm.honest(lease), lease)
    assert (receipt.outcome, receipt.reason) == ("admitted", None), receipt


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_worker_that_shows_the_policy_another_frame_is_rejected(forgery: str, swarm: Swarm) -> None:
    """Nobody sends frames: only the proofs can tell what the policy was shown."""
    peer = swarm.peer()
    lease = peer.lease()
    receipt = swarm.judge(peer, forged(swarm, lease, forgery), lease)
    assert receipt.outcome == "rejected", receipt
    assert receipt.reason in {"proof_mismatch", "wrong_token", "wrong_logprob"}


def test_a_worker_that_presses_other_keys_at_the_right_frames_is_rejected(swarm: Swarm) -> None:
    """Each row ends as another row of the group did: the frames follow from the keys, and the keys are forced."""
    peer = swarm.peer()
    lease = peer.lease()
    honest = swarm.honest(lease)
    swapped = [
        msgspec.structs.replace(other, seed=own.seed)
        for own, other in zip(honest, honest[1:] + honest[:1], strict=True)
    ]
    receipt = swarm.judge(peer, swapped, lease)
    assert (receipt.outcome, receipt.reason) == ("rejected", "wrong_token"), receipt
