"""Transactions of requests: those that wait at the same time become one.

A transaction, its locks and a change of threads cost as much as what most requests write or read. So on SQLite the
event loop's own thread executes them, as long as they need not wait: for another writer, or for the disk
(docs/adr/0039-transactions-on-the-event-loop.md). On PostgreSQL requests for work, which exclude each other, have a
thread, and the others several, since each waits for the server most of its time.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar, cast

from starlette.concurrency import run_in_threadpool

from coordinator.http.rate_limits import OverloadRefusal
from coordinator.storage.database import Database, JobOutcome
from coordinator.storage.faults import LockHeld

MOST_WAIT_SECONDS: Final = 20.0
"""After which a job is not begun: whoever waits for 30 s has gone (`node.client.http.ExchangeLimits`), and his lease
would be held by nobody."""

MOST_HERE: Final = 128
"""Jobs in the event loop's thread, after which another executes those that wait: at the end of its transaction SQLite
moves what is in the write-ahead log to where it belongs, and waits for the disk."""

MEASURED_OVER: Final = 64
"""Jobs over which the time of one is averaged."""

MOST_TOGETHER: Final = 16
"""Jobs of one transaction: a verifier waits for its end to write, about half a millisecond for each."""

SERVER_THREADS: Final = 3
"""Of PostgreSQL: the more there are, the fewer requests share a transaction."""

T = TypeVar("T")
_Waiting = tuple[Callable[[], Any], "asyncio.Future[Any]", float]


class _JobQueue(abc.ABC):
    """Executes jobs with transactions for one event loop.

    `seconds_each` is the mean time from the end of one job to that of the next while others wait: what each of those
    that wait adds to the wait of the next one.
    """

    def __init__(self, database: Database, *, threads: int = 1) -> None:
        self.seconds_each = 0.0
        self._database = database
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=type(self).__name__)
        self._free_threads = threads
        self._waiting: deque[_Waiting] = deque()
        self._executing = 0
        self._busy_since: float | None = None
        self._is_begun = False
        self._sync = _SyncQueue(database)

    def __len__(self) -> int:
        """Return how many jobs wait or are being executed."""
        return len(self._waiting) + self._executing + len(self._sync)

    async def run(self, job: Callable[[], T], *, is_last: bool = False) -> T:
        """Call `job` and return its result once its transaction has ended; raises what it raises.

        Raises TooManyRequests where it could not be begun within MOST_WAIT_SECONDS; nothing is done then.

        Others wait for it, and perhaps the event loop: it reads no network, syncs nothing to a disk, and reads no file
        that requests could have it read. It is called again where it would have waited for a lock, by itself, so that
        nobody else waits with it. The last of a request's jobs waits for those that are executed now, and not a second
        time for all others: it holds a body.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        asked_at = time.perf_counter()
        job = partial(_in_time, job, asked_at)
        (self._waiting.appendleft if is_last else self._waiting.append)((job, done, asked_at))
        self._begin()
        try:
            return await done
        except LockHeld:
            self._executing += 1
        try:
            return await run_in_threadpool(job)
        finally:
            self._executing -= 1
            self._note_end(1)

    def _begin(self) -> None:
        """See to it that what waits is executed as soon as a thread is free, or the event loop is."""
        if self._is_begun or not self._free_threads or not self._waiting:
            return
        if self._database.has_many_writers:
            self._start(self._take())
        else:
            self._is_begun = True
            asyncio.get_running_loop().call_soon(self._execute_here)

    def _take(self) -> list[_Waiting]:
        batch = [self._waiting.popleft() for _ in range(min(MOST_TOGETHER, len(self._waiting)))]
        self._executing += len(batch)
        return batch

    def _execute_here(self) -> None:
        """Execute a batch in the event loop's thread, or in another where it would wait."""
        self._is_begun = False
        batch = self._take()
        try:
            outcomes = self._execute_now([job for job, _, _ in batch], [asked_at for _, _, asked_at in batch])
        except LockHeld:
            self._start(batch)
            return
        except Exception as error:  # noqa: BLE001  (raised again by whoever waits)
            outcomes = [JobOutcome(None, error)] * len(batch)
        self._finish(batch, outcomes)

    def _start(self, batch: list[_Waiting]) -> None:
        """Execute a batch in a thread."""
        jobs, asked_at = [job for job, _, _ in batch], [asked_at for _, _, asked_at in batch]
        try:
            execution = asyncio.get_running_loop().run_in_executor(self._threads, self._execute, jobs, asked_at)
        except RuntimeError as error:  # no thread can be started now
            self._finish(batch, [JobOutcome(None, error)] * len(batch))
            return
        self._free_threads -= 1
        execution.add_done_callback(partial(self._end_thread, batch))

    def _end_thread(self, batch: list[_Waiting], execution: asyncio.Future[Any]) -> None:
        self._free_threads += 1
        if execution.cancelled():
            self._executing -= len(batch)
            self._begin()
            return
        failure = execution.exception()
        if failure is None:
            self._finish(batch, [outcome._replace(is_sync_due=False) for outcome in execution.result()])
        else:
            self._finish(batch, [JobOutcome(None, cast("Exception", failure))] * len(batch))

    def _finish(self, batch: list[_Waiting], outcomes: Sequence[JobOutcome[Any]]) -> None:
        self._executing -= len(batch)
        self._note_end(len(batch))
        self._begin()
        for (_, done, _), outcome in zip(batch, outcomes, strict=True):
            if outcome.is_sync_due:
                self._sync.add(done, outcome)
            else:
                _tell(done, outcome)

    def _note_end(self, jobs: int) -> None:
        """Take the time since the last end, if others have waited since, into the mean."""
        now = time.perf_counter()
        if self._busy_since is not None:
            seconds = (now - self._busy_since) / jobs
            self.seconds_each += (seconds - self.seconds_each) * jobs / MEASURED_OVER
        self._busy_since = now if self._waiting or self._executing else None

    @abc.abstractmethod
    def _execute(self, jobs: Sequence[Callable[[], Any]], asked_at: Sequence[float]) -> list[JobOutcome[Any]]:
        """Call `jobs`, waiting since `asked_at`, in one transaction; return what each returned, or what it raised."""

    @abc.abstractmethod
    def _execute_now(self, jobs: Sequence[Callable[[], Any]], asked_at: Sequence[float]) -> list[JobOutcome[Any]]:
        """As `_execute`, on SQLite; raises LockHeld where it would wait: nothing is done, and a thread is to do it."""


