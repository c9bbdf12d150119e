"""How far fetches are, for people: a line for each on a terminal, rewritten while it changes; log lines elsewhere.

It goes to stderr, for `veriswarm fetch` and `relay`; on a terminal a worker has a view of its own
(`node.worker_view`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from node.logs import is_json
from shardcast import Progress as Fetching
from shardcast import Report

log = logging.getLogger(__name__)

LINE_SECONDS = 5.0
BAR_WIDTH = 24


class FetchProgress:
    """Any number of fetches at once, of one event loop.

    `say` writes a line where stderr is no terminal, or without `bars`; None writes none.
    """

    def __init__(self, say: Callable[[str], None] | None = log.info, *, bars: bool = True) -> None:
        self._say = say
        self._has_bars = bars
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._shown = 0
        self._opened = ExitStack()

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Gives what is to be called with the progress of a fetch."""
        if self._say is None:
            return nullcontext()
        is_terminal = self._console.is_interactive and not is_json()
        return self._bar(version) if is_terminal and self._has_bars else _lines(version, self._say)

    @contextmanager
    def _bar(self, version: int) -> Iterator[Report]:
        """A bar that leaves no trace; log lines appear above it."""
        bars = self._open()
        task = bars.add_task(f"version {version}", total=None, details="looking at what is here")

        def report(progress: Fetching) -> None:
            finished = progress.done_bytes >= progress.total_bytes
            bars.update(
                task,
                completed=progress.done_bytes,
                total=progress.total_bytes,
                details="putting it together" if finished else f"{_share(progress)}  {_details(progress)}",
            )

        try:
            yield report
        finally:
            bars.remove_task(task)
            self._shown -= 1
            if not self._shown:
                self._opened.close()
                self._bars = None

    def _open(self) -> Progress:
        """What all bars are in: a terminal has one place where lines are rewritten."""
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(BAR_WIDTH), TextColumn("{task.fields[details]}"))
            bars = Progress(*columns, console=self._console, transient=True)
            self._bars = self._opened.enter_context(bars)
            self._opened.enter_context(logging_to(sys.stderr))
        self._shown += 1
        return self._bars


@contextmanager
def _lines(version: int, say: Callable[[str], None]) -> Iterator[Report]:
    last = time.monotonic()

    def report(progress: Fetching) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            say(f"version {version}: {_share(progress)}, {_details(progress)}")

    yield report


def _share(progress: Fetching) -> str:
    return f"{progress.done_bytes / progress.total_bytes:.0%} of {decimal(progress.total_bytes)}"


def _details(progress: Fetching) -> str:
    sources = f"{progress.sources} source{'' if progress.sources == 1 else 's'}"
    left = "" if progress.seconds_left is None else f"  {clock(progress.seconds_left)} left"
    return f"{decimal(int(progress.bytes_per_s))}/s  {sources}{left}"


def clock(seconds: float) -> str:
    """Hours where there are any, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


@contextmanager
def logging_to(stream: TextIO) -> Iterator[None]:
    """Log there while the block is active, so that lines do not run into what is drawn over itself."""
    handlers = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
    before = [handler.setStream(stream) for handler in handlers]
    try:
        yield
    finally:
        for handler, former in zip(handlers, before, strict=True):
            if former is not None:
                handler.setStream(former)
