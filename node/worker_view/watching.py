"""Who watches a worker for a person or a program: a live view, lines of the log, or JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self, TextIO

from rich.console import Console

from node.broadcast.progress import FetchProgress
from node.exchange import printable
from node.logs import is_json
from node.worker_events import KEYS, Kind, Onlooker, Status
from node.worker_view.account import Account
from node.worker_view.region import Region, Row
from node.worker_view.render import Frame, closing, line, rows
from shardcast import Report, unwatched

log = logging.getLogger(__name__)

SUMMARY_SECONDS: Final = 60.0
DRAW_SECONDS: Final = 1.0
NOTE_AFTER_SECONDS: Final = 5.0
"""For how long the worker has been doing the same is said after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Which worker is watched."""

    run_id: str
    node: str
    coordinators: Sequence[str]


@contextlib.asynccontextmanager
async def watching(watched: Watched, *, as_json: bool, stop: asyncio.Event) -> AsyncIterator[Onlooker]:
    """Watch a worker while the block is active: for a program, on a terminal, or in the log."""
    console = Console(stderr=True, highlight=False)
    async with contextlib.AsyncExitStack() as stack:
        teller: Teller
        if as_json:
            teller = JsonTeller(watched, sys.stdout, stop=stop)
        elif console.is_interactive and not is_json():
            teller = stack.enter_context(LiveTeller(watched, console))
        else:
            teller = LogTeller(watched)
        ticking = asyncio.create_task(teller.run())
        try:
            yield teller
        finally:
            ticking.cancel()
            await asyncio.wait({ticking})
            teller.end()


class Teller(Onlooker):
    """Counts what happens, notices what can only be seen by looking, and tells of both."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.account = Account()
        self._away_since: float | None = None
        self._summed_at = time.monotonic()
        self._ended = False

    def meet(self, status: Status) -> None:
        """The worker has joined its run."""
        self.account.status = status
        now = status()
        self.notice(Kind.JOINED, name=now["run_name"], coordinator=now["coordinator"])

    def notice(self, kind: Kind, /, **keys: Any) -> None:
        """Count it, and tell."""
        self.account.count(kind, keys)
        if kind is Kind.ENDED:
            self._ended = True
        if kind in (Kind.SUMMARY, Kind.ENDED):
            keys |= self.account.sums()
        self.tell(kind, keys)

    def tell(self, kind: Kind, keys: dict[str, Any]) -> None:
        """Say it in this teller's way."""
        raise NotImplementedError

    async def run(self) -> None:
        """Look again and again; never ends."""
        while True:
            self.look()
            await asyncio.sleep(DRAW_SECONDS)

    def look(self) -> None:
        """See what has changed since the last look."""
        if self.account.status is not None:
            self._note_coordinator(self.account.status())
        if time.monotonic() - self._summed_at >= SUMMARY_SECONDS:
            self._summed_at = time.monotonic()
            self.notice(Kind.SUMMARY)

    def end(self) -> None:
        """The worker has ended, on whichever way."""
        if not self._ended:
            self.notice(Kind.ENDED, dismissed=None)

    def _note_coordinator(self, status: dict[str, Any]) -> None:
        away, since = status["coordinator_away"], self._away_since
        if away and since is None:
            self._away_since = time.monotonic()
            self.notice(Kind.AWAY, coordinator=status["coordinator"])
        if not away and since is not None:
            self._away_since = None
            self.notice(Kind.BACK, coordinator=status["coordinator"], seconds=round(time.monotonic() - since, 1))


class LogTeller(Teller):
    """Adds to the log what the worker's parts do not say there themselves."""

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._fetches = FetchProgress(bars=False)

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """A line now and then."""
        return self._fetches.fetching(version)

    def tell(self, kind: Kind, keys: dict[str, Any]) -> None:
        """A line for what a person would want to know an hour later."""
        if kind is Kind.JOINED:
            log.info("in run %r, by %s", printable(keys["name"]), printable(keys["coordinator"]))
        elif kind is Kind.SUMMARY:
            log.info("%s; %s", printable(keys["doing"]), line(keys))
        elif kind is Kind.ENDED:
            log.info("ended after %.0f s: %s", keys["seconds"], line(keys))


