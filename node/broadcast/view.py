"""What a person sees of a fetch: a bar on a terminal, a line now and then elsewhere; and JSON for programs.

Progress goes to stderr; stdout has one line for each version that is here.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from node.broadcast.fetching import Report, Result
from shardcast import Progress as Fetching

LINE_SECONDS = 5.0
BAR_WIDTH = 24


class FetchView:
    """For a terminal if stderr is one, else for a log; with `as_json` for a program, which sees results only."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = Console(stderr=True)

    def fetching(self, version: int) -> AbstractContextManager[Report]:
        """Gives what is to be called with the progress of a fetch."""
        if self._console.is_terminal and not self._as_json:
            return _bar(self._console, version)
        return _lines(version, silent=self._as_json)

    def here(self, result: Result) -> None:
        """Write what was got to stdout."""
        click.echo(json.dumps(asdict(result)) if self._as_json else _sentence(result))


def _sentence(result: Result) -> str:
    what = f"version {result.version} is in {result.path}: {decimal(result.size_bytes)}"
    if not result.transferred_bytes:
        return f"{what}, which was here already"
    how = "as a delta" if result.way == "delta" else "in full"
    rate = decimal(int(result.transferred_bytes / max(result.seconds, 1e-3)))
    return f"{what}; {decimal(result.transferred_bytes)} transferred {how} in {result.seconds:.1f} s, {rate}/s"


def _details(progress: Fetching) -> str:
    sources = f"{progress.sources} source{'' if progress.sources == 1 else 's'}"
    left = "" if progress.seconds_left is None else f"  {_clock(progress.seconds_left)} left"
    return f"{decimal(int(progress.bytes_per_s))}/s  {sources}{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


@contextmanager
def _lines(version: int, *, silent: bool) -> Iterator[Report]:
    last = time.monotonic()

    def report(progress: Fetching) -> None:
        nonlocal last
        if not silent and time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            share = progress.done_bytes / progress.total_bytes
            size = decimal(progress.total_bytes)
            click.echo(f"version {version}: {share:.0%} of {size}, {_details(progress)}", err=True)

    yield report


@contextmanager
def _bar(console: Console, version: int) -> Iterator[Report]:
    """A bar that leaves no trace; log lines appear above it."""
    columns = (TextColumn("{task.description}"), BarColumn(BAR_WIDTH), TextColumn("{task.fields[details]}"))
    with Progress(*columns, console=console, transient=True) as bar, _logging_to_stderr():
        task = bar.add_task(f"version {version}", total=None, details="looking at what is here")

        def report(progress: Fetching) -> None:
            finished = progress.done_bytes >= progress.total_bytes
            share = f"{progress.done_bytes / progress.total_bytes:.0%} of {decimal(progress.total_bytes)}"
            bar.update(
                task,
                completed=progress.done_bytes,
                total=progress.total_bytes,
                details="putting it together" if finished else f"{share}  {_details(progress)}",
            )

        yield report


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Log to what sys.stderr is now, which rich has replaced, so that lines do not run into the bar."""
    handlers = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)
