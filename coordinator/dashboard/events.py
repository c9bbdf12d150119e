"""Server-sent events: one producer per process and a bounded number of streams.

Events carry the rendered sections of the run's page that have changed. A slow reader skips intermediate versions and
buffers at most one message.
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

from coordinator.http.rate_limits import TooManyRequests
from coordinator.http.shutdown import Shutdown
from coordinator.storage.faults import advice, is_away
from shardcast.rate_limit import network_of

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 2.0
HEARTBEAT_SECONDS: Final = 15.0
STREAM_SECONDS: Final = 1800.0
"""Maximum duration of a stream; the browser then reconnects."""

RETRY_MS: Final = 3000
RETRY_AFTER_SECONDS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Maximum number of streams per network (see `network_of`) and in all."""

    per_address: int = 8
    streams: int = 256


DEFAULT_STREAM_LIMITS: Final = StreamLimits()


class Sections:
    """The current text of each section, with the revision that changed it last."""

    def __init__(self) -> None:
        self._boot = token_hex(4)
        self._texts: dict[str, tuple[int, str]] = {}
        self.revision = 0

    @property
    def mark(self) -> str:
        """The cursor of the current state, for `since`; valid in this process only."""
        return f"{self._boot}-{self.revision}"

    def update(self, texts: Mapping[str, str]) -> bool:
        """Update the sections' texts; return whether any changed."""
        changed = {name: text for name, text in texts.items() if self._texts.get(name, (0, None))[1] != text}
        if changed:
            self.revision += 1
            self._texts |= {name: (self.revision, text) for name, text in changed.items()}
        return bool(changed)

    def since(self, mark: str) -> dict[str, str]:
        """Return the sections changed after `mark`; all of them if it is not this process's."""
        boot, _, number = mark.partition("-")
        last = int(number) if boot == self._boot and number.isdecimal() and len(number) < 16 else 0
        return {name: text for name, (revision, text) in self._texts.items() if revision > last}


@dataclass(frozen=True, slots=True, eq=False)
class Subscription:
    """A stream's place: its client's network, and the event that wakes it."""

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
        shutdown: Shutdown | None = None,
    ) -> None:
        self._shutdown = shutdown or Shutdown()
        self._read, self._limits = read, limits
        self._tick, self._heartbeat, self._longest = tick_seconds, heartbeat_seconds, stream_seconds
        self._by_network = Counter[str]()
        self._subscriptions = set[Subscription]()
        self._producer: asyncio.Task[None] | None = None
        self._sections = Sections()
        self._encoded: tuple[str, str, bytes] = ("", "", b"")

    def __len__(self) -> int:
        return len(self._subscriptions)

    async def now(self, mark: str) -> dict[str, object]:
        """Return the sections changed after `mark`, for clients that poll."""
        self._sections.update(await self._read())
        return {"mark": self._sections.mark, "sections": self._sections.since(mark)}

    def subscribe(self, address: str) -> Subscription:
        """Reserve a stream for `address`, to be released by `unsubscribe`; raises TooManyRequests."""
        network = network_of(address)
        if self._by_network[network] >= self._limits.per_address or len(self._subscriptions) >= self._limits.streams:
            raise TooManyRequests("Too many open streams.", retry_after_seconds=RETRY_AFTER_SECONDS)
        subscription = Subscription(network)
        self._by_network[network] += 1
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Release a stream; idempotent. The last one stops the producer."""
        if subscription not in self._subscriptions:
            return
        self._subscriptions.discard(subscription)
        self._by_network -= Counter((subscription.network,))
        if not self._subscriptions and self._producer is not None:
            self._producer.cancel()
            self._producer = None

    async def stream(self, subscription: Subscription, *, mark: str) -> AsyncIterator[bytes]:
        """Yield the sections changed after `mark`, then further changes, until the time limit or shutdown."""
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
        ends = time.monotonic() + self._longest
        yield f"retry: {RETRY_MS}\n\n".encode()
        while time.monotonic() < ends and not self._shutdown.requested:
            subscription.woken.clear()
            newest = self._sections.mark
            if self._sections.revision and newest != mark:
                # Advance only to the state sent: there may be a newer one once the client has read this.
                yield self._message(mark)
                mark = newest
                continue
            try:
                await asyncio.wait_for(self._shutdown.wait_for(subscription.woken), self._heartbeat)
            except TimeoutError:
                yield b": still here\n\n"

    async def _produce(self) -> None:
        while True:
            try:
                changed = self._sections.update(await self._read())
            except Exception as error:
                # The database may be back at the next tick.
                defect = error if not is_away(error) else None
                log.warning("dashboard not updated, retrying in %.1f s: %s", self._tick, advice(error), exc_info=defect)
                changed = False
            if changed:
                for subscription in self._subscriptions:
                    subscription.woken.set()
            await asyncio.sleep(self._tick)

    def _message(self, mark: str) -> bytes:
        """Encode the event with the sections changed after `mark`; cached, as most clients have the same mark."""
        if self._encoded[:2] != (mark, self._sections.mark):
            data = json.dumps(self._sections.since(mark), separators=(",", ":"))
            event = f"id: {self._sections.mark}\nevent: sections\ndata: {data}\n\n".encode()
            self._encoded = (mark, self._sections.mark, event)
        return self._encoded[2]
