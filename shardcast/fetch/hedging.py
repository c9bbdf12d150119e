"""Small requests to sources of which any may hang: each is asked in turn, and none is waited for alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from shardcast.errors import Equivocation, LocalFault, NotServed, PeerFault, ShardcastError, Unreachable

STAGGER_S = 0.25
"""After which the next source is asked beside those that have not answered."""
MAX_AT_ONCE = 8

T = TypeVar("T")


async def first_accepted(
    urls: Iterable[str], ask: Callable[[str], Coroutine[Any, Any, T]], *, failed: Callable[[str, ShardcastError], None]
) -> T:
    """Return the first reply that `ask` accepts; a source that does not answer within STAGGER_S delays no other.

    A source that does not have it yet is asked again while others are. With MAX_AT_ONCE requests open one is given up,
    but for the first two: those of the most promising sources. `failed` is told of each source that failed. Raises
    Equivocation and LocalFault at once, otherwise the most telling error once all have failed: a lie before a failure.
    """
    waiting, running = deque(urls), dict[asyncio.Task[T], str]()
    refused, told = list[str](), set[str]()
    last_error: ShardcastError = Unreachable("no source to ask: configure at least one", code="no_sources")
    try:
        while True:
            if waiting:
                if len(running) == MAX_AT_ONCE:
                    await _cancel(list(running)[2:3], running)
                url = waiting.popleft()
                running[asyncio.create_task(ask(url))] = url
            elif not running:
                raise last_error
            else:
                waiting.extend(refused)
                refused.clear()
            timeout_s = STAGGER_S if waiting or refused else None
            done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                asked = running.pop(task)
                try:
                    return task.result()
                except ShardcastError as error:
                    if asked not in told:
                        failed(asked, error)
                        told.add(asked)
                    if isinstance(error, NotServed):
                        refused.append(asked)
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
