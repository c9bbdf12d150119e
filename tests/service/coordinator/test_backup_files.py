"""What comes back from a backup, into which places, and from which releases.

An operator restores on a bad day: what is there must not be overwritten, and what was backed up must not be changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from actors import Actors, spec_of
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from backups import begin, no_wait
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from object_store import Store, object_store
from postgresql import new_database
from sqlalchemy import insert, inspect, select, update

from coordinator.backup import tables
from coordinator.backup.blobs import referenced_blobs
from coordinator.backup.create import back_up
from coordinator.backup.manifest import read_manifest
from coordinator.backup.restore import restore
from coordinator.commands.backup import backup
from coordinator.commands.backup import restore as restore_command
from coordinator.errors import BadConfiguration, StorageFault
from coordinator.run.home import Home, create_home, open_home
from coordinator.storage import database, log, tallies, uploads, whole_tables
from coordinator.storage.blobs import Upload
from coordinator.storage.database import migrations
from coordinator.storage.schema import groups, metadata, stakes, submissions
from node.protocol.admission import Outcome
from node.protocol.messages import BatchEntry
from shardcast.wire import digest, encode


@pytest.fixture
def actors(tmp_path: Path, database_url: str | None) -> Iterator[Actors]:
    actors = begin(tmp_path / "run", url=database_url)
    yield actors
    actors.home.database.close()


def contents(folder: Path) -> dict[str, list[str]]:
    """The rows of every table of a backup, without the fact that says where the blobs are and who led."""
    manifest = read_manifest(folder)
    return {
        table.name: sorted(map(str, tables.read_rows(folder, manifest.generation, table))) for table in manifest.tables
    }


@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
def test_every_row_comes_back_as_it_was(actors: Actors, target: str, postgresql: Any, tmp_path: Path) -> None:
    """Floats to the last bit, bytes and text, on the other database or the same: the run's standing, credit and stakes
    are made of them."""
    back_up(actors.home, tmp_path / "first")
    url = new_database(postgresql) if target == "postgresql" else None
    restore(tmp_path / "first", tmp_path / "again", database_url=url, wait=no_wait)
    home = open_home(tmp_path / "again", database_url=url)
    back_up(home, tmp_path / "second")
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    with home.database.write() as connection, actors.home.database.read() as before:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        size = log.size(before)
        for first in range(size + 1):
            assert log.consistency(connection, first, size) == log.consistency(before, first, size)
        ids = [connection.execute(insert(stakes).values(node="c", amount=1, why=why, at=1.0)) for why in ("x", "y")]
        assert [one.inserted_primary_key[0] for one in ids] == [2, 3], "numbering goes on"
    home.database.close()


@given(st.lists(st.one_of(st.none(), st.booleans(), st.integers(-(2**63) + 1, 2**63 - 1), st.floats(), st.text())))
def test_values_go_through_a_line_unchanged(values: list[Any]) -> None:
    line = msgspec.json.encode([tables._json_value(value) for value in values])
    kinds = [type(value) for value in values]
    read = [
        tables._column_value(value, kind, replace_nul=False)
        for value, kind in zip(tables._ROW.decode(line), kinds, strict=True)
    ]
    assert [repr(value) for value in read] == [repr(value) for value in values]


# -- older ones


LATER = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0010", "0009", None, None


def upgrade():
    op.add_column("facts", sa.Column("note", sa.Text(), nullable=True))
"""


