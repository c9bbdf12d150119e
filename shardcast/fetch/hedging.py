"""Small requests to sources of which any may hang: each is asked in turn, and none is waited for alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from shardcast.errors import Equivocation, LocalFault, PeerFault, ShardcastError, Unreachable

STAGGER_S = 0.25
"""After which the next source is asked beside those that have not answered."""
MAX_AT_ONCE = 8

T = TypeVar("T")


async def first_accepted(
    urls: Iterable[str], ask: Callable[[str], Coroutine[Any, Any, T]], *, failed: Callable[[str, ShardcastError], None]
) -> T:
    """Return the first reply that `ask` accepts; a source that does not answer within STAGGER_S delays no other.

    With MAX_AT_ONCE requests open the oldest is given up. `failed` is told of each source that failed. Raises
    Equivocation and LocalFault at once, otherwise the most telling error once all have failed: a lie before a failure.
    """
    waiting, running = iter(urls), dict[asyncio.Task[T], str]()
    last_error: ShardcastError = Unreachable("no source to ask: configure at least one", code="no_sources")
    try:
        while True:
            if (url := next(waiting, None)) is not None:
                if len(running) == MAX_AT_ONCE:
                    await _cancel([next(iter(running))], running)
                running[asyncio.create_task(ask(url))] = url
            elif not running:
                raise last_error
            timeout_s = None if url is None else STAGGER_S
            done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                asked = running.pop(task)
                try:
                    return task.result()
                except ShardcastError as error:
                    failed(asked, error)
                    if isinstance(error, Equivocation | LocalFault):
                        raise
                    if not isinstance(last_error, PeerFault) or isinstance(error, PeerFault):
                        last_error = error
    finally:
        await _cancel(list(running), running)


async def _cancel(tasks: list[asyncio.Task[T]], running: dict[asyncio.Task[T], str]) -> None:
    for task in tasks:
        running.pop(task, None)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
