"""Graceful shutdown: the first signal sets an event, the second exits; cancelling work on an event."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

EXIT_AT_ONCE = 130

T = TypeVar("T")


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets; a second signal exits at once. Call it in the running loop.

    SIGHUP sets it, too, unless ignored (nohup); a closing terminal may send it twice, so it never exits.
    """
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            if number == signal.SIGHUP:
                return
            os._exit(EXIT_AT_ONCE)
        log.info("%s: finishing; a second signal exits at once", signal.Signals(number).name)
        stop.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


class Stopped(Exception):
    """Work was cancelled because its stop event was set."""


async def race(
    work: Coroutine[Any, Any, T], stop: asyncio.Event, *, linger_seconds: Callable[[], float] = lambda: 0.0
) -> T:
    """Return the result of `work`; raise Stopped if `work` has not ended `linger_seconds` after `stop` was set."""
    task, stopper = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopper}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=linger_seconds())
        if task.done():
            return task.result()
        raise Stopped
    finally:
        stopper.cancel()
        task.cancel()
        await asyncio.gather(task, stopper, return_exceptions=True)


def root_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf exception of a group, from which the others followed."""
    first = failures.exceptions[0]
    return root_failure(first) if isinstance(first, BaseExceptionGroup) else first
