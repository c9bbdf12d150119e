"""Requests that write at the same time share a commit: none may lose what it was told, or pay for another's failure."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from coordinator.errors import StorageFault
from coordinator.http import load_shedding, write_queue
from coordinator.http.load_shedding import LoadShedder, RequestClass
from coordinator.http.rate_limits import TooManyRequests
from coordinator.http.write_queue import MOST_TOGETHER, MOST_WAIT_SECONDS, ReadQueue, WriteQueue
from coordinator.storage.database import Database, JobOutcome, sqlite_url
from coordinator.storage.faults import LockHeld
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


class Batches(list[tuple[str, int]]):
    """Where the jobs of a queue were executed, here or in a thread, and how many together."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        for where, name in (("here", "execute_now"), ("thread", "execute_together")):
            monkeypatch.setattr(database, name, partial(self._execute, where, getattr(database, name)))

    def _execute(self, where: str, execute: Callable[..., Any], jobs: list[Callable[[], int]], **waits: Any) -> Any:
        outcomes = execute(jobs, **waits)
        self.append((where, len(jobs)))
        return outcomes


async def in_turn() -> None:
    """Let the event loop do what is due."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("writer_is", ["a thread", "a process", "next"])
async def test_those_that_wait_share_a_commit_and_a_sync(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, writer_is: str
) -> None:
    """And the event loop, which answers everybody else, does not wait for whoever writes."""
    batches, synced, queue = Batches(database, monkeypatch), list[bool](), WriteQueue(database)
    monkeypatch.setattr(database._wal, "sync", lambda: synced.append(True))
    with ExitStack() as held:
        if writer_is == "next":
            line = os.open(f"{tmp_path / 'swarmproof.sqlite3'}-line", os.O_RDWR | os.O_CREAT)
            held.callback(os.close, line)
            fcntl.flock(line, fcntl.LOCK_EX)
        else:
            other = database if writer_is == "a thread" else Database(database.url)
            held.enter_context(other.write())
        first = asyncio.create_task(queue.run(lambda: True))
        await in_turn()
        others = [asyncio.create_task(queue.run(writer(database, number))) for number in range(MOST_TOGETHER + 1)]
        await in_turn()
        assert batches == []
        assert len(queue) == MOST_TOGETHER + 2
    assert await first
    assert await asyncio.gather(*others) == list(range(MOST_TOGETHER + 1))
    assert batches == [("thread", 1), ("here", MOST_TOGETHER), ("here", 1)]
    assert len(synced) in {1, 2}
    assert written(database) == list(range(MOST_TOGETHER + 1))
    assert len(queue) == 0


async def test_a_slow_disk_holds_up_none_but_those_whose_writes_must_be_on_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody would wait for the disk with the one who hands in a group."""
    queue, on_disk, syncs = WriteQueue(database), threading.Event(), list[bool]()
    monkeypatch.setattr(database._wal, "sync", lambda: syncs.append(on_disk.wait(20)))
    durable = [asyncio.create_task(queue.run(writer(database, number))) for number in (1, 2)]
    await in_turn()
    assert await queue.run(lambda: "leased") == "leased"
    durable.append(asyncio.create_task(queue.run(writer(database, 3))))
    await in_turn()
    assert not any(task.done() for task in durable)
    assert len(queue) == 3
    on_disk.set()
    assert await asyncio.gather(*durable) == [1, 2, 3]
    assert syncs == [True, True], "one for those that waited, and one for whoever came meanwhile"


