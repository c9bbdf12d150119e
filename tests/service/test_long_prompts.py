"""A finite set with problems whose prompts are longer than the run allows: they cost their slots, and no worker.

What would break for whom: one such problem among thousands would end one honest worker after the other, as a fault of
its engine, and the run would stand still.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from swarm import running, small_spec

from coordinator.storage.schema import submissions
from node.client.http import Backoff
from node.engines.torch import TorchEngine
from node.joining.session import JoinSettings
from node.policy.file import save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.admission import Outcome
from node.protocol.run import EnvironmentSpec, ProblemsSpec
from node.worker.daemon import WorkerSettings, run_worker

SECONDS = 180.0


@pytest.mark.timeout(280)
def test_a_problem_whose_prompt_is_too_long_ends_no_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of `reverse`, a third of the prompts have 14 tokens."""
    spec = small_spec(environments=(EnvironmentSpec(name="reverse", problems=ProblemsSpec(count=64)),))
    spec = msgspec.structs.replace(
        spec,
        sampling=msgspec.structs.replace(spec.sampling, max_prompt_tokens=13, max_new_tokens=8),
        batch=msgspec.structs.replace(spec.batch, groups_per_step=12, lease_seconds=2.0),
    )
    save_policy(make_model(20), make_tokenizer(), tmp_path / "policy")
    with running(tmp_path / "run", tmp_path / "policy", spec=spec) as swarm:

        def admitted() -> int:
            query = select(submissions.c.slot_id).where(submissions.c.outcome == Outcome.ADMITTED)
            with swarm.home.database.read() as connection:
                return len(connection.execute(query).all())

        stop, loop = asyncio.Event(), asyncio.new_event_loop()
        settings = WorkerSettings(
            join=JoinSettings(run_id=swarm.home.run_id, coordinators=(swarm.url,)),
            state=tmp_path / "worker",
            slots=2,
            backoff=Backoff(first_seconds=0.02, max_seconds=0.1),
        )
        work = run_worker(settings, key=Ed25519PrivateKey.generate(), make_engine=TorchEngine, stop=stop)
        thread = threading.Thread(target=loop.run_until_complete, args=(work,))
        thread.start()
        try:
            deadline = time.monotonic() + SECONDS
            # As many as a step needs: no trainer is here to go on.
            while admitted() < spec.batch.groups_per_step or "14 tokens, 1 to 13 are allowed" not in caplog.text:
                assert time.monotonic() < deadline, "the run stands still"
                time.sleep(0.1)
            assert thread.is_alive()
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
    assert "The engine failed" not in caplog.text
