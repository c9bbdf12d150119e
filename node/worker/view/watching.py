"""Reporters of a worker's events and status: live view, log lines, or JSON."""

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

from rich.console import Group

from node.broadcast.progress import FetchProgress
from node.client.http import page_of, printable
from node.runtime.terminal import LiveDisplay, supports_live_display
from node.worker.events import KEYS, EventKind, Observer, Status
from node.worker.view.account import SessionTally
from node.worker.view.render import Frame, final_summary, line, rows
from shardcast import Report, no_watch

log = logging.getLogger(__name__)

SUMMARY_SECONDS: Final = 60.0
DRAW_SECONDS: Final = 1.0
NOTE_AFTER_SECONDS: Final = 5.0
"""After so long in one activity, the view says since when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """The worker that a report is about."""

    run_id: str
    node: str
    coordinators: Sequence[str]


@contextlib.asynccontextmanager
async def observe_worker(identity: WorkerIdentity, *, as_json: bool, stop: asyncio.Event) -> AsyncIterator[Observer]:
    """Report on a worker while the block is active: as JSON, on a terminal, or in the log.

    Raises OSError at the end of the block if the JSON could not be written.
    """
    async with contextlib.AsyncExitStack() as stack:
        reporter: Reporter
        if as_json:
            reporter = JsonReporter(identity, sys.stdout, stop=stop)
        elif supports_live_display(sys.stderr):
            reporter = stack.enter_context(LiveReporter(identity))
        else:
            reporter = LogReporter(identity)
        ticking = asyncio.create_task(reporter.run())
        try:
            yield reporter
        finally:
            ticking.cancel()
            await asyncio.wait({ticking})
            reporter.end()
        if isinstance(reporter, JsonReporter) and reporter.failure is not None:
            raise reporter.failure


class Reporter(Observer):
    """Counts events, polls the status for changes, and reports both."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self.identity = identity
        self.account = SessionTally()
        self._fetches = FetchProgress(bars=False)
        self._away_since: float | None = None
        self._summed_at = time.monotonic()
        self._ended = False

    def attach(self, status: Status) -> None:
        """Report that the worker has joined its run."""
        self.account.status = status
        now = status()
        self.notify(EventKind.JOINED, name=now["run_name"], coordinator=now["coordinator"])

    def notify(self, kind: EventKind, /, **keys: Any) -> None:
        """Count an event and report it."""
        self.account.count(kind, keys)
        if kind is EventKind.ENDED:
            self._ended = True
        if kind in (EventKind.SUMMARY, EventKind.ENDED):
            keys |= self.account.sums()
        self.report(kind, keys)

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Log the fetch's progress every few seconds."""
        return self._fetches.fetching(version)

    def report(self, kind: EventKind, keys: dict[str, Any]) -> None:
        """Report an event in this class's format."""
        raise NotImplementedError

    async def run(self) -> None:
        """Poll the worker's status; never returns."""
        while True:
            self.poll()
            await asyncio.sleep(DRAW_SECONDS)

    def poll(self) -> None:
        """Report what has changed since the last poll."""
        if self.account.status is not None:
            self._note_coordinator(self.account.status())
        if time.monotonic() - self._summed_at >= SUMMARY_SECONDS:
            self._summed_at = time.monotonic()
            self.notify(EventKind.SUMMARY)

    def end(self) -> None:
        """Report the worker's end, unless reported."""
        if not self._ended:
            self.notify(EventKind.ENDED, dismissed=None)

    def _note_coordinator(self, status: dict[str, Any]) -> None:
        away, since = status["coordinator_away"], self._away_since
        if away and since is None:
            self._away_since = time.monotonic()
            self.notify(EventKind.AWAY, coordinator=status["coordinator"])
        if not away and since is not None:
            self._away_since = None
            self.notify(EventKind.BACK, coordinator=status["coordinator"], seconds=round(time.monotonic() - since, 1))


