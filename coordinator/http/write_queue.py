"""Write transactions of requests: on SQLite those that wait at the same time share one commit, in one thread.

A commit, its locks and a change of threads cost as much as what most requests write. On PostgreSQL, where many write at
once, each has a thread and a transaction of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from starlette.concurrency import run_in_threadpool

from coordinator.storage.database import Database

MOST_TOGETHER: Final = 16
"""Jobs of one transaction: a verifier waits for its end to write, about half a millisecond for each."""

T = TypeVar("T")
_Waiting = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class WriteQueue:
    """Executes jobs with write transactions for one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writes")
        self._waiting: deque[_Waiting] = deque()
        self._is_busy = False

    async def run(self, job: Callable[[], T]) -> T:
        """Call `job` in a thread and return its result once what it wrote is committed; raises what it raises.

        Others wait for it: it reads no file and no network.
        """
        if not self._database.shares_commits:
            return await run_in_threadpool(job)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, done))
        if not self._is_busy:
            self._start()
        return await done

    def _start(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(MOST_TOGETHER, len(self._waiting)))]
        self._is_busy = True
        jobs = [job for job, _ in batch]
        execution = asyncio.get_running_loop().run_in_executor(self._thread, self._database.execute_together, jobs)
        execution.add_done_callback(partial(self._finish, batch))

    def _finish(self, batch: list[_Waiting], execution: asyncio.Future[Any]) -> None:
        self._is_busy = False
        if self._waiting:
            self._start()
        if execution.cancelled():
            return
        failure = execution.exception()
        outcomes = [(None, failure)] * len(batch) if failure is not None else execution.result()
        for (_, done), (value, error) in zip(batch, outcomes, strict=True):
            if done.done():  # whoever waited has gone
                continue
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)
