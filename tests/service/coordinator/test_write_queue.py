"""Requests that write at the same time share a commit: none may lose what it was told, or pay for another's failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from coordinator.http import load_shedding, write_queue
from coordinator.http.load_shedding import LoadShedder, RequestClass
from coordinator.http.rate_limits import TooManyRequests
from coordinator.http.write_queue import MOST_TOGETHER, MOST_WAIT_SECONDS, ReadQueue, WriteQueue
from coordinator.storage.database import Database, sqlite_url
from node.protocol.reasons import Reason, Refusal


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(tmp_path))
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE written (x INTEGER)")
    yield database
    database.close()


def written(database: Database) -> list[int]:
    with database.read() as connection:
        return list(connection.exec_driver_sql("SELECT x FROM written ORDER BY x").scalars())


def writer(database: Database, number: int, *, fails: Exception | None = None) -> Callable[[], int]:
    def job() -> int:
        with database.write(durable=False) as connection:
            connection.exec_driver_sql(f"INSERT INTO written VALUES ({number})")
            if fails is not None:
                raise fails
        database.sync()
        return number

    return job


async def test_those_that_wait_share_a_commit_and_a_sync(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, together, release = WriteQueue(database), list[int](), threading.Event()
    execute, synced = database.execute_together, list[bool]()

    def counted(jobs: list[Callable[[], int]], **waits: Any) -> Any:
        together.append(len(jobs))
        return execute(jobs, **waits)

    monkeypatch.setattr(database, "execute_together", counted)
    monkeypatch.setattr(database._wal, "sync", lambda: synced.append(True))

    first = asyncio.create_task(queue.run(release.wait))  # what comes meanwhile waits
    others = [asyncio.create_task(queue.run(writer(database, number))) for number in range(MOST_TOGETHER + 1)]
    await asyncio.sleep(0)
    release.set()
    assert await first
    assert await asyncio.gather(*others) == list(range(MOST_TOGETHER + 1))
    assert together == [1, MOST_TOGETHER, 1]
    assert len(synced) == 2
    assert written(database) == list(range(MOST_TOGETHER + 1))


async def test_a_request_with_a_body_at_hand_does_not_wait_for_all_others_again(database: Database) -> None:
    """As many bodies would be open as requests wait, and each upload would take as long as two."""
    queue, release, order = WriteQueue(database), threading.Event(), list[int]()
    first = asyncio.create_task(queue.run(release.wait))
    others = [asyncio.create_task(queue.run(lambda number=number: order.append(number))) for number in range(3)]
    others.append(asyncio.create_task(queue.run(lambda: order.append(3), is_last=True)))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(first, *others)
    assert order == [3, 0, 1, 2]


async def test_nothing_is_done_for_whoever_has_gone(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """His lease would be held by nobody, and the time for it is what made him go."""
    clock, begun, release, queue = [0.0], threading.Event(), threading.Event(), WriteQueue(database)
    monkeypatch.setattr(write_queue.time, "perf_counter", lambda: clock[0])
    first = asyncio.create_task(queue.run(lambda: begun.set() or release.wait()))
    late = asyncio.create_task(queue.run(writer(database, 1)))
    await asyncio.to_thread(begun.wait)
    clock[0] = MOST_WAIT_SECONDS + 1
    in_time = asyncio.create_task(queue.run(writer(database, 2)))
    await asyncio.sleep(0)
    release.set()
    assert await first
    with pytest.raises(TooManyRequests):
        await late
    assert await in_time == 2
    assert written(database) == [2]


def test_one_that_is_refused_undoes_what_it_wrote_and_nothing_else(database: Database) -> None:
    refusal = Refusal(Reason.EXPIRED_LEASE, "too late")
    jobs = [writer(database, 1), writer(database, 2, fails=refusal), writer(database, 3)]
    assert database.execute_together(jobs) == [(1, None), (None, refusal), (3, None)]
    assert written(database) == [1, 3]


async def test_where_the_database_goes_away_nobody_is_told_that_it_was_written(database: Database) -> None:
    """And the queue works again as soon as the database does."""
    queue, release = WriteQueue(database), threading.Event()
    away = OperationalError("INSERT", None, Exception("disk I/O error"))
    first = asyncio.create_task(queue.run(release.wait))
    jobs = [writer(database, 1), writer(database, 2, fails=away), writer(database, 3)]
    others = [asyncio.create_task(queue.run(job)) for job in jobs]
    await asyncio.sleep(0)
    release.set()
    assert await first
    assert await asyncio.gather(*others, return_exceptions=True) == [away] * 3
    assert written(database) == []
    assert await queue.run(writer(database, 4)) == 4
    assert written(database) == [4]


async def test_reads_that_wait_share_a_snapshot_in_which_is_what_was_there_when_they_asked(database: Database) -> None:
    """Whoever is woken by a verdict and then told that there is none would wait for it in vain."""
    queue, release, begun = ReadQueue(database), threading.Event(), list[object]()
    event.listen(database._engine, "begin", begun.append)
    first = asyncio.create_task(queue.run(release.wait))
    await asyncio.sleep(0)
    writer(database, 1)()
    refusal = Refusal(Reason.NOT_FOUND, "nothing there")

    def refused() -> None:
        raise refusal

    jobs: list[Callable[[], Any]] = [lambda: written(database), refused, lambda: written(database)]
    others = [asyncio.create_task(queue.run(job)) for job in jobs]
    await asyncio.sleep(0)
    release.set()
    assert await first
    assert await asyncio.gather(*others, return_exceptions=True) == [[1], refusal, [1]]
    assert len(begun) == 2, "the first one's, and theirs"
    assert written(database) == [1]
    assert len(begun) == 3, "others have their own again"


async def test_a_slow_queue_tells_whoever_is_turned_away_to_stay_away_for_longer(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He would come again, and cost a refusal, before the coordinator has done anything of what waits."""
    clock, release, queue = [0.0], threading.Event(), WriteQueue(database)
    monkeypatch.setattr(write_queue.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(write_queue, "MEASURED_OVER", MOST_TOGETHER)

    def slow() -> None:
        clock[0] += 0.25

    first = asyncio.create_task(queue.run(release.wait))
    others = [asyncio.create_task(queue.run(slow)) for _ in range(MOST_TOGETHER)]
    await asyncio.sleep(0)
    clock[0] = 10.0  # nobody waited for all of this
    release.set()
    await asyncio.gather(first, *others)
    assert queue.seconds_each == pytest.approx(0.25)
    monkeypatch.setattr(WriteQueue, "__len__", lambda _: 30)
    monkeypatch.setattr(load_shedding, "MOST_WAITING", dict.fromkeys(RequestClass, 30))
    for method, path, seconds_each, seconds in (
        ("POST", "/v1/leases", 0.25, 8),
        ("POST", "/v1/leases", 0.001, 2),
        ("PUT", "/v1/submissions/x", 0.001, 1),
        ("GET", "/v1/status", 99.0, 60),
    ):
        monkeypatch.setattr(WriteQueue, "seconds_each", seconds_each)
        with pytest.raises(TooManyRequests) as refused:
            LoadShedder(queue).check(method, path)
        assert refused.value.retry_after_seconds == seconds
