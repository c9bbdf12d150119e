"""Server-sent events: one producer for all who watch the run's page, and a bounded number of them.

What is sent is the page's own sections, as the server renders them, and only those that have changed. A listener that
reads slowly misses versions, not the last one, and holds no more than one message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Final

from coordinator.http.rate_limits import TooManyRequests, network_of
from coordinator.http.shutdown import Ending

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 2.0
HEARTBEAT_SECONDS: Final = 15.0
STREAM_SECONDS: Final = 1800.0
"""After so long a stream ends, and the browser asks for the next: nothing is held open for ever."""

RETRY_MS: Final = 3000
RETRY_AFTER_SECONDS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """How many streams one network address and all together may have."""

    per_address: int = 8
    streams: int = 256


DEFAULT_STREAM_LIMITS: Final = StreamLimits()


class Sections:
    """The latest text of each section, and since which revision it is so."""

    def __init__(self) -> None:
        self._boot = token_hex(4)
        self._texts: dict[str, tuple[int, str]] = {}
        self.revision = 0

    @property
    def mark(self) -> str:
        """Names this state, for `since`; of another process it names nothing."""
        return f"{self._boot}-{self.revision}"

    def update(self, texts: Mapping[str, str]) -> bool:
        """Replace the sections by the present ones; return whether any changed."""
        changed = {name: text for name, text in texts.items() if self._texts.get(name, (0, None))[1] != text}
        if changed:
            self.revision += 1
            self._texts |= {name: (self.revision, text) for name, text in changed.items()}
        return bool(changed)

    def since(self, mark: str) -> dict[str, str]:
        """Return what has changed after `mark`; everything for a mark that is not this process's."""
        boot, _, number = mark.partition("-")
        last = int(number) if boot == self._boot and number.isdecimal() and len(number) < 16 else 0
        return {name: text for name, (revision, text) in self._texts.items() if revision > last}


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """One stream: whose, and what wakes it."""

    network: str
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class EventHub:
    """The streams of one process; used from its event loop only."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Mapping[str, str]]],
        *,
        limits: StreamLimits = DEFAULT_STREAM_LIMITS,
        tick_seconds: float = TICK_SECONDS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        stream_seconds: float = STREAM_SECONDS,
        ending: Ending | None = None,
    ) -> None:
        self._ending = ending or Ending()
        self._read, self._limits = read, limits
        self._tick, self._heartbeat, self._longest = tick_seconds, heartbeat_seconds, stream_seconds
        self._from = Counter[str]()
        self._seats = set[Seat]()
        self._producer: asyncio.Task[None] | None = None
        self._sections = Sections()
        self._encoded: tuple[str, str, bytes] = ("", "", b"")

    def __len__(self) -> int:
        return len(self._seats)

    async def now(self, mark: str) -> dict[str, object]:
        """Return what has changed after `mark`, for clients that poll."""
        self._sections.update(await self._read())
        return {"mark": self._sections.mark, "sections": self._sections.since(mark)}

    def enter(self, address: str) -> Seat:
        """Reserve a stream to `address`, to be released by `leave`. Raises TooManyRequests."""
        network = network_of(address)
        if self._from[network] >= self._limits.per_address or len(self._seats) >= self._limits.streams:
            raise TooManyRequests("Too many open streams.", retry_after_seconds=RETRY_AFTER_SECONDS)
        seat = Seat(network)
        self._from[network] += 1
        self._seats.add(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """Forget a stream that has ended; the last one out ends the producer."""
        if seat not in self._seats:
            return
        self._seats.discard(seat)
        self._from[seat.network] -= 1
        if not self._from[seat.network]:
            del self._from[seat.network]
        if not self._seats and self._producer is not None:
            self._producer.cancel()
            self._producer = None

    async def stream(self, seat: Seat, *, mark: str) -> AsyncIterator[bytes]:
        """Yield everything that has changed after `mark`, then changes, up to the stream's time limit."""
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
        ends = time.monotonic() + self._longest
        yield f"retry: {RETRY_MS}\n\n".encode()
        while time.monotonic() < ends and not self._ending.begun:
            seat.woken.clear()
            newest = self._sections.mark
            if self._sections.revision and newest != mark:
                # While this waits for the reader, there may be another.
                yield self._message(mark)
                mark = newest
                continue
            try:
                await asyncio.wait_for(self._ending.before(seat.woken), self._heartbeat)
            except TimeoutError:
                yield b": still here\n\n"

    async def _produce(self) -> None:
        while True:
            try:
                changed = self._sections.update(await self._read())
            except Exception:
                # The database may be back at the next tick.
                log.warning("dashboard not updated; retrying in %.1f s", self._tick, exc_info=True)
                changed = False
            if changed:
                for seat in self._seats:
                    seat.woken.set()
            await asyncio.sleep(self._tick)

    def _message(self, mark: str) -> bytes:
        """Encode the event with what has changed after `mark`; cached, since most clients have the same mark."""
        if self._encoded[:2] != (mark, self._sections.mark):
            data = json.dumps(self._sections.since(mark), separators=(",", ":"))
            event = f"id: {self._sections.mark}\nevent: sections\ndata: {data}\n\n".encode()
            self._encoded = (mark, self._sections.mark, event)
        return self._encoded[2]
