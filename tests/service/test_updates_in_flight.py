"""Policies that arrive while completions are drawn: a real worker, coordinator, origin and verifier.

An honest worker must not be refused for going on under a newer policy where the run allows it, and must not do
so where the run does not.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from halting import SECONDS, Halt
from sqlalchemy import select
from swarm import Swarm, running, small_spec, worker_thread
from waiting import until

from coordinator.storage.schema import slots, submissions
from node.engines.torch import TorchEngine
from node.policy.file import save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.admission import Outcome
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.submission.reader import read_rollouts

HALT_AT = 40
"""The step at which the engine waits for the policy; completions of the tiny policy's random weights are longer."""


def spec_with(lead: int) -> RunSpec:
    spec = small_spec()
    return msgspec.structs.replace(
        spec,
        sampling=msgspec.structs.replace(spec.sampling, max_new_tokens=200, max_version_lead=lead),
        batch=msgspec.structs.replace(spec.batch, groups_per_step=4),
    )


def judged(swarm: Swarm) -> list[tuple[int, Outcome, str, list[Rollout]]]:
    """Of each submission with a verdict: the leased version, the outcome, why, and the rollouts."""
    query = (
        select(slots.c.version, submissions.c.outcome, submissions.c.detail, submissions.c.body)
        .join(slots, slots.c.id == submissions.c.slot_id)
        .where(submissions.c.outcome.is_not(None))
    )
    home = swarm.home
    with home.database.read() as connection:
        return [
            (row.version, Outcome(row.outcome), row.detail, read_rollouts(home.blobs.path(row.body), spec=home.spec))
            for row in connection.execute(query)
        ]


def later_policy(folder: Path) -> Path:
    path = folder / "later.safetensors"
    save_policy(make_model(seed=21), make_tokenizer(), path)
    return path


def test_a_policy_that_arrives_in_flight_is_gone_on_with_and_admitted(
    tmp_path: Path, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, tiny_policy_path, spec=spec_with(lead=1)) as swarm:
        halted, queued, start = Halt(monkeypatch, at=HALT_AT), threading.Event(), TorchEngine._start

        def starting(engine: TorchEngine) -> None:
            start(engine)
            if engine._replacing:
                queued.set()

        monkeypatch.setattr(TorchEngine, "_start", starting)
        with worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker"):
            assert halted.reached.wait(SECONDS)
            swarm.publish(later_policy(tmp_path), version=1)
            assert queued.wait(SECONDS)
            halted.go.set()
            until(lambda: len(judged(swarm)) >= 4)
        found = judged(swarm)
    assert {outcome for _, outcome, _, _ in found} == {Outcome.ADMITTED}, [detail for _, _, detail, _ in found]
    cut = [row for leased, _, _, rows in found if leased == 0 for row in rows if row.segment_versions == [0, 1]]
    assert cut, "the policy must have arrived while completions were drawn"
    whole = [row for leased, _, _, rows in found if leased == 1 for row in rows]
    assert whole
    assert all(row.segment_versions == [1] for row in whole)


def test_without_a_lead_no_completion_has_two_policies(
    tmp_path: Path, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, tiny_policy_path, spec=spec_with(lead=0)) as swarm:
        halted = Halt(monkeypatch, at=HALT_AT)
        with worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker") as status:
            assert halted.reached.wait(SECONDS)
            swarm.publish(later_policy(tmp_path), version=1)
            until(lambda: status().get("held_versions") == [1, 0])
            assert status()["version"] == 0
            halted.go.set()
            until(lambda: any(leased == 1 for leased, _, _, _ in judged(swarm)))
        found = judged(swarm)
    assert {outcome for _, outcome, _, _ in found} == {Outcome.ADMITTED}, [detail for _, _, detail, _ in found]
    assert all(row.segment_versions == [leased] for leased, _, _, rows in found for row in rows)
    assert {leased for leased, _, _, _ in found} == {0, 1}
