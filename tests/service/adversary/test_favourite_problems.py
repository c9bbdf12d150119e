"""An operator, or a worker, that would rather have another problem than the one that a slot is for; over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from swarm import Peer, Swarm, running, small_spec

from coordinator.storage import pools, verdicts
from node.protocol.admission import Outcome, Verdict
from node.protocol.messages import candidate_of
from node.protocol.pools import candidates, first_candidate
from node.protocol.reasons import Reason
from node.protocol.run import EnvironmentSpec, PoolsSpec, ProblemsSpec
from node.protocol.slots import MOST_CANDIDATES, SlotProblem

FAVOURITE = 3
PROBLEMS = 8
SPEC = small_spec(environments=(EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=PROBLEMS)),))
SPEC = msgspec.structs.replace(
    SPEC, batch=msgspec.structs.replace(SPEC.batch, groups_per_step=60, pools=PoolsSpec(easy=1, normal=2, hard=1))
)


@pytest.fixture
def swarm(tmp_path: Path, tiny_policy_path: Path) -> Iterator[Swarm]:
    with running(tmp_path / "run", tiny_policy_path, spec=SPEC) as swarm:
        yield swarm


def work(swarm: Swarm, peer: Peer, slots: int = 3) -> None:
    for _ in range(slots):
        lease = peer.lease()
        assert swarm.judge(peer, swarm.honest(lease), lease).outcome is Outcome.ADMITTED


def audit(swarm: Swarm, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """A real audit of everything, over HTTP."""
    capsys.readouterr()
    swarm.audit(folder)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def favouring(spec: Any, **where: Any) -> int:
    """The first candidate that is the favourite, or what is right where none is."""
    tried = [one.problem for one in candidates(spec, **{key: where[key] for key in where if key != "mean_of"})]
    return tried.index(FAVOURITE) if FAVOURITE in tried else first_candidate(spec, **where)


def test_a_coordinator_that_hands_out_a_favourite_problem_is_seen_by_the_audit(
    swarm: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = swarm.peer()
    work(swarm, peer)
    assert audit(swarm, tmp_path / "before", capsys)["problems"] == []
    monkeypatch.setattr(pools, "first_candidate", favouring)
    work(swarm, peer, slots=4)
    report = audit(swarm, tmp_path / "after", capsys)
    assert report["outcome"] == "disagree"
    assert {problem["code"] for problem in report["problems"]} == {"wrong_pool"}
    assert {verdict["result"] for verdict in report["verdicts"]} == {"agree"}, "the work itself was right"


def test_a_coordinator_that_logs_another_candidate_than_it_gave_out_is_seen_by_the_audit(
    swarm: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log alone looks right then; what the worker signed for is another problem's prompt."""

    def right(claimed: verdicts.QueueItem, verdict: Verdict, *, now: float) -> Any:
        where = {"manifest_digest": claimed.manifest_digest, "slot": claimed.slot}
        named = first_candidate(SPEC, run_id=swarm.home.run_id, **where, mean_of=nobody_solved_any)
        return entry(replace(claimed, candidate=named), verdict, now=now)

    entry = verdicts._entry
    monkeypatch.setattr(pools, "first_candidate", favouring)
    monkeypatch.setattr(verdicts, "_entry", right)
    work(swarm, swarm.peer(), slots=4)
    report = audit(swarm, tmp_path / "auditor", capsys)
    assert {problem["code"] for problem in report["problems"]} == {"verdict_differs"}


def nobody_solved_any(problem: SlotProblem) -> float | None:
    """The pools of policy 0, before which nothing was admitted."""


def test_a_worker_that_submits_another_candidates_problem_is_rejected(
    swarm: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of a slot's candidates are known to its worker: it must not take the one that it likes best."""
    peer = swarm.peer()
    lease = peer.lease()
    where = {"run_id": swarm.home.run_id, "manifest_digest": lease.manifest_digest, "slot": lease.slot}
    tried = [one.problem for one in candidates(SPEC, **where)]
    other = next(at for at in range(MOST_CANDIDATES) if tried[at] != tried[candidate_of(lease)])
    preferred = msgspec.structs.replace(lease, candidate=other)
    receipt = swarm.judge(peer, swarm.honest(preferred), lease)
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.WRONG_PROMPT)
    assert audit(swarm, tmp_path / "auditor", capsys)["outcome"] == "agree"