class LogReporter(Reporter):
    """Logs summaries, which the worker's parts do not."""

    def report(self, kind: EventKind, keys: dict[str, Any]) -> None:
        """Log the events that a person would want to know an hour later."""
        if kind is EventKind.JOINED:
            log.info("in run %r, by %s", printable(keys["name"]), printable(keys["coordinator"]))
            log.info("this node's page: %s", printable(page_of(keys["coordinator"], self.identity.node)))
        elif kind is EventKind.SUMMARY:
            log.info("%s; %s", printable(keys["doing"]), line(keys))
        elif kind is EventKind.ENDED:
            log.info("ended after %.0f s: %s", keys["seconds"], line(keys))


class JsonReporter(Reporter):
    """Writes one JSON object a line; if the reader closes the stream, the worker is stopped.

    `failure` is then why the stream could not be written.
    """

    def __init__(self, identity: WorkerIdentity, stream: TextIO, *, stop: asyncio.Event) -> None:
        super().__init__(identity)
        self._stream, self._stop = stream, stop
        self._lock = threading.Lock()
        self.failure: OSError | None = None

    def report(self, kind: EventKind, keys: dict[str, Any]) -> None:
        """Write one event."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
        said: dict[str, Any] = {
            "event": kind.value,
            "time": moment,
            "run": self.identity.run_id,
            "node": self.identity.node,
        }
        said |= {key: keys.get(key) for key in KEYS[kind]}
        with self._lock:
            if self.failure is not None:
                return
            try:
                self._stream.write(json.dumps(said) + "\n")
                self._stream.flush()
            except OSError as error:
                self.failure = error
                log.warning("event stream closed by its reader (%s); stopping the worker", error.strerror)
                self._stop.set()


class LiveReporter(Reporter):
    """A live view at the bottom of a terminal, drawn once a second; use as a context manager."""

    def __init__(self, identity: WorkerIdentity) -> None:
        super().__init__(identity)
        self._display = LiveDisplay(sys.stderr)
        self._stack = contextlib.ExitStack()
        self._doing, self._doing_since = "", time.monotonic()
        self._sums: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        self._stack.enter_context(self._display)
        loop = asyncio.get_running_loop()
        for number, action in ((signal.SIGWINCH, self._draw), (signal.SIGCONT, self._resume)):
            loop.add_signal_handler(number, action)
            self._stack.callback(loop.remove_signal_handler, number)
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.update("")
        self._stack.close()
        if self._sums is not None:
            console = self._display.console
            console.print(Group(*final_summary(self._sums, console, columns=console.width)))

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Report no progress: the view reads the worker's status."""
        return no_watch(version)

    def report(self, kind: EventKind, keys: dict[str, Any]) -> None:
        """Redraw on events that change the view; the log has the others."""
        if kind is EventKind.ENDED:
            self._sums = keys
        if kind in (EventKind.JOINED, EventKind.AWAY, EventKind.BACK, EventKind.STOPPING):
            self._draw()

    def poll(self) -> None:
        """Report what has changed, and draw."""
        super().poll()
        self._draw()

    def _resume(self) -> None:
        self._display.forget()
        self._draw()

    def _draw(self) -> None:
        if self._ended:
            return
        columns, lines = self._display.console.size
        frame = self._frame(self.account.sums())
        drawn = rows(frame, self._display.console, columns=columns, lines=max(lines * 3 // 4, min(lines - 1, 10)))
        self._display.update(Group(*drawn), refresh=True)

    def _frame(self, sums: dict[str, Any]) -> Frame:
        status = {} if self.account.status is None else self.account.status()
        if sums["doing"] != self._doing:
            self._doing, self._doing_since = sums["doing"], time.monotonic()
        return Frame(
            run_id=self.identity.run_id,
            node=self.identity.node,
            coordinators=self.identity.coordinators,
            sums=sums,
            status=status,
            note=self._note(),
        )

    def _note(self) -> str:
        """Format since when it has been waiting; "" while it generates."""
        seconds = time.monotonic() - self._doing_since
        if seconds < NOTE_AFTER_SECONDS or self._doing.startswith("generating"):
            return ""
        return time.strftime("since %H:%M:%S", time.localtime(time.time() - seconds))
