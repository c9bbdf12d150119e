"""How much a server sends in all: a token bucket over every connection, in which small answers overtake chunks.

A chunk that was begun goes before those that were not, so that few are under way at once, each at a decent rate, and
the others wait before their first byte, where readers are most patient. The next is begun when those under way leave
some of the rate unused, so that readers who take little keep nobody waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from shardcast.manifest import KIB, MIB

_PIECE_S = 0.01
"""How long a piece of a chunk keeps everybody else waiting."""

_BURST_S = 0.02
"""How much of what was not sent may be sent later: what an event loop's clock misses, and no more."""

_UNUSED_S = 0.1
"""How much of the rate the chunks under way must have left unused, all in all, before one more is begun."""


@dataclass(slots=True, eq=False)
class Turn:
    """A chunk's place in the order; `begun` once some of it was allowed."""

    begun: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    size_bytes: int
    allowed: asyncio.Future[None]
    turn: Turn | None


class Pacer:
    """At most `bytes_per_s`, for one event loop. What is allowed has to be sent by whoever asked."""

    def __init__(self, bytes_per_s: float) -> None:
        self.piece_bytes = int(min(max(bytes_per_s * _PIECE_S, 4 * KIB), MIB))
        self._bytes_per_s = bytes_per_s
        self._free_at = self._unused_from = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._small = deque[_Waiting]()
        self._begun = deque[_Waiting]()
        self._new = deque[_Waiting]()
        self._small_bytes = 0
        self._under_way = 0

    async def allow(self, size_bytes: int, turn: Turn | None = None) -> None:
        """Returns when so many bytes may be sent: of a small answer, or of the chunk that has this turn."""
        waiting = _Waiting(size_bytes, asyncio.get_running_loop().create_future(), turn)
        queue = self._small if turn is None else self._begun if turn.begun else self._new
        queue.append(waiting)
        self._grant()
        await waiting.allowed

    def end(self, turn: Turn) -> None:
        """Nothing more is sent of this chunk."""
        if turn.begun:
            self._under_way -= 1
            self._grant()

    def _grant(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._free_at = max(self._free_at, loop.time() - _BURST_S)
        self._unused_from = max(self._unused_from, loop.time() - _UNUSED_S)
        while self._small or self._begun or self._new:
            if self._free_at > loop.time():
                self._timer = loop.call_at(self._free_at, self._grant)
                return
            one_more_at = self._unused_from + _UNUSED_S
            queue = self._next(one_more=loop.time() >= one_more_at)
            if queue is None:
                self._timer = loop.call_at(one_more_at, self._grant)
                return
            self._take(queue)

    def _next(self, *, one_more: bool) -> deque[_Waiting] | None:
        """Whose turn it is; None if a chunk waits to be begun, and those under way may want the rate yet.

        What is small goes first, unless those before it came to as much as a piece of the chunk that waits.
        """
        chunks_turn = bool(self._begun or self._new) and self._small_bytes >= self.piece_bytes
        if self._small and not chunks_turn:
            return self._small
        if self._begun:
            return self._begun
        if self._new and (chunks_turn or one_more or not self._under_way):
            return self._new
        return None

    def _take(self, queue: deque[_Waiting]) -> None:
        waiting = queue.popleft()
        if waiting.allowed.done():  # whoever asked has gone
            return
        if waiting.turn is None:
            self._small_bytes = self._small_bytes + waiting.size_bytes if self._begun or self._new else 0
        else:
            self._small_bytes = 0
            if not waiting.turn.begun:
                waiting.turn.begun = True
                self._under_way += 1
                self._unused_from = asyncio.get_running_loop().time()
        seconds = waiting.size_bytes / self._bytes_per_s
        self._free_at += seconds
        self._unused_from += seconds
        waiting.allowed.set_result(None)
