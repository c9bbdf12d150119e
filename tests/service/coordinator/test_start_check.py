"""A database of another day, or that somebody changed: what the operator's processes say at their start.

An older copy of the database looks whole. A coordinator or verifier that goes on with it gives the log a second
history, signed by the run's key: proof of fraud to everybody who saw the first.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from actors import PUBLIC_KEY, who
from click.testing import CliRunner, Result
from run_files import small_run_toml
from signing_actors import SigningActors
from sqlalchemy import update
from swarm import RUN_KEY, serve

from coordinator.errors import HistoryLost
from coordinator.integrity.start import check_start
from coordinator.run.history import PUBLISHED, SEEN, KeptHistory, current_checkpoint
from coordinator.run.home import Home, create_home, open_home
from coordinator.run.service import Coordinator
from coordinator.storage import log
from coordinator.storage.schema import log_nodes, nodes, policies, submissions
from node import cli
from node.keys.identity import write_key
from node.protocol.admission import Outcome
from node.protocol.run import parse_run_toml

TOML = small_run_toml("start", steps=12, groups_per_step=2)


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[SigningActors]:
    (tmp_path / "run.toml").write_text(TOML)
    write_key(tmp_path / "run.key", RUN_KEY)
    actors = SigningActors(create_home(tmp_path / "run", public_key=PUBLIC_KEY, spec=parse_run_toml(TOML)))
    actors.register("a", "b", admitted=0)
    actors.publish(0)
    for _ in range(3):
        actors.work("a")
    yield actors
    actors.home.database.close()


def start(role: str, folder: Path) -> Result:
    """Start one of the operator's commands; it must end by itself."""
    given = {
        "coordinator": [
            "--run",
            folder / "run.toml",
            "--key",
            folder / "run.key",
            "--port",
            0,
            "--no-peer",
            "--uncalibrated",
        ],
        "verifier": ["--state", folder / "verifier", "--source", "http://127.0.0.1:9"],
        "trainer": ["--key", folder / "run.key", "--state", folder / "trainer", "--port", 0],
    }[role]
    command = [role, "--data", folder / "run", *given]
    return CliRunner().invoke(cli.main, [str(each) for each in command])


def refused(role: str, folder: Path) -> str:
    result = start(role, folder)
    assert result.exit_code == 1, result.output
    assert "hint:" in result.stderr
    assert "swarmproof check --data" in result.stderr
    return result.stderr


ANOTHER: dict[str, list[str]] = {
    "a column was added since": ["ALTER TABLE nodes DROP COLUMN held_from"],
    "a table was added since": ["DROP TABLE deliveries"],
    "a later release's migration": ["UPDATE alembic_version SET version_num = '0099'"],
    "rules that this release does not know": ["UPDATE facts SET value = '{\"rules\": 1}' WHERE name = 'spec'"],
}


