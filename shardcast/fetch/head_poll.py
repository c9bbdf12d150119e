"""Poll several sources for a newer head, of which any may hang, lag, or withhold it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable

from shardcast.errors import Equivocation, LocalFault, PeerFault, ShardcastError, TooSlow, Unreachable
from shardcast.fetch.hedging import STAGGER_S
from shardcast.fetch.sources import Sources
from shardcast.manifest import Head

HEAD_SOURCES = 3
"""Sources polled at once, of those that answer: a single one could withhold a head."""
GRACE_S = 1.0
"""For answers to requests that waited until the deadline."""
LAST_RESORT_EVERY_S = 60.0
"""How often a source of last resort is asked, whatever others say: together they could withhold a head while the one
before it is fresh."""

AskHead = Callable[[str, int, float], Awaitable[Head | ShardcastError]]
"""Ask a URL for a verified head above a version, waiting up to so many seconds for it."""


class HeadPoll:
    """Polls `sources` through `ask`; each request waits up to `poll_s` for news."""

    def __init__(self, sources: Sources, ask: AskHead, *, poll_s: float) -> None:
        self._sources, self._ask, self._poll_s = sources, ask, poll_s
        self._ask_last_resort_at = 0.0

    async def wait(self, after: int, timeout_s: float) -> Head | None:
        """Return the first head above `after`; None if the newest one shown within `timeout_s` is not newer.

        HEAD_SOURCES are asked, the most promising first, and further ones for as long as fewer than that answer.
        Raises Equivocation at once, and otherwise the most telling error if no source showed a fresh head.
        """
        return await _Round(self._sources, self._ask, self._poll_s, after, timeout_s).run(self._due_last_resort())

    def _due_last_resort(self) -> str | None:
        now, urls = time.monotonic(), self._sources.last_resort
        if not urls or now < self._ask_last_resort_at:
            return None
        self._ask_last_resort_at = now + LAST_RESORT_EVERY_S * random.uniform(0.5, 1.5)
        return random.choice(urls)


class _Round:
    """One wait for a head."""

    def __init__(self, sources: Sources, ask: AskHead, poll_s: float, after: int, timeout_s: float) -> None:
        self._ask, self._poll_s, self._after, self._timeout_s = ask, poll_s, after, timeout_s
        self._deadline = time.monotonic() + timeout_s
        urls = sources.by_promise(time.monotonic())
        if len(urls) > HEAD_SOURCES:  # one at random: those that are always the best could withhold a head together
            urls.insert(HEAD_SOURCES - 1, urls.pop(random.randrange(HEAD_SOURCES - 1, len(urls))))
        self._waiting = deque(urls)
        self._watchers = dict[asyncio.Task[Head], str]()
        self._prompt = set[str]()
        self._fresh, self._errors = False, list[ShardcastError]()

    async def run(self, last_resort: str | None) -> Head | None:
        if not self._waiting:
            raise Unreachable("no source to poll for a head: configure at least one", code="no_sources")
        try:
            if last_resort is not None:
                self._watch(last_resort, until=time.monotonic())
            while self._waiting or self._watchers:
                self._watch_more()
                left_s = self._deadline + GRACE_S - time.monotonic()
                if left_s <= 0:
                    break
                pause_s = min(STAGGER_S, left_s) if self._waiting and self._wanted > 0 else left_s
                done, _ = await asyncio.wait(self._watchers, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                for watcher in done:
                    if (head := self._outcome(watcher)) is not None:
                        return head
        finally:
            for watcher in self._watchers:
                watcher.cancel()
            await asyncio.gather(*self._watchers, return_exceptions=True)
        if self._fresh:
            return None
        self._errors.append(TooSlow(f"no source showed a head within {self._timeout_s:.0f} s"))
        raise next((error for error in self._errors if isinstance(error, PeerFault)), self._errors[0])

    @property
    def _wanted(self) -> int:
        return HEAD_SOURCES - len(self._prompt)

    def _watch_more(self) -> None:
        if time.monotonic() >= self._deadline and self._watchers:
            self._waiting.clear()
        for _ in range(min(self._wanted, len(self._waiting))):
            self._watch(self._waiting.popleft(), until=self._deadline)

    def _watch(self, url: str, *, until: float) -> None:
        self._watchers[asyncio.create_task(self._poll(url, until))] = url

    def _outcome(self, watcher: asyncio.Task[Head]) -> Head | None:
        """Return a newer head; note anything else."""
        self._prompt.discard(self._watchers.pop(watcher))
        try:
            head = watcher.result()
        except (Equivocation, LocalFault):
            raise
        except ShardcastError as error:
            self._errors.append(error)
            return None
        self._fresh = True
        return head if head.version > self._after else None

    async def _poll(self, url: str, until: float) -> Head:
        """Poll one source until it shows a version above `after` or the deadline passes; return its last head.

        The first request does not wait for news, so that a source that hangs differs from one without any.
        """
        attempt, patience_s = 0, 0.0
        while True:
            polled_at = time.monotonic()
            wait_s = max(0.0, min(patience_s, until - polled_at))
            patience_s = self._poll_s
            outcome = await self._ask(url, self._after, wait_s)
            if isinstance(outcome, Head):
                self._prompt.add(url)
            if isinstance(outcome, Equivocation | LocalFault):
                raise outcome
            if isinstance(outcome, Head) and outcome.version > self._after:
                return outcome
            # A source that answers a long poll at once without news must not make this loop spin.
            waited = time.monotonic() - polled_at > wait_s / 2
            attempt = 0 if waited else min(attempt + 1, 10)
            pause_s = 0.0 if waited else min(2.0, 0.05 * 2**attempt)
            if time.monotonic() + pause_s >= until:
                if isinstance(outcome, ShardcastError):
                    raise outcome
                return outcome
            await asyncio.sleep(pause_s)
