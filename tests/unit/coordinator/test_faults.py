"""What an operator reads while a role waits: one line that says what, why and what to do, and no SQL."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from coordinator.errors import CorruptRead, StoreAway
from coordinator.storage.database import Database, sqlite_url
from coordinator.storage.facts import add_facts, read_facts
from coordinator.storage.faults import advice, is_away


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errno.ENOSPC, "/run/blobs/x cannot be written (No space left on device): free some space"),
        (errno.EROFS, "/run/blobs/x is on a read-only disk: mount it writable"),
        (errno.EACCES, "/run/blobs/x is not this user's to use (Permission denied): mend its owner or rights"),
        (errno.EIO, "/run/blobs/x fails (Input/output error): look at the disk, and at the system's log"),
    ],
)
def test_each_fault_of_a_disk_says_what_to_do(error: int, said: str) -> None:
    raised = OSError(error, os.strerror(error), "/run/blobs/x")
    assert is_away(raised)
    assert advice(raised) == said


@pytest.mark.parametrize("error", [StoreAway("the store\nsays much"), CorruptRead("other bytes")])
def test_a_store_that_is_away_is_said_in_its_own_words(error: StoreAway) -> None:
    assert is_away(error)
    assert advice(error) == str(error).splitlines()[0]


def test_a_database_that_was_read_only_is_written_again_when_it_may_be(tmp_path: Path) -> None:
    """Connections opened meanwhile would stay read-only, and every submission would be refused until a restart."""
    database = Database(sqlite_url(tmp_path))
    database.migrate()
    database.close()
    pages = text("PRAGMA query_only = ON")  # as on a disk that is read-only: SQLite refuses with the same code
    with database.read() as connection:
        connection.execute(pages)
    with pytest.raises(OperationalError) as raised, database.write() as connection:
        add_facts(connection, {"a": "b"})
    assert is_away(raised.value)
    assert raised.value.orig.sqlite_errorcode == sqlite3.SQLITE_READONLY  # type: ignore[union-attr]
    assert advice(raised.value) == "the database is read-only: mount its disk writable, or mend its rights"
    with database.write() as connection:
        add_facts(connection, {"a": "b"})
    with database.read() as connection:
        assert read_facts(connection) == {"a": "b"}
    database.close()
