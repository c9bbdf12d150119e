"""A run with a tool, with real parts from end to end: a worker, a verifier, the trainer, and an auditor.

What would break for whom: honest workers would be rejected for what an environment said, a trainer would learn the
environment's words, or an auditor would call an honest operator a liar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select
from swarm import Swarm, learning, running, worker_thread
from talking import SPEC, talkative_file
from waiting import until

from coordinator.storage import training
from coordinator.storage.schema import groups, submissions
from coordinator.training.groups import decode_group
from coordinator.verifier.evidence import decode_evidence
from node.environments.base import Problem
from node.environments.calculator import Calculator
from node.protocol.admission import Outcome
from node.protocol.chat_formats import CHATML
from node.protocol.run import RunSpec
from node.protocol.turns import Replies

GROUPS = 4
RUN = msgspec.structs.replace(
    SPEC,
    batch=msgspec.structs.replace(SPEC.batch, groups_per_step=GROUPS, lease_seconds=60.0),
    training=msgspec.structs.replace(SPEC.training, steps=1, minibatches=2),
)


def share_of_turns(_: Calculator, _problem: Problem, turns: Sequence[str]) -> float:
    """A reward that random weights get now and then, so that there is something to learn."""
    return len(turns) / SPEC.sampling.max_turns


IN_CHATS = msgspec.structs.replace(
    RUN, sampling=msgspec.structs.replace(RUN.sampling, chat=CHATML, max_prompt_tokens=128, max_reply_tokens=256)
)


@pytest.mark.parametrize(("spec", "said"), [(RUN, "="), (IN_CHATS, "\n<|im_start|>user\n=")], ids=["no-chat", "chat"])
def test_a_run_with_a_tool_from_the_worker_to_the_auditor(
    spec: RunSpec,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Calculator, "reward_turns", share_of_turns)
    with running(tmp_path, talkative_file(tmp_path), spec=spec) as swarm:
        with worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker"), learning(swarm, tmp_path / "trainer"):

            def newest() -> int | None:
                with swarm.home.database.read() as connection:
                    return training.newest_version(connection)

            until(lambda: newest() == 1)
        seen = verdicts(swarm)
        assert {outcome for outcome, _ in seen} == {Outcome.ADMITTED}
        learned = [replies for group in admitted(swarm, said) for replies in group]
        assert sum(map(bool, learned)) > GROUPS, "the tool must have been used"
        assert any(found for _, found in seen), "people see what it said"
        swarm.audit(tmp_path / "auditor")
    report = json.loads(capsys.readouterr().out)
    assert (report["outcome"], report["problems"]) == ("agree", [])
    assert {verdict["result"] for verdict in report["verdicts"]} == {"agree"}


def admitted(swarm: Swarm, said: str) -> list[list[Replies]]:
    """What the environment said in the groups that the trainer has, each of which begins with `said`."""
    with swarm.home.database.read() as connection:
        blobs = connection.execute(select(groups.c.blob)).scalars().all()
    found = [decode_group(swarm.home.blobs.get(blob, max_bytes=2**20)) for blob in blobs]
    for group in found:
        for sample in group.rollouts:
            for before, ids in sample.replies:
                assert sample.completion_ids[before - 1] in swarm.engine.policy.eos_ids
                assert swarm.engine.policy.tokenizer.decode(ids).startswith(said)
    return [[sample.replies for sample in group.rollouts] for group in found]


def verdicts(swarm: Swarm) -> list[tuple[Outcome, list[tuple[int, str]]]]:
    """Of each submission with a verdict the outcome, and what is kept for people of the environment's words."""
    with swarm.home.database.read() as connection:
        rows = connection.execute(
            select(submissions.c.outcome, submissions.c.evidence).where(submissions.c.outcome.is_not(None))
        ).all()
    found = [decode_evidence(swarm.home.blobs.get(row.evidence, max_bytes=2**20)) for row in rows]
    return [
        (Outcome(row.outcome), [said for one in evidence.rows for said in one.replies])
        for row, evidence in zip(rows, found, strict=True)
    ]