def altered(data: Path, *statements: str) -> None:
    with closing(sqlite3.connect(data / "swarmproof.sqlite3")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_columns_that_need_not_be_filled_keep_nobody_out(actors: SigningActors, tmp_path: Path) -> None:
    """A run is not given up for what another release has added and this one leaves alone."""
    actors.home.database.close()
    altered(tmp_path / "run", "ALTER TABLE facts ADD COLUMN note TEXT NOT NULL DEFAULT ''")
    open_home(tmp_path / "run").database.close()


def commands(folder: Path) -> dict[str, list[str]]:
    data = ["--data", str(folder / "run")]
    return {
        "check": ["check", *data],
        "export": ["export", "rollouts", str(folder / "run"), "--to", str(folder / "rollouts")],
        "backup": ["backup", *data, str(folder / "backup")],
    }


@pytest.mark.parametrize("why", ANOTHER)
def test_a_run_of_another_build_is_refused_in_one_sentence(actors: SigningActors, tmp_path: Path, why: str) -> None:
    """Its operator would be shown a statement in SQL, and nothing to do about it."""
    actors.home.database.close()
    altered(tmp_path / "run", *ANOTHER[why])
    results = [start(role, tmp_path) for role in ("coordinator", "verifier", "trainer")]
    results += [CliRunner().invoke(cli.main, command) for command in commands(tmp_path).values()]
    for result in results:
        assert result.exit_code not in {0, 70}, result.output
        assert "another release of swarmproof" in result.stderr, result.stderr
        assert "hint:" in result.stderr
        assert "Traceback" not in result.stderr
    rules = ["--run", str(tmp_path / "run.toml"), "--key", str(tmp_path / "run.key"), "--data", str(tmp_path / "run")]
    looked = CliRunner().invoke(cli.main, ["coordinator", "--check", *rules])
    assert looked.exit_code == 2
    assert "another release of swarmproof" in " ".join(looked.output.split())


def entries(home: Home) -> int:
    with home.database.read() as connection:
        return log.size(connection)


def rolled_back(actors: SigningActors, folder: Path, keep: Callable[[], object]) -> None:
    """Copy the database, go on, `keep` what a process keeps of that, and put the copy back in place."""
    data = folder / "run"
    with actors.home.database.write() as connection:
        connection.exec_driver_sql("SELECT 1")
    actors.home.database.close()
    shutil.copy(data / "swarmproof.sqlite3", folder / "older")
    for _ in range(2):
        actors.work("b")
    keep()
    actors.home.database.close()
    for path in data.glob("swarmproof.sqlite3*"):
        path.unlink()
    shutil.copy(folder / "older", data / "swarmproof.sqlite3")


def of_process(actors: SigningActors, state: Path) -> KeptHistory:
    return KeptHistory(state, run_id=actors.home.run_id)


def test_a_rolled_back_database_is_refused_before_anything_is_signed(actors: SigningActors, tmp_path: Path) -> None:
    rolled_back(actors, tmp_path, lambda: Coordinator(actors.home, key=RUN_KEY).checkpoint())
    before = (tmp_path / "run" / PUBLISHED).read_bytes()
    for role in ("coordinator", "verifier", "trainer"):
        said = refused(role, tmp_path)
        assert "has 5 entries" in said
        assert "checkpoint of 7" in said
    assert entries(actors.home) == 5
    assert (tmp_path / "run" / PUBLISHED).read_bytes() == before


@pytest.mark.parametrize("role", ["verifier", "trainer"])
def test_a_verifier_or_trainer_that_saw_more_refuses_though_the_data_folder_is_older_too(
    actors: SigningActors, tmp_path: Path, role: str
) -> None:
    """A whole machine was put back: only what another keeps knows of what was published since."""
    rolled_back(actors, tmp_path, lambda: of_process(actors, tmp_path / role).keep_current(actors.home.database))
    assert not (tmp_path / "run" / PUBLISHED).exists()
    assert "older than its log was" in refused(role, tmp_path)
    assert entries(actors.home) == 5


def test_a_database_that_went_on_from_an_older_copy_is_refused(actors: SigningActors, tmp_path: Path) -> None:
    """As many entries, and others."""
    rolled_back(actors, tmp_path, lambda: Coordinator(actors.home, key=RUN_KEY).checkpoint())
    for _ in range(3):
        actors.work("a", Outcome.REJECTED)
    assert "has another history" in refused("verifier", tmp_path)


def test_an_empty_database_beside_a_published_log_begins_no_new_one(actors: SigningActors, tmp_path: Path) -> None:
    Coordinator(actors.home, key=RUN_KEY).checkpoint()
    actors.home.database.close()
    for path in (tmp_path / "run").glob("swarmproof.sqlite3*"):
        path.unlink()
    assert "has 0 entries" in refused("coordinator", tmp_path)


def test_a_rollback_that_the_operator_accepts_is_on_record(actors: SigningActors, tmp_path: Path) -> None:
    state = tmp_path / "verifier"

    def keep() -> None:
        Coordinator(actors.home, key=RUN_KEY).checkpoint()
        of_process(actors, state).keep_current(actors.home.database)

    rolled_back(actors, tmp_path, keep)
    home = open_home(tmp_path / "run")
    with pytest.raises(HistoryLost):
        check_start(home, state)
    command = ["check", "--data", str(tmp_path / "run"), "--state", str(state)]
    assert CliRunner().invoke(cli.main, command).exit_code == 1
    accepted = CliRunner().invoke(cli.main, [*command, "--accept-rollback"])
    assert accepted.exit_code == 0, accepted.output
    assert accepted.output.count("had 7 entries, and goes on from 5") == 2
    assert "begin a new run" in accepted.output
    check_start(home, state)
    assert {path.name.partition(".abandoned-")[0] for path in tmp_path.glob("*/*.abandoned-*")} == {PUBLISHED, SEEN}
    home.database.close()


def test_a_forged_checkpoint_in_the_data_folder_is_not_believed(actors: SigningActors, tmp_path: Path) -> None:
    of_process(actors, tmp_path / "run").keep_current(actors.home.database)
    (tmp_path / "run" / SEEN).rename(tmp_path / "run" / PUBLISHED)
    assert "cannot be read as a checkpoint of this run" in start("verifier", tmp_path).stderr


def test_no_checkpoint_is_shown_before_it_is_kept(actors: SigningActors, tmp_path: Path) -> None:
    with serve(Coordinator(actors.home, key=RUN_KEY)) as url:
        with urllib.request.urlopen(f"{url}/v1/log/checkpoint", timeout=60) as reply:
            shown = reply.read()
        assert (tmp_path / "run" / PUBLISHED).read_bytes() == shown
        actors.work("b")
        name = actors.work("b")
        with urllib.request.urlopen(f"{url}/v1/receipts/{name}", timeout=60):
            pass
    kept = KeptHistory(tmp_path / "run", run_id=actors.home.run_id, signer=PUBLIC_KEY).load()
    assert kept is not None
    assert kept.size == entries(actors.home), "a receipt is a promise, too"


def test_an_older_checkpoint_never_replaces_a_newer_one(actors: SigningActors, tmp_path: Path) -> None:
    """Requests overtake each other, and two APIs may share a folder."""
    mine, other = of_process(actors, tmp_path / "v"), of_process(actors, tmp_path / "v")
    with actors.home.database.read() as connection:
        old = current_checkpoint(connection, run_id=actors.home.run_id)
    actors.work("b")
    mine.keep_current(actors.home.database)
    newest = mine.load()
    other.keep(old, old.text)
    mine.keep(old, old.text)
    assert mine.load() == newest != old


def test_an_honest_run_starts(actors: SigningActors, tmp_path: Path) -> None:
    Coordinator(actors.home, key=RUN_KEY).checkpoint()
    assert actors.assign() == 0
    actors.publish(1)
    actors.work("b", Outcome.REJECTED)
    check_start(actors.home, tmp_path)


CHANGES: dict[str, tuple[Any, str]] = {
    "outcome": (update(submissions).values(outcome="rejected"), "submissions"),
    "tokens": (update(submissions).values(tokens=1), "submissions"),
    "request": (update(submissions).values(request="ab" * 32), "request"),
    "credit": (update(nodes).where(nodes.c.node == who("a")).values(tokens=10**6), "nodes' tokens"),
    "manifest": (update(policies).values(manifest=b"x"), "manifest"),
    "result": (update(policies).values(result_digest="ab" * 32), "result_digest"),
    "tree": (update(log_nodes).where(log_nodes.c.level == 2).values(hash=bytes(32)), "another history"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_state_is_refused_at_the_start(actors: SigningActors, tmp_path: Path, name: str) -> None:
    Coordinator(actors.home, key=RUN_KEY).checkpoint()
    statement, named = CHANGES[name]
    with actors.home.database.write() as connection:
        connection.execute(statement)
    assert named in refused("verifier", tmp_path)


def test_check_names_and_repairs_by_its_exit_codes(actors: SigningActors, tmp_path: Path) -> None:
    with actors.home.database.write() as connection:
        connection.execute(update(submissions).values(tokens=17))
    command = ["check", "--data", str(tmp_path / "run"), "--no-blobs"]
    found = CliRunner().invoke(cli.main, command)
    assert found.exit_code == 1
    assert "tokens: stored 17, derived 5" in found.output
    report = json.loads(CliRunner().invoke(cli.main, [*command, "--json"]).output)
    assert (report["differences"], report["left"]) == (3, 3)
    assert {one["column"] for one in report["found"]} == {"tokens"}
    assert CliRunner().invoke(cli.main, [*command, "--repair"]).exit_code == 0
    again = CliRunner().invoke(cli.main, command)
    assert (again.exit_code, again.output) == (0, "everything is what the log says\n")
    nothing = CliRunner().invoke(cli.main, ["check", "--data", str(tmp_path)])
    assert nothing.exit_code == 2