def test_a_backup_of_an_earlier_release_is_restored_by_a_later_one(
    database_url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = begin(tmp_path / "run", url=database_url)
    assert back_up(actors.home, tmp_path / "backup").manifest.revision == "0009"
    later = migrations()
    shutil.copytree(later.get_main_option("script_location"), tmp_path / "migrations")
    (tmp_path / "migrations" / "versions" / "0010_later.py").write_text(LATER)
    later.set_main_option("script_location", str(tmp_path / "migrations"))
    for module in (database, whole_tables):
        monkeypatch.setattr(module, "migrations", lambda: later)
    restore(tmp_path / "backup", tmp_path / "new", wait=no_wait)
    new = open_home(tmp_path / "new")
    with new.database.read() as connection, actors.home.database.read() as before:
        assert "note" in {column["name"] for column in inspect(connection).get_columns("facts")}
        assert log.root(connection, log.size(connection)) == log.root(before, log.size(before))
        assert {(one.outcome, one.verdicts) for one in tallies.whole_run(connection)} == {
            (Outcome.ADMITTED, 3),
            (Outcome.REJECTED, 1),
        }
    for home in (new, actors.home):
        home.database.close()


def test_a_run_whose_requests_are_blobs_goes_on_and_its_backups_are_restored(
    database_url: str | None, tmp_path: Path
) -> None:
    """Rows had no `envelope` before 0003: such a submission without its request could never be audited again."""
    actors = begin(tmp_path / "run", url=database_url)
    body = actors.home.blobs.put(b"a body, which no test's request is")
    with actors.home.database.write() as connection:
        connection.execute(update(submissions).values(body=body))
        connection.exec_driver_sql("ALTER TABLE submissions DROP COLUMN envelope")
        connection.exec_driver_sql("ALTER TABLE heartbeats DROP COLUMN trouble")
        connection.exec_driver_sql("DROP TABLE profiles")
        connection.exec_driver_sql("DROP TABLE newcomers")
        connection.exec_driver_sql("DELETE FROM final_counts WHERE state = 'opened'")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0002'")
    assert back_up(actors.home, tmp_path / "backup").manifest.revision == "0002"
    names = set(referenced_blobs(tmp_path / "backup", read_manifest(tmp_path / "backup"), encode(actors.home.spec)))
    restore(tmp_path / "backup", tmp_path / "again", wait=no_wait)
    again = open_home(tmp_path / "again")
    actors.home.database.migrate()
    for home in (again, actors.home):
        with home.database.read() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
            assert set(connection.execute(select(submissions.c.envelope)).scalars()) == {None}
            assert set(connection.execute(select(submissions.c.request)).scalars()) <= names
        assert all(home.blobs.path(name).exists() for name in names)  # type: ignore[attr-defined]
        home.database.close()


# -- places


def test_nothing_is_overwritten(backed_up: Path, tmp_path: Path, postgresql_url: str) -> None:
    taken = tmp_path / "taken"
    begin(taken).home.database.close()
    begin(tmp_path / "other", url=postgresql_url).home.database.close()
    (tmp_path / "file").write_text("mine")
    for data, url, said in (
        (taken, None, "not empty"),
        (tmp_path / "new", postgresql_url, r"already has a table '\w+'"),
        (tmp_path / "new", f"sqlite:///{tmp_path / 'file'}", "exists already"),
        (tmp_path / "new", "postgresql://nobody@127.0.0.1:1/none", "cannot be reached"),
        (tmp_path / "new", "mysql://somewhere", "--database-url"),
    ):
        with pytest.raises(BadConfiguration, match=said):
            restore(backed_up, data, database_url=url, wait=no_wait)
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "new").exists()
    open_home(taken).database.close()


def test_a_folder_with_other_files_or_another_run_takes_no_backup(tmp_path: Path) -> None:
    actors = begin(tmp_path / "run")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_bytes(b"")
    with pytest.raises(BadConfiguration, match=r"1\.jpg"):
        back_up(actors.home, tmp_path / "photos")
    other = create_home(tmp_path / "other", public_key=bytes(32), spec=spec_of())
    back_up(other, tmp_path / "backup")
    with pytest.raises(BadConfiguration, match="another folder"):
        back_up(actors.home, tmp_path / "backup")
    for home in (other, actors.home):
        home.database.close()


def test_a_run_that_went_back_does_not_replace_what_it_forgot(tmp_path: Path) -> None:
    """The newest backup is all that is left of what nodes hold receipts for, once an older one was restored."""
    actors = begin(tmp_path / "run")
    back_up(actors.home, tmp_path / "old")
    actors.publish(1)
    newest = back_up(actors.home, tmp_path / "new").manifest
    restore(tmp_path / "old", tmp_path / "again", wait=no_wait)
    again = Actors(open_home(tmp_path / "again"))
    for version in (7, 8, 9):
        with pytest.raises(BadConfiguration, match="does not continue"):
            back_up(again.home, tmp_path / "new")
        again.publish(version)
    assert read_manifest(tmp_path / "new") == newest
    back_up(again.home, tmp_path / "old")
    for home in (again.home, actors.home):
        home.database.close()


def test_a_database_that_lost_an_entry_is_not_backed_up_as_if_whole(tmp_path: Path) -> None:
    actors = begin(tmp_path / "run")
    before = back_up(actors.home, tmp_path / "backup").manifest
    with actors.home.database.write() as connection:
        connection.exec_driver_sql("UPDATE log_entries SET leaf = x'00' WHERE \"index\" = 2")
    with pytest.raises(StorageFault, match="Merkle root"):
        back_up(actors.home, tmp_path / "backup")
    assert read_manifest(tmp_path / "backup") == before
    actors.home.database.close()


