"""Runs over environments of the verifiers package, of both generations, each in its own interpreter and sandbox."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from environment_rooms import ROOMS, room
from sandboxing import needs_sandbox
from sqlalchemy import select
from swarm import learning, running, small_spec, worker_thread
from talking import SPEC as TALKING
from talking import talkative_file

from coordinator.run.definition import keep_locks
from coordinator.run.home import Home
from coordinator.storage import log
from coordinator.storage.schema import submissions
from node.datasets.folder import DATASETS
from node.environments.isolated.store import VARIABLE
from node.policy.models.tiny_llama import EOS
from node.protocol.admission import Outcome, has_signal
from node.protocol.environment_spec import ProblemsSpec
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, VerdictEntry
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec
from node.protocol.turns import turns_of
from node.submission.reader import read_rollouts
from shardcast.wire import decode

pytestmark = [pytest.mark.timeout(900), needs_sandbox]

STEPS = 3
SECONDS = 800.0


def installed(package: str, name: str, **more: Any) -> EnvironmentSpec:
    """An environment of a package as run.toml names it."""
    return EnvironmentSpec(name=f"verifiers:{name}", package=room(package).lock.package, **more)


@pytest.fixture(autouse=True)
def _rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(ROOMS.folder))


def training_spec() -> RunSpec:
    """Some steps over letters, of which even noise has some in lower case."""
    spec = small_spec(environments=(installed("v1-examples", "v1_letters"),))
    return msgspec.structs.replace(
        spec,
        sampling=msgspec.structs.replace(spec.sampling, group_size=4, max_prompt_tokens=256, max_new_tokens=24),
        batch=msgspec.structs.replace(spec.batch, groups_per_step=2, lease_seconds=300.0),
        training=msgspec.structs.replace(spec.training, steps=STEPS, minibatches=2),
    )


def entries(home: Home) -> list[LogEntry]:
    with home.database.read() as connection:
        leaves = log.leaves(connection, 0, log.size(connection))
    return [decode(LogEntry, leaf, max_bytes=2**20) for leaf in leaves]


def policies(home: Home) -> list[PolicyEntry]:
    return [entry for entry in entries(home) if isinstance(entry, PolicyEntry)]


def test_an_environment_of_the_package_trains_and_is_audited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker, verifier and auditor each run the environment themselves, and agree on every prompt and reward."""
    spec = training_spec()
    keep_locks(spec, tmp_path / "data" / DATASETS)
    with running(tmp_path, talkative_file(tmp_path), spec=spec) as swarm, learning(swarm, tmp_path / "trainer"):
        home, deadline = swarm.home, time.monotonic() + SECONDS
        with worker_thread(swarm.url, home.run_id, tmp_path / "worker"):
            while len(policies(home)) <= STEPS:
                assert time.monotonic() < deadline, f"{STEPS} steps were not done in time"
                time.sleep(0.2)
        sources = (swarm.origin_url,)
        audited = swarm.audit(tmp_path / "audit", sample=4, all_=False, seed=1, sources=sources)
        verdicts = [entry for entry in entries(home) if isinstance(entry, VerdictEntry)]
        digests = [policy.result_digest for policy in policies(home)]
        batches = [entry for entry in entries(home) if isinstance(entry, BatchEntry)][:STEPS]
    rewards_of = {verdict.submission: verdict.rewards or () for verdict in verdicts}
    taught = [any(has_signal(rewards_of[one]) for one in batch.submissions) for batch in batches]
    assert audited == 0, capsys.readouterr().out
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ADMITTED}, [verdict.detail for verdict in verdicts]
    # A group whose completions all earn the same teaches nothing.
    assert [before != after for before, after in pairwise(digests[: STEPS + 1])] == taught
    assert sum(taught) >= STEPS - 1
    assert any(0 < reward < 1 for verdict in verdicts for reward in verdict.rewards or ())


def test_a_conversation_of_the_package_is_drawn_and_verified(tmp_path: Path) -> None:
    """The verifier replays what the environment said to the worker; one letter of difference would be a rejection."""
    spec = msgspec.structs.replace(
        TALKING,
        environments=(
            installed("legacy-examples", "legacy_examples:Echo"),
            installed("v1-examples", "v1_sorting", arguments={"turns": 3}, problems=ProblemsSpec(count=100)),
        ),
        sampling=SamplingSpec(group_size=4, max_new_tokens=48, max_turns=4, max_reply_tokens=128),
    )
    keep_locks(spec, tmp_path / "data" / DATASETS)
    with running(tmp_path, talkative_file(tmp_path), spec=spec) as swarm:
        deadline = time.monotonic() + SECONDS
        with worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker"):
            while sum(isinstance(entry, VerdictEntry) for entry in entries(swarm.home)) < 6:
                assert time.monotonic() < deadline, "no verdicts in time"
                time.sleep(0.1)
        verdicts = [entry for entry in entries(swarm.home) if isinstance(entry, VerdictEntry)]
        query = select(submissions.c.body).where(submissions.c.outcome.is_not(None))
        with swarm.home.database.read() as connection:
            bodies = connection.execute(query).scalars().all()
            groups = [read_rollouts(swarm.home.blobs.path(body), spec=spec) for body in bodies]
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ADMITTED}, [verdict.detail for verdict in verdicts]
    turns = [len(turns_of(rollout.completion_ids, [EOS])) for group in groups for rollout in group]
    assert max(turns) == 3  # the environment's own limit, below the run's
    assert any(reward > 0 for verdict in verdicts for reward in verdict.rewards or ())