async def test_the_time_in_which_nothing_is_asked_is_nobodys(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a quiet hour everybody would be told that there is too much to do, and to come again in a minute."""
    clock, on_disk, queue = [0.0], threading.Event(), WriteQueue(database)
    monkeypatch.setattr(write_queue.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(database._wal, "sync", lambda: on_disk.wait(20))
    durable = asyncio.create_task(queue.run(writer(database, 1)))
    await in_turn()
    await queue.run(lambda: None)  # which ends while the other one waits for the disk
    on_disk.set()
    await durable
    clock[0] = 3600.0
    await queue.run(lambda: None)
    assert queue.seconds_each == 0.0


@pytest.mark.parametrize("where", ["a batch", "a sync"])
async def test_where_no_thread_can_be_started_the_queue_goes_on_as_soon_as_one_can(
    database: Database, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A limit of processes that is reached for a second would end a coordinator's writes for good."""
    queue, loop = WriteQueue(database), asyncio.get_running_loop()
    with ExitStack() as held, monkeypatch.context() as patch:
        patch.setattr(loop, "run_in_executor", Mock(side_effect=RuntimeError("can't start new thread")))
        if where == "a batch":
            held.enter_context(database.write(durable=False))
        with pytest.raises(RuntimeError):
            await queue.run(writer(database, 1))
    assert await queue.run(writer(database, 2)) == 2
    assert len(queue) == 0


async def test_a_disk_that_fails_is_told_to_those_whose_writes_must_be_on_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission that is acknowledged and then lost costs a worker its work."""

    def fail() -> None:
        raise StorageFault("the log could not be written")

    queue = WriteQueue(database)
    monkeypatch.setattr(database._wal, "sync", fail)
    jobs = (writer(database, 1), lambda: "leased", writer(database, 2))
    outcomes = await asyncio.gather(*map(queue.run, jobs), return_exceptions=True)
    assert outcomes[1] == "leased"
    assert [type(outcomes[number]) for number in (0, 2)] == [StorageFault] * 2


async def test_the_write_ahead_log_does_not_grow_for_ever(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads would become slower, and the disk full: what the event loop commits, it does not move into the database."""
    monkeypatch.setattr(write_queue, "MOST_HERE", 2)
    batches, queue = Batches(database, monkeypatch), WriteQueue(database)
    for number in range(6):
        await queue.run(writer(database, number))
    assert batches == [("here", 1), ("here", 1), ("thread", 1)] * 2


async def test_a_request_with_a_body_at_hand_does_not_wait_for_all_others_again(database: Database) -> None:
    """As many bodies would be open as requests wait, and each upload would take as long as two."""
    queue, order = WriteQueue(database), list[int]()
    with database.write():
        first = asyncio.create_task(queue.run(lambda: None))
        await in_turn()
        others = [asyncio.create_task(queue.run(lambda number=number: order.append(number))) for number in range(3)]
        others.append(asyncio.create_task(queue.run(lambda: order.append(3), is_last=True)))
        await in_turn()
    await asyncio.gather(first, *others)
    assert order == [3, 0, 1, 2]


async def test_nothing_is_done_for_whoever_has_gone(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """His lease would be held by nobody, and the time for it is what made him go."""
    clock, queue = [0.0], WriteQueue(database)
    monkeypatch.setattr(write_queue.time, "perf_counter", lambda: clock[0])
    with database.write():
        late = asyncio.create_task(queue.run(writer(database, 1)))
        await in_turn()
        clock[0] = MOST_WAIT_SECONDS + 1
        in_time = asyncio.create_task(queue.run(writer(database, 2)))
        await in_turn()
    with pytest.raises(TooManyRequests):
        await late
    assert await in_time == 2
    assert written(database) == [2]


def test_one_that_is_refused_undoes_what_it_wrote_and_nothing_else(database: Database) -> None:
    refusal = Refusal(Reason.EXPIRED_LEASE, "too late")
    jobs = [writer(database, 1), writer(database, 2, fails=refusal), writer(database, 3)]
    for number, execute in enumerate((database.execute_together, database.execute_now), 1):
        assert execute(jobs) == [JobOutcome(1, None, True), JobOutcome(None, refusal), JobOutcome(3, None, True)]
        assert written(database) == sorted([1, 3] * number)


async def test_where_the_database_goes_away_nobody_is_told_that_it_was_written(database: Database) -> None:
    """And the queue works again as soon as the database does."""
    queue = WriteQueue(database)
    away = OperationalError("INSERT", None, Exception("disk I/O error"))
    jobs = [writer(database, 1), writer(database, 2, fails=away), writer(database, 3)]
    assert await asyncio.gather(*map(queue.run, jobs), return_exceptions=True) == [away] * 3
    with database.write(durable=False):
        in_thread = [asyncio.create_task(queue.run(job)) for job in jobs]
        await in_turn()
    assert await asyncio.gather(*in_thread, return_exceptions=True) == [away] * 3
    assert written(database) == []
    assert await queue.run(writer(database, 4)) == 4
    assert written(database) == [4]


async def test_reads_that_wait_share_a_snapshot_in_which_is_what_was_there_when_they_asked(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is woken by a verdict and then told that there is none would wait for it in vain."""
    queue, begun = ReadQueue(database), list[object]()
    for engine in database._engines:
        event.listen(engine, "begin", begun.append)
    writer(database, 1)()
    begun.clear()
    refusal = Refusal(Reason.NOT_FOUND, "nothing there")

    def refused() -> None:
        raise refusal

    jobs: list[Callable[[], Any]] = [lambda: written(database), refused, lambda: written(database)]
    for number in (1, 2):
        assert await asyncio.gather(*map(queue.run, jobs), return_exceptions=True) == [[1], refusal, [1]]
        assert len(begun) == number
        monkeypatch.setattr(database, "read_now", Mock(side_effect=LockHeld))  # from now on a thread reads
    assert written(database) == [1]
    assert len(begun) == 3, "others have their own again"


async def test_a_slow_queue_tells_whoever_is_turned_away_to_stay_away_for_longer(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He would come again, and cost a refusal, before the coordinator has done anything of what waits."""
    clock, queue = [0.0], WriteQueue(database)
    monkeypatch.setattr(write_queue.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(write_queue, "MEASURED_OVER", MOST_TOGETHER)

    def slow() -> None:
        clock[0] += 0.25

    with database.write(durable=False):
        first = asyncio.create_task(queue.run(lambda: None))
        await in_turn()
        others = [asyncio.create_task(queue.run(slow)) for _ in range(MOST_TOGETHER)]
        await in_turn()
        clock[0] = 10.0  # nobody waited for all of this
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
