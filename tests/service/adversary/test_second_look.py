"""Weights that deviate by no more than rounding might, and their direction: what a second look is for.

The limits here are those of a run that was never calibrated, so that nothing else catches these workers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from swarm import Peer, Swarm, running, small_spec
from verifying import generated

from coordinator.calibration.cheats import alter, noise
from node.engines.torch import TorchEngine
from node.protocol.admission import GAIN_LIMIT, Outcome
from node.protocol.messages import Lease, Receipt
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec, ProofSpec, RunSpec
from node.protocol.submission import Rollout
from node.verification.second_look import gain_lower_bound, int8
from toploc import Gain

LIMITS = LimitsSpec(second_looks=1.0)
SPEC = small_spec(limits=LIMITS, proofs=ProofSpec(scheme="sketch/1", sketch_step=0.01))


@pytest.fixture
def swarm(tmp_path: Path, tiny_policy_path: Path) -> Iterator[Swarm]:
    with running(tmp_path / "run", tiny_policy_path, spec=SPEC) as swarm:
        yield swarm


def drawn(path: Path, swarm: Swarm, lease: Lease, *, spec: RunSpec = SPEC) -> list[Rollout]:
    """The group of a worker that serves the weights in `path` as if they were the lease's."""
    return generated(TorchEngine(spec), path, swarm.requests(lease), version=lease.version)


def assert_found(receipt: Receipt, figure: str) -> None:
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.PROOF_MISMATCH), receipt
    assert receipt.detail.startswith(f"All rows together: {figure} is "), receipt


def test_int8_weights_within_every_limit_are_told_by_their_direction(swarm: Swarm, tmp_path: Path) -> None:
    alter(swarm.policy_path, tmp_path / "int8", int8)
    peer = swarm.peer()
    lease = peer.lease()
    assert_found(swarm.judge(peer, drawn(tmp_path / "int8", swarm, lease), lease), "int8_gain")


def test_a_verifier_without_memory_for_the_policy_finds_the_same(
    tmp_path: Path, tiny_policy_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so does an auditor: neither may depend on the size of a machine."""
    with running(tmp_path / "run", tiny_policy_path, spec=SPEC, policy_memory=0) as swarm:
        alter(swarm.policy_path, tmp_path / "int8", int8)
        liar, worker = swarm.peer(), swarm.peer()
        lease = liar.lease()
        assert_found(swarm.judge(liar, drawn(tmp_path / "int8", swarm, lease), lease), "int8_gain")
        lease = worker.lease()
        assert swarm.judge(worker, drawn(swarm.policy_path, swarm, lease), lease).outcome is Outcome.ADMITTED
        assert swarm.audit(tmp_path / "auditor", policy_memory=0) == 0
    assert json.loads(capsys.readouterr().out)["results"]["agree"] == 2


def test_other_changes_of_the_same_size_are_not_taken_for_int8(swarm: Swarm, tmp_path: Path) -> None:
    """What the limits let pass is not called something that it is not."""
    alter(swarm.policy_path, tmp_path / "noise", noise)
    peer = swarm.peer()
    lease = peer.lease()
    assert swarm.judge(peer, drawn(tmp_path / "noise", swarm, lease), lease).outcome is Outcome.ADMITTED


def newest(peer: Peer) -> Lease:
    """A lease of the newest policy."""
    (lease,) = peer.ask(held=(0, 1)).leases
    assert lease.version == 1
    return lease


def test_the_policy_of_one_step_ago_is_told_by_its_direction_and_the_right_one_is_not(
    swarm: Swarm, tmp_path: Path
) -> None:
    def slightly(weight: torch.Tensor) -> torch.Tensor:
        return noise(weight, share=0.005)

    alter(swarm.policy_path, tmp_path / "next", slightly)
    swarm.publish(tmp_path / "next", version=1)
    liar, worker = swarm.peer(), swarm.peer()
    lease = newest(liar)
    assert_found(swarm.judge(liar, drawn(swarm.policy_path, swarm, lease), lease), "previous_gain")
    lease = newest(worker)
    assert swarm.judge(worker, drawn(tmp_path / "next", swarm, lease), lease).outcome is Outcome.ADMITTED


def test_a_run_that_suspects_nothing_looks_once(tmp_path: Path, tiny_policy_path: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, suspects=())
    spec = msgspec.structs.replace(SPEC, limits=limits)
    with running(tmp_path / "run", tiny_policy_path, spec=spec) as swarm:
        alter(swarm.policy_path, tmp_path / "int8", int8)
        peer = swarm.peer()
        lease = peer.lease()
        receipt = swarm.judge(peer, drawn(tmp_path / "int8", swarm, lease, spec=spec), lease)
        assert receipt.outcome is Outcome.ADMITTED


@pytest.mark.parametrize(
    ("gain", "error", "is_over"),
    [(0.9, 0.1, True), (0.9, 0.16, False), (0.6, 0.05, True), (0.6, 0.08, False), (0.49, 0.0, False)],
)
def test_a_gain_that_chance_may_have_made_is_no_finding(gain: float, error: float, is_over: bool) -> None:
    """A group of few tokens goes half of the way by chance, and its worker is honest."""
    assert (gain_lower_bound(Gain(gain, error, 40)) > GAIN_LIMIT) is is_over


@pytest.mark.parametrize("gain", [-3.0, 0.0, 0.9])
def test_a_gain_of_nothing_that_was_compared_is_none(gain: float) -> None:
    assert gain_lower_bound(Gain(gain, math.inf, 0)) == 0.0
    assert gain_lower_bound(Gain(-gain, 0.01, 40)) <= max(0.0, -gain)
