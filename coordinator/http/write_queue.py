"""Write transactions of requests: on SQLite those that wait at the same time share one commit, in one thread.

A commit, its locks and a change of threads cost as much as what most requests write. On PostgreSQL, where many write at
once, each has a thread and a transaction of its own.
"""

from __future__ import annotations

import asyncio
import time
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
_Waiting = tuple[Callable[[], Any], "asyncio.Future[Any]", float]


class WriteQueue:
    """Executes jobs with write transactions for one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writes")
        self._waiting: deque[_Waiting] = deque()
        self._executing = 0

    def __len__(self) -> int:
        """Return how many jobs wait or are being executed."""
        return len(self._waiting) + self._executing

    async def run(self, job: Callable[[], T]) -> T:
        """Call `job` in a thread and return its result once what it wrote is committed; raises what it raises.

        Others wait for it: it reads no file and no network.
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
        execute = partial(
            self._database.execute_together,
            [job for job, _, _ in batch],
            asked_at=[asked_at for _, _, asked_at in batch],
        )
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
