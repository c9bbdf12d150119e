"""A run in bfloat16 whose verifier and auditors read every group twice, with real parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from swarm import running, small_spec

from coordinator.calibration.cheats import alter, noise
from coordinator.storage import log
from node.engines.torch import TorchEngine
from node.policy.file import load_policy, save_policy
from node.protocol.admission import Outcome
from node.protocol.messages import LogEntry, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import HonestSpec, LevelSpec, LimitsSpec, ModelSpec, ProofSpec, RunSpec
from node.protocol.submission import Rollout
from node.verification.deviations import Deviations
from node.verification.readings import read_by_transformers
from node.verification.spans import spans_of
from shardcast.wire import decode

LEVELS = HonestSpec(sketch=LevelSpec(mean=0.25, variance=0.05, largest=1.2, shared_variance=0.001))
"""Wide for honest work of one machine; noise of 3 % on the weights is beyond it."""

SPEC = small_spec(
    model=ModelSpec(dtype="bfloat16"),
    proofs=ProofSpec(scheme="toploc/1+sketch/1", sketch_step=0.005),
    limits=LimitsSpec(readings=2, honest=LEVELS, suspects=()),
)


@pytest.fixture
def policy(tmp_path: Path, tiny_policy_path: Path) -> Path:
    trained = load_policy(tiny_policy_path, dtype=torch.bfloat16)
    save_policy(trained.model, trained.tokenizer, tmp_path / "policy.safetensors")
    return tmp_path / "policy.safetensors"


def test_what_two_readings_admit_and_reject_an_audit_finds_too(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An auditor that read once would call an honest operator a liar, for logged figures that it cannot derive."""
    alter(policy, tmp_path / "noisy", lambda weight: noise(weight, share=0.03))
    cheat = TorchEngine(SPEC)
    asyncio.run(cheat.load(tmp_path / "noisy", version=0))
    with running(tmp_path / "run", policy, spec=SPEC) as swarm:
        worker, liar = swarm.peer(), swarm.peer()
        lease = worker.lease()
        rollouts = swarm.honest(lease)
        assert swarm.judge(worker, rollouts, lease).outcome is Outcome.ADMITTED
        lease = liar.lease()
        receipt = swarm.judge(liar, asyncio.run(cheat.generate(swarm.requests(lease))), lease)
        assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.PROOF_MISMATCH)
        swarm.audit(tmp_path / "auditor")
        report = json.loads(capsys.readouterr().out)
        assert (report["outcome"], report["problems"]) == ("agree", [])
        assert [verdict["result"] for verdict in report["verdicts"]] == ["agree", "agree"]
        with swarm.home.database.read() as connection:
            leaves = [decode(LogEntry, leaf, max_bytes=10_000) for leaf in log.leaves(connection, 0, 1000)]
    (logged,) = (entry for entry in leaves if isinstance(entry, VerdictEntry) and entry.reason is None)
    assert logged.totals is not None
    logged_mean, count = logged.totals.sketch.sum / logged.totals.sketch.count, logged.totals.sketch.count
    # Not to the last digit: in bfloat16 the batch has a part in it.
    assert logged_mean == pytest.approx(sketch_sum(policy, rollouts, SPEC) / count, abs=0.03)
    once = msgspec.structs.replace(SPEC, limits=msgspec.structs.replace(SPEC.limits, readings=1))
    assert logged_mean != pytest.approx(sketch_sum(policy, rollouts, once) / count, abs=0.05)


def sketch_sum(policy: Path, rollouts: Sequence[Rollout], spec: RunSpec) -> float:
    """Of a group, measured as `spec` says."""
    spans = [span for row, one in enumerate(rollouts) for _, span in spans_of(one, row=row, chunk_tokens=32)]
    found = read_by_transformers(policy, spec=spec).measure(spans, spec=spec)
    each = [Deviations.of([one], rollout.logprobs) for one, rollout in zip(found, rollouts, strict=True)]
    return sum(one.totals(spec.limits).sketch.sum for one in each)