# -- object stores


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


def put_by_offer(home: Home, upload: Upload, body: bytes) -> None:
    checksum = b64encode(hashlib.sha256(body).digest()).decode()
    headers = {"x-amz-checksum-sha256": checksum, "x-amz-sdk-checksum-algorithm": "SHA256", "Content-Type": "any/thing"}
    offer = home.blobs.offer(upload, seconds=60)  # type: ignore[attr-defined]
    with urllib.request.urlopen(urllib.request.Request(offer, data=body, headers=headers, method="PUT")) as answer:
        assert answer.status == 200


def test_a_run_moves_between_a_folder_and_an_object_store(backed_up: Path, store: Store, tmp_path: Path) -> None:
    """With a body that still lies under its lease, because nobody has judged it: it must not be forgotten."""
    restore(backed_up, tmp_path / "stored", blobs_url=store.url, wait=no_wait)
    home = open_home(tmp_path / "stored")
    body = b"not judged yet"
    with home.database.write() as connection:
        row = connection.execute(select(submissions).where(submissions.c.state == "queued")).one()
        upload = Upload(row.lease, digest(body), hashlib.sha256(body).hexdigest(), len(body))
        uploads.announce(connection, upload, now=1.0)
        uploads.submitted(connection, upload, row.submission)
        connection.execute(update(submissions).where(submissions.c.lease == row.lease).values(body=upload.body))
    put_by_offer(home, upload, body)
    made = back_up(home, tmp_path / "backup")
    assert made.manifest.missing == ()
    restore(tmp_path / "backup", tmp_path / "folder", wait=no_wait)
    folder = open_home(tmp_path / "folder")
    with folder.database.read() as connection:
        assert uploads.of_lease(connection, upload.lease) is None
        names = [upload.body, *connection.execute(select(groups.c.blob)).scalars()]
    assert [len(folder.blobs.get(name, max_bytes=1000)) > 0 for name in names] == [True] * 4
    for one in (home, folder):
        one.database.close()


# -- the commands


def run(command: Any, *arguments: object) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_say_what_was_done_and_what_follows(tmp_path: Path) -> None:
    begin(tmp_path / "run").home.database.close()
    said = run(backup, "--data", tmp_path / "run", tmp_path / "backup")
    assert "7 log entries" in said
    summary = json.loads(run(backup, "--data", tmp_path / "run", tmp_path / "backup", "--json"))
    assert (summary["log_size"], summary["blobs_copied"], summary["rows"]["submissions"]) == (7, 0, 5)
    said = run(restore_command, tmp_path / "backup", "--data", tmp_path / "a", "--at-once")
    assert "7 log entries" in said
    assert "what was decided since is forgotten" in said
    assert "Never start the old coordinator" in said
    arguments = (tmp_path / "backup", "--data", tmp_path / "b", "--at-once", "--json")
    assert json.loads(run(restore_command, *arguments))["log_root"] == summary["log_root"]


def test_blobs_that_the_run_lost_are_named_and_no_hindrance(tmp_path: Path) -> None:
    actors = begin(tmp_path / "run")
    lost = actors.home.blobs.path(digest(b"1002"))  # type: ignore[attr-defined]
    lost.unlink()
    actors.home.database.close()
    said = run(backup, "--data", tmp_path / "run", tmp_path / "backup")
    assert lost.name in said
    restored = restore(tmp_path / "backup", tmp_path / "again", wait=no_wait)
    assert restored.manifest.missing == (lost.name,)


LARGE_STEP = tuple(digest(b"%d" % number) for number in range(600))
"""Submissions of a step whose entry in the log takes 40 KB."""


@pytest.mark.system
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """A log of 4 MB and one of 40 MB: whoever held either of them whole would hold 36 MB more of the larger one."""
    peaks = []
    for count in (100, 1000):
        actors = begin(tmp_path / f"run-{count}")
        with actors.home.database.write() as connection:
            for step in range(count):
                log.append(connection, BatchEntry(step=step, submissions=LARGE_STEP))
            assert sum(map(len, log.leaves(connection, 10, 20))) > 10 * 40_000
        tracemalloc.start()
        back_up(actors.home, tmp_path / f"backup-{count}")
        restore(tmp_path / f"backup-{count}", tmp_path / f"again-{count}", wait=no_wait)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        actors.home.database.close()
    assert peaks[1] < peaks[0] + 12e6, peaks
