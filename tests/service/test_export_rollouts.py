"""A run's rollouts as Parquet: what whoever studies or trains on them would get wrong if this did."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from sqlalchemy import select
from swarm import Swarm, running, small_spec

from coordinator.storage.schema import groups, submissions
from coordinator.training import rollouts as exporting
from coordinator.training.export import FolderNotEmpty
from coordinator.training.rollouts import ExportedRollouts, export_rollouts
from node.cli import main
from node.protocol.admission import Outcome
from node.protocol.submission import Rollout


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path
) -> Iterator[tuple[Swarm, dict[str, list[Rollout]]]]:
    """A run with two admitted groups, one with a wrong token, and a file that is none; and what was sent."""
    with running(tmp_path_factory.mktemp("run"), tiny_policy_path, spec=small_spec()) as swarm:
        peer, sent = swarm.peer(), {}
        for wrong in (False, True, False):
            lease = peer.lease()
            rollouts = swarm.honest(lease)
            if wrong:
                tokens = [5 + (rollouts[0].completion_ids[0] + 1) % 90, *rollouts[0].completion_ids[1:]]
                rollouts[0] = msgspec.structs.replace(rollouts[0], completion_ids=tokens)
            receipt = swarm.judge(peer, rollouts, lease)
            assert receipt.outcome is (Outcome.REJECTED if wrong else Outcome.ADMITTED)
            sent[receipt.submission] = rollouts
        lease = peer.lease()
        assert swarm.verdict(peer, peer.submit(lease.lease_id, b"no frame")).outcome is Outcome.REJECTED
        yield swarm, sent


def rejection(swarm: Swarm, submission: str) -> str:
    with swarm.home.database.read() as connection:
        query = select(submissions.c.reason).where(submissions.c.submission == submission)
        return connection.execute(query).scalar_one()


def test_admitted_rollouts_are_exported_with_their_rewards(run, tmp_path):
    swarm, sent = run
    done = export_rollouts(swarm.home, tmp_path / "out")
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert done == ExportedRollouts(files=1, submissions=2, rollouts=8)
    admitted = [submission for at, submission in enumerate(sent) if at != 1]
    assert [(row["submission"], row["sample"]) for row in rows] == [(one, at) for one in admitted for at in range(4)]
    for row in rows:
        rollout = sent[row["submission"]][row["sample"]]
        assert (row["prompt_ids"], row["completion_ids"]) == (rollout.prompt_ids, rollout.completion_ids)
        assert row["logprobs"] == pytest.approx(rollout.logprobs, abs=1e-3)
        assert row["segments"] == [{"version": 0, "tokens": len(rollout.completion_ids)}]
        assert (row["outcome"], row["reason"], row["replies"]) == ("admitted", None, [])
        assert 0.0 <= row["reward"] <= 1.0
    with swarm.home.database.read() as connection:
        means = dict(connection.execute(select(groups.c.submission, groups.c.reward_mean)).all())
    for submission in admitted:
        rewards = [row["reward"] for row in rows if row["submission"] == submission]
        assert sum(rewards) / 4 == pytest.approx(means[submission])


def test_rejected_rollouts_are_exported_on_demand_as_they_were_sent_and_without_a_reward(run, tmp_path):
    swarm, sent = run
    done = export_rollouts(swarm.home, tmp_path / "out", rejected=True)
    assert done == ExportedRollouts(files=1, submissions=3, rollouts=12, unreadable=1)
    rows = [row for row in pq.read_table(tmp_path / "out").to_pylist() if row["outcome"] == "rejected"]
    (submission,) = {row["submission"] for row in rows}
    assert [row["completion_ids"] for row in rows] == [rollout.completion_ids for rollout in sent[submission]]
    assert {(row["reason"], row["reward"], row["step"]) for row in rows} == {(rejection(swarm, submission), None, None)}


def test_datasets_opens_what_was_exported(run, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    swarm, _ = run
    export_rollouts(swarm.home, tmp_path / "out", rejected=True)
    loaded = datasets.load_dataset(
        "parquet", data_dir=str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.num_rows == 12
    assert loaded[0]["completion_ids"] == pq.read_table(tmp_path / "out").to_pylist()[0]["completion_ids"]


def test_a_large_run_becomes_several_files_of_one_schema(run, tmp_path, monkeypatch):
    """Row groups and files are closed on the way: a run larger than the memory is exported all the same."""
    swarm, _ = run
    monkeypatch.setattr(exporting, "ROW_GROUP_TOKENS", 1)
    done = export_rollouts(swarm.home, tmp_path / "out", file_bytes=1)
    paths = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in paths] == [f"rollouts-{at:05}.parquet" for at in range(done.files)]
    assert done.files == 3
    assert [pq.read_metadata(path).num_rows for path in paths] == [4, 4, 0]
    assert all(pq.read_schema(path).equals(exporting.SCHEMA) for path in paths)


def test_a_blob_that_is_gone_costs_its_submission_alone(run, tmp_path, monkeypatch):
    swarm, _ = run
    with swarm.home.database.read() as connection:
        blob = connection.execute(select(groups.c.blob)).scalars().first()
    path = swarm.home.blobs.path(blob)
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[:-1])
        assert export_rollouts(swarm.home, tmp_path / "out") == ExportedRollouts(
            files=1, submissions=1, rollouts=4, missing=1
        )
    finally:
        path.write_bytes(kept)


def test_a_folder_with_something_in_it_stays_as_it_is(run, tmp_path):
    swarm, _ = run
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FolderNotEmpty):
        export_rollouts(swarm.home, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_command_exports_a_run_that_goes_on(run, tmp_path):
    swarm, _ = run
    done = CliRunner().invoke(main, ["export", "rollouts", str(swarm.home.folder), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "8 rollouts of 2 submissions" in done.output
    assert pq.read_table(tmp_path / "out").num_rows == 8


def test_without_pyarrow_the_command_says_what_to_install(run, tmp_path, monkeypatch):
    swarm, _ = run
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "coordinator.training.rollouts")
    done = CliRunner().invoke(main, ["export", "rollouts", str(swarm.home.folder), "-o", str(tmp_path / "out")])
    assert done.exit_code != 0
    assert "[export]'" in done.output
    assert not (tmp_path / "out").exists()
