"""One run whose worker draws with vLLM, over environments that want packages which vLLM could not share an interpreter
with: each of the three has its own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from environment_rooms import ROOMS, room
from sandboxing import needs_sandbox
from sqlalchemy import select
from swarm import running
from talking import SPEC, talkative_file
from waiting import eventually

from coordinator.storage.schema import slots, submissions
from node.client.http import Backoff
from node.engines.vllm import VllmEngine
from node.engines.vllm_settings import VllmSettings
from node.environments.isolated.store import VARIABLE
from node.joining.session import JoinSettings
from node.protocol.admission import Outcome
from node.protocol.environment_spec import ProblemsSpec
from node.protocol.run import EnvironmentSpec, SamplingSpec
from node.worker.daemon import WorkerSettings, run_worker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.usefixtures("forked_vllm"), needs_sandbox]

OLD, NEW = (
    ("legacy-examples", "verifiers:legacy_examples:Echo", {}),
    ("v1-examples", "verifiers:v1_sorting", {"arguments": {"turns": 3}, "problems": ProblemsSpec(count=100)}),
)


def test_vllm_and_two_generations_of_verifiers_serve_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker, verifier and auditor ask processes of their own, and agree on every reply and reward."""
    monkeypatch.setenv(VARIABLE, str(ROOMS.folder))
    environments = tuple(
        EnvironmentSpec(name=name, package=room(package).lock.package, **more) for package, name, more in (OLD, NEW)
    )
    sampling = SamplingSpec(group_size=2, max_new_tokens=48, max_turns=4, max_reply_tokens=128)
    spec = msgspec.structs.replace(SPEC, environments=environments, sampling=sampling)
    with running(tmp_path, talkative_file(tmp_path), spec=spec) as swarm:

        def judged() -> list[tuple[int, str]]:
            query = select(slots.c.environment, submissions.c.outcome).join(slots, slots.c.id == submissions.c.slot_id)
            with swarm.home.database.read() as connection:
                return [tuple(row) for row in connection.execute(query.where(submissions.c.outcome.is_not(None)))]

        async def work() -> None:
            stop = asyncio.Event()
            engine = VllmEngine(spec, VllmSettings(cpu_threads=1, kv_cache_gib=0.1), state=tmp_path / "vllm")
            settings = WorkerSettings(
                join=JoinSettings(run_id=swarm.home.run_id, coordinators=(swarm.url,)),
                state=tmp_path / "worker",
                backoff=Backoff(first_seconds=0.02, max_seconds=0.1),
            )
            daemon = asyncio.create_task(
                run_worker(settings, key=Ed25519PrivateKey.generate(), make_engine=lambda _: engine, stop=stop)
            )
            try:
                await eventually(lambda: {environment for environment, _ in judged()} == {0, 1}, seconds=400.0)
            finally:
                stop.set()
                await daemon

        asyncio.run(work())
        verdicts = judged()
        audited = swarm.audit(tmp_path / "audit", sources=(swarm.origin_url,))
    assert {outcome for _, outcome in verdicts} == {Outcome.ADMITTED}, verdicts
    assert audited == 0, capsys.readouterr().out
