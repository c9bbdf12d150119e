"""Upload rate limit: a token bucket over all connections, in which small responses overtake chunks.

Chunks already started take precedence, so that few are in flight at once, each at a decent rate, and the others wait
before their first byte, where readers are most patient. The next one starts when those in flight leave some of the rate
unused, so that slow readers hold up nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from shardcast.manifest import KIB, MIB

_PIECE_S = 0.01
"""How long one piece of a chunk may delay everything else."""

_BURST_S = 0.02
"""Unused rate that may be caught up: the inaccuracy of an event loop's clock, and no more."""

_UNUSED_S = 0.1
"""Rate that the chunks in flight must have left unused, in total, before another one starts."""


@dataclass(slots=True, eq=False)
class ChunkTurn:
    """A chunk's place in the queue; `begun` once its first bytes were allowed."""

    begun: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    size_bytes: int
    allowed: asyncio.Future[None]
    turn: ChunkTurn | None


class Pacer:
    """Rate limiter of `bytes_per_s` for one event loop. Whoever is allowed bytes must send them."""

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

    async def allow(self, size_bytes: int, turn: ChunkTurn | None = None) -> None:
        """Wait until `size_bytes` may be sent: of a small response, or of the chunk that holds `turn`."""
        waiting = _Waiting(size_bytes, asyncio.get_running_loop().create_future(), turn)
        queue = self._small if turn is None else self._begun if turn.begun else self._new
        queue.append(waiting)
        self._grant()
        await waiting.allowed

    def end(self, turn: ChunkTurn) -> None:
        """Release a chunk's turn: nothing more of it will be sent."""
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
            queue = self._next_queue(one_more=loop.time() >= one_more_at)
            if queue is None:
                self._timer = loop.call_at(one_more_at, self._grant)
                return
            self._admit(queue)

    def _next_queue(self, *, one_more: bool) -> deque[_Waiting] | None:
        """Return the queue to serve next; None while chunks in flight may still use the rate.

        Small responses go first, until they total one piece of a waiting chunk.
        """
        chunks_turn = bool(self._begun or self._new) and self._small_bytes >= self.piece_bytes
        if self._small and not chunks_turn:
            return self._small
        if self._begun:
            return self._begun
        if self._new and (chunks_turn or one_more or not self._under_way):
            return self._new
        return None

    def _admit(self, queue: deque[_Waiting]) -> None:
        waiting = queue.popleft()
        if waiting.allowed.done():  # the caller was cancelled
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
