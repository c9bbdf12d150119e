"""A live display at the bottom of a terminal (rich.live); logs and prints scroll away above it.

The cursor stays visible and no terminal mode is set, so that a killed process leaves a working terminal. A closed
terminal raises nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import TextIOBase
from types import TracebackType
from typing import IO, Self, TextIO, cast

from rich.console import Console, ConsoleRenderable, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment, SegmentLines

from node.runtime.logs import is_json

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], *, min_span: float) -> str:
    """Draw values as bars over their span, of at least `min_span`: smaller differences do not fill its height."""
    low = min(values, default=0.0)
    span = max(max(values, default=0.0) - low, min_span)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def supports_live_display(stream: IO[str]) -> bool:
    """Return whether to draw on `stream`: it is a terminal that can move its cursor, and the log is not JSON."""
    return Console(file=stream).is_interactive and not is_json()


class LiveDisplay(Live):
    """Draw renderables at the bottom of the terminal `stream` until the context manager is left; the last one stays.

    Meanwhile, whatever any thread logs, or prints to a terminal, appears above. `update(renderable, refresh=True)`
    draws; with `auto_refresh`, the present renderable is drawn again four times a second.
    """

    def __init__(self, stream: IO[str], *, auto_refresh: bool = False) -> None:
        self._stream = _Stream(stream)
        self._cells: list[int] = []
        self._open = ExitStack()
        super().__init__(
            console=_Console(cast("TextIO", self._stream)),
            auto_refresh=auto_refresh,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        super().__enter__()
        self._open.enter_context(_logging_to(sys.stderr))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        super().__exit__(kind, error, trace)

    def refresh(self) -> None:
        """Draw again, unless another process is in the terminal's foreground."""
        if self._stream.is_foreground():
            super().refresh()

    def forget(self) -> None:
        """Draw below the present output from now on: another process used the terminal meanwhile."""
        self._cells = []

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Print `renderables` in place of what is shown, then the display below; called with the console locked."""
        erase = self._erase()
        shown = self._lines(self.get_renderable())
        self._cells = [Segment.get_line_length(line) for line in shown]
        return [erase, *renderables, SegmentLines(shown, new_lines=True)]

    def _lines(self, renderable: RenderableType) -> list[list[Segment]]:
        """Render the lines of `renderable` that the terminal has room for, above the one that the cursor is on."""
        if renderable == "":
            return []
        return self.console.render_lines(renderable, pad=False)[: max(1, self.console.height - 1)]

    def _erase(self) -> Control:
        """Move the cursor to where the display begins, erasing it line by line.

        It has more lines than rich counts if the terminal has become narrower since. Erasing all below the cursor at
        once would make some terminals (tmux) keep it in their history.
        """
        columns, lines = self.console.size
        taken = min(sum(max(1, -(-cells // columns)) for cells in self._cells), lines - 1)
        up_and_erase = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
        return Control(ControlType.CARRIAGE_RETURN, *(up_and_erase * taken))


class _Console(Console):
    """A console with atomic prints across threads that never hides the cursor."""

    def __init__(self, stream: TextIO) -> None:
        self._whole = threading.RLock()
        super().__init__(file=stream, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._whole.acquire()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._whole.release()

    def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002  (as rich calls it)
        return False


class _Stream(TextIOBase):
    """A terminal's stream that replaces unencodable characters, and discards everything after the first error."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if not self._is_gone:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
                self._stream.flush()
            except (OSError, ValueError):
                self._is_gone = True
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write is flushed."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def is_foreground(self) -> bool:
        """Return whether this process is in the terminal's foreground; True where the system cannot say."""
        try:
            return os.tcgetpgrp(self.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return True


@contextmanager
def _logging_to(stream: TextIO) -> Iterator[None]:
    """Log to `stream` while the block is active: handlers hold the stream that was stderr when logging was set up."""
    handlers = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
    before = [handler.setStream(stream) for handler in handlers]
    try:
        yield
    finally:
        for handler, former in zip(handlers, before, strict=True):
            if former is not None:
                handler.setStream(former)
