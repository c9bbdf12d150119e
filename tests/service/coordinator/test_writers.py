"""Many writers of one SQLite file: threads of the coordinator, beside verifiers and the trainer."""

from __future__ import annotations

import multiprocessing
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from coordinator.errors import BadConfiguration, StorageFault
from coordinator.storage import sqlite as storage
from coordinator.storage.database import Database, sqlite_url

HOLD_SECONDS = 0.002
SECONDS = 8.0


def write_until(database: Database, stop: float) -> tuple[int, float]:
    """How often a writer without a pause came to write until then, and its longest wait."""
    longest, count = 0.0, 0
    while (began := time.monotonic()) < stop:
        with database.write(durable=False) as connection:
            connection.exec_driver_sql("INSERT INTO written VALUES (1)")
            time.sleep(HOLD_SECONDS)
        longest, count = max(longest, time.monotonic() - began), count + 1
    return count, longest


def other_process(folder: Path, found: SimpleQueue[tuple[int, float]]) -> None:
    database = Database(sqlite_url(folder))
    found.put((0, 0.0))  # its imports are done
    found.put(write_until(database, time.monotonic() + SECONDS))
    database.close()


@pytest.mark.system
def test_a_busy_verifier_does_not_keep_requests_waiting(tmp_path: Path) -> None:
    """SQLite's own waiting lets whoever comes and goes fast keep all others out, some of them for seconds."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    database = Database(sqlite_url(tmp_path))
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE written (x INTEGER)")
    process = context.Process(target=other_process, args=(tmp_path, found))
    process.start()
    found.get()
    stop = time.monotonic() + SECONDS
    with ThreadPoolExecutor(8) as pool:
        ours = list(pool.map(lambda _: write_until(database, stop), range(8)))
    theirs = found.get()
    process.join()
    database.close()
    assert max(longest for _, longest in (*ours, theirs)) < SECONDS - 0.5
    assert min(count for count, _ in ours) > max(count for count, _ in ours) / 2
    assert theirs[0] > 10


def test_a_writer_that_fails_lets_the_next_one_in(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), database.write():
            1 / 0  # noqa: B018
    threads = [threading.Thread(target=write_nothing, args=(database,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    database.close()


def write_nothing(database: Database) -> None:
    with database.write():
        pass


@pytest.mark.system
def test_a_writer_elsewhere_that_was_stopped_does_not_hold_up_each_of_ours_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier in a debugger, say: with one failure in 30 s, no thread would be left that answers anything."""
    database = Database(sqlite_url(tmp_path))
    write_nothing(database)
    stopped = sqlite3.connect(tmp_path / "swarmproof.sqlite3", isolation_level=None)
    stopped.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(storage, "BUSY_TIMEOUT_MS", 2000)

    def fail(_: int) -> float:
        began = time.monotonic()
        with pytest.raises(OperationalError, match="locked"):
            write_nothing(database)
        return time.monotonic() - began

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(fail, range(8))) < 10, "in turn it would be 16"
    stopped.close()
    write_nothing(database)
    database.close()


class Interrupted(BaseException):
    """What a signal's handler raises, as Ctrl-C does."""


def test_a_writer_that_is_interrupted_while_it_waits_lets_the_next_one_in(tmp_path: Path) -> None:
    """Else its turn comes, nobody takes it, and this process never writes again."""
    database = Database(sqlite_url(tmp_path))

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    done, begun = threading.Event(), threading.Event()

    def hold() -> None:
        with database.write():
            begun.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    begun.wait(60)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(Interrupted), database.write():
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
        done.set()
    holder.join(60)
    follower = threading.Thread(target=write_nothing, args=(database,), daemon=True)
    follower.start()
    follower.join(60)
    assert not follower.is_alive()
    database.close()


def test_a_disk_that_failed_to_take_what_was_written_is_not_believed_again(tmp_path: Path) -> None:
    """The kernel tells of lost pages once, and calls them clean: the next fsync succeeds, and what is lost stays lost.

    https://wiki.postgresql.org/wiki/Fsync_Errors
    """
    database = Database(sqlite_url(tmp_path))
    log = tmp_path / "swarmproof.sqlite3-wal"
    log.symlink_to("/dev/full")  # which cannot be synced
    for _ in range(2):
        with pytest.raises(StorageFault, match="restart"):
            database.sync()
        log.unlink()
        log.touch()
    database.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"])
def test_a_database_that_no_other_process_sees_is_refused(url: str) -> None:
    with pytest.raises(BadConfiguration, match="database-url"):
        Database(url)
