"""A run whose policy is recurrent: who decodes it honestly is paid, and who saves on its state is caught."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from family_cases import families
from swarm import running, small_spec
from verifying import generated

from benchmarks.modelling.policies import random_policy
from coordinator.calibration.cheats import RESET_TOKENS, StateResetEngine
from node.protocol.messages import Lease

NEW_TOKENS = 80


@pytest.mark.parametrize("name", families(pytest.mark.system, ["finch", "eagle", "goldfinch"]))
def test_an_honest_worker_is_admitted_and_one_that_forgets_its_state_is_rejected(name: str, tmp_path: Path) -> None:
    """What is read step by step and what is read at once must be one model to the verifier, and nothing else may be."""
    path = random_policy(name, tmp_path / "policy")
    spec = small_spec()
    spec = msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, max_new_tokens=NEW_TOKENS))
    with running(tmp_path / "run", path, spec=spec) as swarm:
        honest, hostile = swarm.peer(), swarm.peer()
        lease: Lease = honest.lease()
        receipt = swarm.judge(honest, swarm.honest(lease), lease)
        assert (receipt.outcome, receipt.reason) == ("admitted", None), receipt
        lease = hostile.lease()
        rollouts = generated(StateResetEngine(spec), path, swarm.requests(lease), version=0)
        assert max(len(one.prompt_ids) + len(one.completion_ids) for one in rollouts) > RESET_TOKENS
        receipt = swarm.judge(hostile, rollouts, lease)
        assert (receipt.outcome, receipt.reason) == ("rejected", "proof_mismatch"), receipt
