"""A run whose policy has the tool `python`, with real parts: a worker, a verifier, the trainer, and an auditor.

What would break for whom: an honest worker would be refused for what its policy's code said, or an auditor would call
an honest operator a liar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from sandboxing import needs_sandbox
from sqlalchemy import select
from swarm import learning, running, worker_thread
from talking import SPEC, talkative_file
from waiting import until

from coordinator.storage import training
from coordinator.storage.schema import groups, submissions
from coordinator.training.groups import decode_group
from node.environments.base import Problem
from node.environments.python_tool import PythonTool
from node.protocol.admission import Outcome
from node.protocol.environment_spec import ToolSpec
from node.protocol.run import EnvironmentSpec
from node.sandbox.cells import run_cells
from node.sandbox.root import PYTHON_VERSION

GROUPS = 4
TOOL = ToolSpec(python=PYTHON_VERSION, steps=10_000, characters=64)
RUN = msgspec.structs.replace(
    SPEC,
    environments=(EnvironmentSpec(name="arithmetic", tool=TOOL),),
    sampling=msgspec.structs.replace(SPEC.sampling, max_reply_tokens=256),
    batch=msgspec.structs.replace(SPEC.batch, groups_per_step=GROUPS, lease_seconds=120.0),
    training=msgspec.structs.replace(SPEC.training, steps=1, minibatches=2),
)


def share_of_turns(_: PythonTool, _problem: Problem, turns: Sequence[str]) -> float:
    """A reward that random weights get now and then, so that there is something to learn."""
    return len(turns) / SPEC.sampling.max_turns


@needs_sandbox
@pytest.mark.timeout(600)
def test_what_a_policys_code_says_is_the_same_from_the_worker_to_the_auditor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PythonTool, "reward_turns", share_of_turns)
    with running(tmp_path, talkative_file(tmp_path), spec=RUN) as swarm:
        with worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker"), learning(swarm, tmp_path / "trainer"):

            def newest() -> int | None:
                with swarm.home.database.read() as connection:
                    return training.newest_version(connection)

            until(lambda: newest() == 1, seconds=300)
        with swarm.home.database.read() as connection:
            outcomes = connection.execute(select(submissions.c.outcome)).scalars().all()
            blobs = connection.execute(select(groups.c.blob)).scalars().all()
        assert {Outcome(one) for one in outcomes if one is not None} == {Outcome.ADMITTED}
        decode = swarm.engine.policy.tokenizer.decode
        said = {
            decode(ids)
            for blob in blobs
            for sample in decode_group(swarm.home.blobs.get(blob, max_bytes=2**20)).rollouts
            for _, ids in sample.replies
        }
        assert any("Error" in each for each in said), "random text is seldom Python"
        run_cells.cache_clear()  # the auditor runs all of it itself
        swarm.audit(tmp_path / "auditor")
    report = json.loads(capsys.readouterr().out)
    assert (report["outcome"], report["problems"]) == ("agree", [])
    assert {verdict["result"] for verdict in report["verdicts"]} == {"agree"}