class _SyncQueue:
    """Has what was written to SQLite synced to disk, all that waits at the same time at once, and then told."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sync of the log")
        self._waiting: list[tuple[asyncio.Future[Any], JobOutcome[Any]]] = []
        self._syncing: list[tuple[asyncio.Future[Any], JobOutcome[Any]]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._syncing)

    def add(self, done: asyncio.Future[Any], outcome: JobOutcome[Any]) -> None:
        """Set the result of `done` once the next sync has ended."""
        self._waiting.append((done, outcome))
        if not self._syncing:
            self._start()

    def _start(self) -> None:
        self._syncing, self._waiting = self._waiting, []
        try:
            syncing = asyncio.get_running_loop().run_in_executor(self._thread, self._database.sync)
        except RuntimeError as error:  # no thread can be started now
            self._end(error)
            return
        syncing.add_done_callback(self._finish)

    def _finish(self, syncing: asyncio.Future[None]) -> None:
        if not syncing.cancelled():
            self._end(syncing.exception())
        if self._waiting:
            self._start()

    def _end(self, failure: BaseException | None) -> None:
        synced, self._syncing = self._syncing, []
        for done, outcome in synced:
            _tell(done, outcome if failure is None else JobOutcome(None, cast("Exception", failure)))


def _tell(done: asyncio.Future[Any], outcome: JobOutcome[Any]) -> None:
    if done.done():  # whoever waited has gone
        return
    if outcome.error is None:
        done.set_result(outcome.value)
    else:
        done.set_exception(outcome.error)


def _in_time(job: Callable[[], T], asked_at: float) -> T:
    if time.perf_counter() - asked_at > MOST_WAIT_SECONDS:
        raise OverloadRefusal("It would have taken too long; nothing was done.", retry_after_seconds=2)
    return job()


class _Writes(_JobQueue):
    """Executes jobs with write transactions, `leasing` or not, as `Database.execute_together` says."""

    def __init__(self, database: Database, *, leasing: bool = False, threads: int = 1) -> None:
        super().__init__(database, threads=threads)
        self._leasing = leasing
        self._here = 0

    def _execute(self, jobs: Sequence[Callable[[], Any]], asked_at: Sequence[float]) -> list[JobOutcome[Any]]:
        self._here = 0
        return self._database.execute_together(jobs, asked_at=asked_at, leasing=self._leasing)

    def _execute_now(self, jobs: Sequence[Callable[[], Any]], asked_at: Sequence[float]) -> list[JobOutcome[Any]]:
        if self._here >= MOST_HERE:
            raise LockHeld
        self._here += len(jobs)
        return self._database.execute_now(jobs, asked_at=asked_at)


class WriteQueue:
    """Executes jobs with write transactions; what they wrote is committed before any of them returns."""

    def __init__(self, database: Database) -> None:
        if database.has_many_writers:
            self._queues = [_Writes(database, threads=SERVER_THREADS), _Writes(database, leasing=True)]
        else:
            self._queues = [_Writes(database)]

    def __len__(self) -> int:
        """Return how many jobs wait or are being executed."""
        return sum(map(len, self._queues))

    @property
    def seconds_each(self) -> float:
        """What each job that waits adds at most to the wait of the next one."""
        return max(queue.seconds_each for queue in self._queues)

    async def run(self, job: Callable[[], T], *, leasing: bool = False, is_last: bool = False) -> T:
        """Call `job` as `_JobQueue.run` does; `leasing` says that it takes `locks.leasing`."""
        return await self._queues[-1 if leasing else 0].run(job, is_last=is_last)


class ReadQueue(_JobQueue):
    """Executes jobs with read transactions, those that wait at the same time on one snapshot."""

    def _execute(self, jobs: Sequence[Callable[[], Any]], asked_at: Sequence[float]) -> list[JobOutcome[Any]]:
        return self._database.read_together(jobs, asked_at=asked_at)

    def _execute_now(self, jobs: Sequence[Callable[[], Any]], asked_at: Sequence[float]) -> list[JobOutcome[Any]]:
        return self._database.read_now(jobs, asked_at=asked_at)
