"""Transactions of requests: on SQLite those that wait at the same time become one, in one thread.

A transaction, its locks and a change of threads cost as much as what most requests write or read. On PostgreSQL, where
many wait for the server at once, each has a thread and a transaction of its own.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from starlette.concurrency import run_in_threadpool

from coordinator.storage.database import Database

MOST_TOGETHER: Final = 16
"""Jobs of one transaction: a verifier waits for its end to write, about half a millisecond for each."""

T = TypeVar("T")
_Outcome = tuple[Any, Exception | None]
_Waiting = tuple[Callable[[], Any], "asyncio.Future[Any]", float]


class _JobQueue(abc.ABC):
    """Executes jobs with transactions for one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__)
        self._waiting: deque[_Waiting] = deque()
        self._executing = 0

    def __len__(self) -> int:
        """Return how many jobs wait or are being executed."""
        return len(self._waiting) + self._executing

    async def run(self, job: Callable[[], T]) -> T:
        """Call `job` in a thread and return its result once its transaction has ended; raises what it raises.

        Others wait for it: it reads no network, and no file that requests could have it read.
        """
        if not self._database.shares_commits:
            self._executing += 1
            try:
                return await run_in_threadpool(job)
            finally:
                self._executing -= 1
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, done, time.perf_counter()))
        if not self._executing:
            self._start()
        return await done

    def _start(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(MOST_TOGETHER, len(self._waiting)))]
        self._executing = len(batch)
        jobs, asked_at = [job for job, _, _ in batch], [asked_at for _, _, asked_at in batch]
        execute = partial(self._execute, jobs, asked_at)
        execution = asyncio.get_running_loop().run_in_executor(self._thread, execute)
        execution.add_done_callback(partial(self._finish, batch))

    def _finish(self, batch: list[_Waiting], execution: asyncio.Future[Any]) -> None:
        self._executing = 0
        if self._waiting:
            self._start()
        if execution.cancelled():
            return
        failure = execution.exception()
        outcomes = [(None, failure)] * len(batch) if failure is not None else execution.result()
        for (_, done, _), (value, error) in zip(batch, outcomes, strict=True):
            if done.done():  # whoever waited has gone
                continue
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

    @abc.abstractmethod
    def _execute(self, jobs: Sequence[Callable[[], Any]], asked_at: Sequence[float]) -> list[_Outcome]:
        """Call `jobs`, waiting since `asked_at`, in one transaction; return what each returned, or what it raised."""


class WriteQueue(_JobQueue):
    """Executes jobs with write transactions; what they wrote is committed before any of them returns."""

    def _execute(self, jobs: Sequence[Callable[[], Any]], asked_at: Sequence[float]) -> list[_Outcome]:
        return self._database.execute_together(jobs, asked_at=asked_at)


class ReadQueue(_JobQueue):
    """Executes jobs with read transactions, those that wait at the same time on one snapshot."""

    def _execute(self, jobs: Sequence[Callable[[], Any]], asked_at: Sequence[float]) -> list[_Outcome]:
        return self._database.read_together(jobs, asked_at=asked_at)
