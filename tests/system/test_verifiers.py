"""Runs over environments of the verifiers package, of both generations, each in its own interpreter and sandbox."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from environment_rooms import ROOMS, room
from sandboxing import needs_sandbox
from sqlalchemy import select
from swarm import running, serve, small_spec, verifying, worker_thread
from talking import SPEC as TALKING
from talking import talkative_file

from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from coordinator.storage import log
from coordinator.storage.schema import submissions
from coordinator.training.trainer import Trainer, TrainerSettings
from node.audit.auditor import run_audit
from node.environments.isolated.store import VARIABLE
from node.policy.models.tiny_llama import EOS
from node.protocol.admission import Outcome, has_signal
from node.protocol.environment_spec import ProblemsSpec
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, VerdictEntry
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec, run_id_of
from node.protocol.turns import turns_of
from node.submission.reader import read_rollouts
from shardcast import Origin, OriginServer
from shardcast.wire import decode

pytestmark = [pytest.mark.timeout(900), needs_sandbox]

STEPS = 5
SECONDS = 800.0


def installed(package: str, name: str, **more: Any) -> EnvironmentSpec:
    """An environment of a package as run.toml names it."""
    return EnvironmentSpec(name=f"verifiers:{name}", package=room(package).lock.package, **more)


@pytest.fixture(autouse=True)
def _rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(ROOMS.folder))


def training_spec() -> RunSpec:
    """Five steps over letters, of which even noise has some in lower case."""
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


@contextmanager
def training(home: Home, key: Ed25519PrivateKey, folder: Path) -> Iterator[str]:
    """The trainer at work in a thread; where it serves."""
    origin = Origin(folder / "origin", key, home.run_id, announced=-1)
    server = OriginServer(origin)
    url = f"http://127.0.0.1:{server.start()}"
    trainer = Trainer(home, origin=origin, server=server, settings=TrainerSettings(state=folder))
    thread = threading.Thread(target=trainer.run)
    thread.start()
    try:
        yield url
    finally:
        trainer.stop()
        thread.join()
        server.stop()
        origin.close()


def test_an_environment_of_the_package_trains_for_five_steps_and_is_audited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker, verifier and auditor each run the environment themselves, and agree on every prompt and reward."""
    key = Ed25519PrivateKey.generate()
    public_key = key.public_key().public_bytes_raw()
    home = create_home(tmp_path / "data", public_key=public_key, spec=training_spec())
    with (
        training(home, key, tmp_path / "trainer") as origin,
        serve(Coordinator(home, key=key, relay_urls=(origin,))) as url,
        verifying(home, source=origin, state=tmp_path / "verifier"),
    ):
        deadline = time.monotonic() + SECONDS
        with worker_thread(url, home.run_id, tmp_path / "worker"):
            while len(policies(home)) <= STEPS:
                assert time.monotonic() < deadline, "five steps were not done in time"
                time.sleep(0.2)
        audited = asyncio.run(
            run_audit(
                url,
                run_id=run_id_of(public_key),
                sample=8,
                all_=False,
                seed=1,
                state_dir=tmp_path / "audit",
                as_json=False,
                sources=(origin,),
            )
        )
    verdicts = [entry for entry in entries(home) if isinstance(entry, VerdictEntry)]
    digests = [policy.result_digest for policy in policies(home)]
    rewards_of = {verdict.submission: verdict.rewards or () for verdict in verdicts}
    batches = [entry for entry in entries(home) if isinstance(entry, BatchEntry)][:STEPS]
    taught = [any(has_signal(rewards_of[one]) for one in batch.submissions) for batch in batches]
    home.database.close()
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
