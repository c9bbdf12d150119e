"""Progress of fetches on stderr: bars on a terminal, log lines elsewhere.

For `swarmproof fetch` and `relay`; a worker on a terminal has its own view (`node.worker.view`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from node.runtime.terminal import LiveDisplay, supports_live_display
from shardcast import Report
from shardcast import VersionProgress as Fetching

log = logging.getLogger(__name__)

LINE_SECONDS = 5.0
BAR_WIDTH = 24


class FetchProgress:
    """Progress of concurrent fetches in one event loop; `say` writes a line where there are no bars (None: nothing)."""

    def __init__(self, say: Callable[[str], None] | None = log.info, *, bars: bool = True) -> None:
        self._say = say
        self._has_bars = bars
        self._bars: Progress | None = None
        self._display = ExitStack()

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Context manager around one fetch; yields its progress callback."""
        if self._say is None:
            return nullcontext()
        return (
            self._bar(version) if self._has_bars and supports_live_display(sys.stderr) else _lines(version, self._say)
        )

    @contextmanager
    def _bar(self, version: int) -> Iterator[Report]:
        """Show a progress bar while the block is active."""
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
            if not bars.tasks:
                self._display.close()
                self._bars = None

    def _open(self) -> Progress:
        """Return the display that all bars share, opening it for the first one."""
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(BAR_WIDTH), TextColumn("{task.fields[details]}"))
            self._bars = Progress(*columns)
            display = self._display.enter_context(LiveDisplay(sys.stderr, auto_refresh=True))
            display.update(self._bars)
            self._display.callback(display.update, "")
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
    """Format a duration as [h:]m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