class JsonTeller(Teller):
    """One object a line, for programs. When nobody reads any more, the worker is asked to end."""

    def __init__(self, watched: Watched, stream: TextIO, *, stop: asyncio.Event) -> None:
        super().__init__(watched)
        self._stream, self._stop = stream, stop
        self._fetches = FetchProgress(bars=False)
        self._lock = threading.Lock()
        self._is_closed = False

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """The log has a line now and then."""
        return self._fetches.fetching(version)

    def tell(self, kind: Kind, keys: dict[str, Any]) -> None:
        """Write one event."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
        said: dict[str, Any] = {
            "event": kind.value,
            "time": moment,
            "run": self.watched.run_id,
            "node": self.watched.node,
        }
        said |= {key: keys.get(key) for key in KEYS[kind]}
        with self._lock:
            if self._is_closed:
                return
            try:
                self._stream.write(json.dumps(said) + "\n")
                self._stream.flush()
            except OSError as error:
                self._is_closed = True
                log.warning("nobody reads the events any more (%s): ending", error.strerror)
                self._stop.set()


class LiveTeller(Teller):
    """A view that is drawn once a second at the bottom of a terminal; use as a context manager."""

    def __init__(self, watched: Watched, console: Console) -> None:
        super().__init__(watched)
        self._console = console
        self._region = Region(sys.stderr)
        self._stack = contextlib.ExitStack()
        self._doing, self._doing_since = "", time.monotonic()
        self._closing: list[Row] = []

    def __enter__(self) -> Self:
        self._stack.enter_context(self._region.taking_output())
        loop = asyncio.get_running_loop()
        for number, action in ((signal.SIGWINCH, self._draw), (signal.SIGCONT, self._resume)):
            loop.add_signal_handler(number, action)
            self._stack.callback(loop.remove_signal_handler, number)
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._region.draw([])
        for row in self._closing:
            self._region.say(row.text)
        self._stack.close()

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """The view takes it from the worker's status."""
        return unwatched(version)

    def tell(self, kind: Kind, keys: dict[str, Any]) -> None:
        """Draw what changes the picture; what the view does not show is in the log lines above it."""
        if kind is Kind.ENDED:
            self._closing = closing(keys, self._console, columns=self._region.size()[0])
        if kind in (Kind.JOINED, Kind.AWAY, Kind.BACK, Kind.STOPPING):
            self._draw()

    def look(self) -> None:
        """Draw, too."""
        super().look()
        self._draw()

    def _resume(self) -> None:
        self._region.forget()
        self._draw()

    def _draw(self) -> None:
        if self._region.is_gone or self._ended:
            return
        columns, lines = self._region.size()
        frame = self._frame(self.account.sums())
        self._region.draw(rows(frame, self._console, columns=columns, lines=max(lines * 3 // 4, min(lines - 1, 10))))

    def _frame(self, sums: dict[str, Any]) -> Frame:
        status = {} if self.account.status is None else self.account.status()
        if sums["doing"] != self._doing:
            self._doing, self._doing_since = sums["doing"], time.monotonic()
        return Frame(
            run_id=self.watched.run_id,
            node=self.watched.node,
            coordinators=self.watched.coordinators,
            sums=sums,
            status=status,
            note=self._note(),
        )

    def _note(self) -> str:
        """Since when it has been doing the same, where that says something."""
        seconds = time.monotonic() - self._doing_since
        if seconds < NOTE_AFTER_SECONDS or self._doing.startswith("generating"):
            return ""
        return time.strftime("since %H:%M:%S", time.localtime(time.time() - seconds))
