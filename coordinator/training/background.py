"""Work that goes on in a thread while the trainer computes, one piece at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

log = logging.getLogger(__name__)


class Background:
    """One thread and at most one piece of work, whose exception is raised where it is waited for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._work: Future[object] | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is work that nobody has waited for, and that would not be waited for long."""
        return self._work is not None and self._work.done()

    def begin(self, work: Callable[[], object]) -> Future[object]:
        """Start `work`, after what was begun before."""
        self.wait()
        self._work = self._thread.submit(work)
        return self._work

    def wait(self) -> float:
        """Wait for the work and return for how many seconds; raises what it raised, once."""
        started, work, self._work = time.monotonic(), self._work, None
        if work is not None:
            work.result()
        return time.monotonic() - started

    def settle(self) -> None:
        """Wait for the work, which a restart does again if it failed."""
        work, self._work = self._work, None
        if work is None:
            return
        wait([work])
        if (error := work.exception()) is not None:
            log.warning("%s failed: %s", self._name, error)
