"""State behind the HTTP server: what a node offers at this moment, and who waits for more.

A `ServedState` belongs to one event loop; only the store under it is thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from shardcast.fetch.fetcher import Fetched
from shardcast.store.payload_file import PayloadFile
from shardcast.store.versions import Store


@dataclass(frozen=True, slots=True)
class Announced:
    """The newest head a node shows: its version and signed envelope."""

    version: int
    envelope: bytes


@dataclass(slots=True)
class Traffic:
    """Counters since the start of the process; payload bytes are counted where they are fetched."""

    bytes_in: int = 0
    bytes_out: int = 0
    requests: int = 0
    refused: int = 0


@dataclass(slots=True)
class ServedState:
    """What a node serves: `head` returns the newest head or None; `upstreams` describes its sources."""

    store: Store
    role: str
    run_id: str
    head: Callable[[], Announced | None]
    upstreams: Callable[[], list[dict[str, Any]]] = list
    traffic: Traffic = field(default_factory=Traffic)
    fetched: Fetched = field(default_factory=Fetched)
    started_at: float = field(default_factory=time.time)
    _head_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _arrivals: WeakValueDictionary[tuple[str, int], asyncio.Event] = field(default_factory=WeakValueDictionary)

    def open(self) -> None:
        """Subscribe to the store's arrivals, in the running event loop."""
        loop = asyncio.get_running_loop()

        def arrived(name: str, index: int) -> None:
            with contextlib.suppress(RuntimeError):  # the writer outlived the loop
                loop.call_soon_threadsafe(self._chunk_arrived, name, index)

        self.store.arrived = arrived

    @property
    def bytes_in(self) -> int:
        """Total bytes received."""
        return self.traffic.bytes_in + self.fetched.bytes_in

    def announce(self) -> None:
        """Wake every request that waits for a newer head."""
        changed, self._head_changed = self._head_changed, asyncio.Event()
        changed.set()

    async def newer_head(self, after: int, wait_s: float) -> Announced | None:
        """Wait up to `wait_s` for a head whose version exceeds `after`; None on timeout."""
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

    async def chunk(self, name: str, index: int, wait_s: float) -> PayloadFile | None:
        """Return the file of payload `name` once chunk `index` is verified, waiting up to `wait_s`; None on timeout or
        if unknown.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        while (file := self.store.payload(name)) is not None and index < file.payload.chunk_count:
            if file.is_verified(index):
                return file
            # Held by the waiting requests only, so that it goes with the last of them.
            waiting = self._arrivals.setdefault((name, index), asyncio.Event())
            # Checked after registering the event, to miss no arrival. Hashing runs in a thread.
            if file.holds(index) and await asyncio.to_thread(file.verify, index):
                return file
            try:
                async with asyncio.timeout_at(deadline):
                    await waiting.wait()
            except TimeoutError:
                return None
        return None

    def expects(self, name: str, index: int) -> bool:
        """Return whether a chunk is here or may still arrive."""
        file = self.store.payload(name)
        return file is not None and index < file.payload.chunk_count

    def _chunk_arrived(self, name: str, index: int) -> None:
        if (waiting := self._arrivals.pop((name, index), None)) is not None:
            waiting.set()
