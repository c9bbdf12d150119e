"""What a node offers at this moment, and who is waiting for more: the state behind the HTTP server.

A board belongs to one event loop; only the store under it is safe from other threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardcast.store import ChunkStore


@dataclass(frozen=True, slots=True)
class Announced:
    """The newest head a node shows: its version and the signed envelope."""

    version: int
    envelope: bytes


@dataclass(slots=True)
class Traffic:
    """Counted since the start of the process."""

    bytes_in: int = 0
    bytes_out: int = 0
    requests: int = 0
    refused: int = 0


@dataclass(slots=True)
class Board:
    """`head` returns the newest head to show, None before the first; `upstreams` describes sources for people."""

    store: ChunkStore
    role: str
    run_id: str
    head: Callable[[], Announced | None]
    upstreams: Callable[[], list[dict[str, Any]]] = list
    traffic: Traffic = field(default_factory=Traffic)
    started_at: float = field(default_factory=time.time)
    _head_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _arrivals: dict[str, asyncio.Event] = field(default_factory=dict)

    def announce(self) -> None:
        """Wake everyone who waits for a newer head."""
        changed, self._head_changed = self._head_changed, asyncio.Event()
        changed.set()

    def chunk_arrived(self, digest: str) -> None:
        """Wake everyone who waits for this chunk."""
        if (waiting := self._arrivals.pop(digest, None)) is not None:
            waiting.set()

    async def newer_head(self, after: int, wait_s: float) -> Announced | None:
        """The head once its version exceeds `after`; None if that takes longer than `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    changed = self._head_changed
                    current = self.head()
                    if current is not None and current.version > after:
                        return current
                    await changed.wait()
        except TimeoutError:
            return None

    async def chunk(self, digest: str, wait_s: float) -> Path | None:
        """The verified file of a chunk, waiting up to `wait_s` for one that a held version needs."""
        if (path := self.store.ready_path(digest)) is not None:
            return path
        if self.store.holds(digest):
            path = await asyncio.to_thread(self.store.verified_path, digest)
        if path is not None or wait_s <= 0 or not self.store.wants(digest):
            return path
        waiting = self._arrivals.setdefault(digest, asyncio.Event())
        try:
            async with asyncio.timeout(wait_s):
                # Looked up again: it may have arrived during the thread hop, before there was an event to set.
                if self.store.ready_path(digest) is None:
                    await waiting.wait()
        except TimeoutError:
            if not self.store.wants(digest):
                self._arrivals.pop(digest, None)
            return None
        return await asyncio.to_thread(self.store.verified_path, digest)
