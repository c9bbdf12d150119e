"""Who may read the run's database: nobody but its owner and group, whatever the operator's umask is.

It has the addresses of all nodes and who did what; a machine is seldom its operator's alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.storage.database import Database, sqlite_url
from coordinator.storage.facts import add_facts


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    found = folder.glob("swarmproof.sqlite3*")
    return {path.name.removeprefix("swarmproof.sqlite3"): stat.S_IMODE(path.stat().st_mode) for path in found}


@pytest.mark.usefixtures("_umask")
def test_attack_another_user_of_the_machine_reads_the_database(tmp_path: Path) -> None:
    folder_mode = tmp_path.stat().st_mode
    database = Database(sqlite_url(tmp_path))
    database.migrate()
    with database.write() as connection:
        add_facts(connection, {"a": "b"})
        found = modes(tmp_path)
    database.close()
    assert {name: oct(found[name]) for name in ("", "-wal", "-shm")} == dict.fromkeys(("", "-wal", "-shm"), "0o640")
    assert tmp_path.stat().st_mode == folder_mode


def test_a_database_of_an_earlier_release_loses_what_others_may_and_a_stricter_one_keeps_its_mode(
    tmp_path: Path,
) -> None:
    for before, after in ((0o644, 0o640), (0o600, 0o600)):
        folder = tmp_path / oct(before)
        folder.mkdir()
        database = Database(sqlite_url(folder))
        database.migrate()
        database.close()
        (folder / "swarmproof.sqlite3").chmod(before)
        Database(sqlite_url(folder)).close()
        assert modes(folder)[""] == after
