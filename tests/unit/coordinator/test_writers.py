"""Many writers of one SQLite file: threads of the coordinator, beside verifiers and the trainer."""

from __future__ import annotations

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from coordinator.storage.database import Database, sqlite_url

HOLD_SECONDS = 0.002


def write_until(database: Database, stop: float) -> tuple[int, float]:
    """How often a writer without a pause came to write until then, and its longest wait."""
    longest, count = 0.0, 0
    while (began := time.monotonic()) < stop:
        with database.write(durable=False) as connection:
            connection.exec_driver_sql("INSERT INTO written VALUES (1)")
            time.sleep(HOLD_SECONDS)
        longest, count = max(longest, time.monotonic() - began), count + 1
    return count, longest


def other_process(folder: Path, stop: float, found: SimpleQueue[tuple[int, float]]) -> None:
    database = Database(sqlite_url(folder))
    found.put(write_until(database, stop))
    database.close()


def test_a_busy_verifier_does_not_keep_requests_waiting(tmp_path: Path) -> None:
    """SQLite's own waiting lets whoever comes and goes fast keep all others out, some of them for seconds."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    database = Database(sqlite_url(tmp_path))
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE written (x INTEGER)")
    stop = time.monotonic() + 6
    process = context.Process(target=other_process, args=(tmp_path, stop, found))
    process.start()
    with ThreadPoolExecutor(8) as pool:
        ours = list(pool.map(lambda _: write_until(database, stop), range(8)))
    theirs = found.get()
    process.join()
    database.close()
    assert max(longest for _, longest in (*ours, theirs)) < 2
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
        thread.join(5)
        assert not thread.is_alive()
    database.close()


def write_nothing(database: Database) -> None:
    with database.write():
        pass
