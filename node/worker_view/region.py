"""Lines at the bottom of a terminal that are drawn over themselves, and log lines that scroll away above them.

It writes what any terminal since the VT100 understands: cursor up, and erase to the end of the line. The cursor stays
visible and no mode is set, so that a process that is killed leaves a terminal that works. A terminal that is gone is
written to no more; nothing here raises because of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOBase
from typing import TextIO, cast

from node.broadcast.progress import logging_to

_UP, _ERASE_LINE = "\x1b[{}A", "\x1b[K"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the view: what to write, and how many columns that takes."""

    text: str
    cells: int


class Region:
    """The lines of one view. Any thread may `say`; one draws."""

    def __init__(self, stream: TextIO) -> None:
        self.is_gone = False
        self._stream = stream
        self._lock = threading.RLock()
        self._rows: Sequence[Row] = ()

    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now; 80 and 24 where it does not say."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return 80, 24
        return columns or 80, lines or 24

    def draw(self, rows: Sequence[Row]) -> None:
        """Replace what is shown, unless another process has the terminal now."""
        with self._lock:
            if self._is_ours():
                self._write(self._cleared() + self._lines(rows))
                self._rows = rows

    def say(self, text: str) -> None:
        """Write one line or several above what is shown."""
        with self._lock:
            self._write(f"{self._cleared()}{text}\n{self._lines(self._rows)}")

    def forget(self) -> None:
        """What is shown stays as it is, and the next lines come below: after the terminal was somebody else's."""
        with self._lock:
            self._rows = ()

    @contextmanager
    def taking_output(self) -> Iterator[None]:
        """While the block is active, what is logged and printed appears above what is shown."""
        above = _Above(self, self._stream)
        before = sys.stdout, sys.stderr
        sys.stderr = cast("TextIO", above)
        if sys.stdout.isatty():
            sys.stdout = sys.stderr
        try:
            with logging_to(sys.stderr):
                yield
        finally:
            sys.stdout, sys.stderr = before
            above.end()

    def _cleared(self) -> str:
        """Erases what is shown, and goes where it began. It has more lines by now if the terminal has become narrower.

        Line by line: what erases all below the cursor makes some terminals (tmux) keep it in their history.
        """
        columns, lines = self.size()
        taken = min(sum(max(1, -(-row.cells // columns)) for row in self._rows), lines - 1)
        up = _UP.format(taken) if taken else ""
        return "\r" + up + f"{_ERASE_LINE}\n" * taken + up + _ERASE_LINE

    @staticmethod
    def _lines(rows: Sequence[Row]) -> str:
        return "".join(f"{row.text}\n" for row in rows)

    def _write(self, text: str) -> None:
        if self.is_gone:
            return
        try:
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            self.is_gone = True

    def _is_ours(self) -> bool:
        """Whether this process is in the terminal's foreground; where it has no say in that, it is."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return True


class _Above(TextIOBase):
    """A stream whose whole lines go above a region."""

    def __init__(self, region: Region, stream: TextIO) -> None:
        self._region, self._stream, self._begun = region, stream, ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline:
                self._region.say(whole)
        return len(text)

    def flush(self) -> None:
        """Whole lines are written at once; what is not one yet waits."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def end(self) -> None:
        """Write what has no line end yet."""
        if self._begun:
            self.write("\n")
