"""A process of an older release does not go on beside newer ones: its counters and pages would be wrong for good."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from actors import PUBLIC_KEY
from locations import ROOT
from run_files import small_run_toml
from sqlalchemy import text
from swarm import RUN_KEY
from waiting import until

from coordinator.commands.preflight import preflight_checks
from coordinator.errors import OlderDatabase, OtherRelease
from coordinator.run.home import Home, create_home, open_home
from coordinator.run.release_watch import release_watch
from coordinator.storage.heartbeats import Role, read_heartbeats
from node.doctor.report import Check, Level
from node.keys.identity import write_key
from node.protocol.run import parse_run_toml

TOML = small_run_toml("release", steps=12, groups_per_step=2)


@pytest.fixture
def home(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    write_key(tmp_path / "run.key", RUN_KEY)
    home = create_home(tmp_path / "run", public_key=PUBLIC_KEY, spec=parse_run_toml(TOML))
    yield home
    home.database.close()


def migrate(home: Home, revision: str) -> None:
    with home.database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def preflight(folder: Path) -> list[Check]:
    files = (folder / "run.toml", folder / "run.key", folder / "run")
    return preflight_checks(*files, database_url=None, blobs_url=None, model_elsewhere=False, uncalibrated=True)


def test_a_schema_of_a_newer_release_ends_the_process_and_one_of_an_older_does_not(home, monkeypatch):
    killed, polled = threading.Event(), threading.Event()
    monkeypatch.setattr("coordinator.run.release_watch.os.kill", lambda *to: to == (os.getpid(), 15) and killed.set())
    read = home.database.read

    def noted_read():
        polled.set()
        return read()

    monkeypatch.setattr(home.database, "read", noted_read)
    with pytest.raises(OtherRelease, match="has the schema 9999"), release_watch(home, period_seconds=0.001):
        migrate(home, "0003")
        for _ in range(2):  # the second poll began after the migration
            polled.clear()
            assert polled.wait(60)
        assert not killed.is_set()
        migrate(home, "9999")
        assert killed.wait(60)


@pytest.mark.parametrize("lacks_a_column", [True, False])
def test_an_earlier_releases_database_is_migrated_by_the_coordinator_alone(home, tmp_path, caplog, lacks_a_column):
    """A trainer that is started before it says so; it said to go on with the old release, or to begin another run."""
    if lacks_a_column:
        with home.database.write() as connection:
            connection.execute(text("ALTER TABLE heartbeats DROP COLUMN trouble"))
    migrate(home, "0008")
    with pytest.raises(OlderDatabase, match="has the schema 0008, and this release's is 0009"):
        open_home(home.folder)
    (found,) = (one for one in preflight(tmp_path) if one.name == "data")
    assert (found.level, "coordinator, which migrates it" in found.advice) == (Level.WARNING, True)
    if not lacks_a_column:
        return
    with caplog.at_level("INFO"):
        create_home(home.folder, public_key=PUBLIC_KEY, spec=home.spec).database.close()
    assert [one.message for one in caplog.records if "migrat" in one.message and "schema" in one.message] == [
        "migrating: its database has the schema 0008, and this release's is 0009"
    ]
    open_home(home.folder).database.close()
    assert {one.level for one in preflight(tmp_path) if one.name == "data"} == {Level.OK}


@pytest.mark.system
def test_each_of_an_operators_processes_watches(home, tmp_path):
    """A trainer, which needs a model, watches by the same line."""
    run = ["--run", tmp_path / "run.toml", "--key", tmp_path / "run.key", "--port", 0, "--no-peer", "--uncalibrated"]
    commands = {
        "coordinator": ["--role", "api", *run],
        "leader": [],
        "verifier": ["--state", tmp_path / "verifier", "--source", "http://127.0.0.1:9"],
    }
    started = {role: _start(tmp_path, role, *more) for role, more in commands.items()}
    try:
        until(lambda: "serving at" in _said(tmp_path, "coordinator"))
        until(lambda: {Role.LEADER, Role.VERIFIER} <= _beating(home))
        migrate(home, "9999")
        for role, process in started.items():
            assert process.wait(120) == 1, role
            assert "is of another release of swarmproof: its database has the schema 9999" in _said(tmp_path, role)
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def _start(folder: Path, role: str, *more: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "node.cli", role, "--data", str(folder / "run"), *map(str, more)]
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def _said(folder: Path, role: str) -> str:
    return (folder / f"{role}.log").read_text()


def _beating(home: Home) -> set[Role]:
    with home.database.read() as connection:
        return {one.role for one in read_heartbeats(connection)}
