"""A command on a real pseudo-terminal, and what a person sees there: for tests of what is drawn over itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Mapping

from locations import ROOT

WAIT_SECONDS = 120.0
BETWEEN_FRAMES = 0.02
"""Seconds without a byte after which a view has been drawn to its end."""
_PIECES = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|([\r\n])|([^\r\n\x1b]+)")


class Screen:
    """Lines of a terminal, with as many above them as have scrolled away; `columns` wide, without colours.

    It knows what this project's views write (cursor up, erase to the end of the line or of the screen), and fails at
    anything else. When it becomes narrower, lines are folded as most terminals do it.
    """

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.height = columns, lines
        self._lines: list[list[str]] = [[]]
        self._wrapped: set[int] = set()
        self._row = self._column = 0

    @property
    def text(self) -> list[str]:
        """Every line since the beginning, without what is empty at the end."""
        lines = ["".join(line).rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def resize(self, columns: int, lines: int) -> None:
        """Fold what is wider now."""
        folded: list[list[str]] = []
        row = 0
        for index, line in enumerate(self._lines):
            pieces = [line[at : at + columns] for at in range(0, len(line), columns)] or [[]]
            if index == self._row:
                row = len(folded) + len(pieces) - 1
            folded += pieces
        self.columns, self.height, self._lines, self._row = columns, lines, folded, row

    def write(self, text: str) -> None:
        """What arrives from the command."""
        at = 0
        for piece in _PIECES.finditer(text):
            assert piece.start() == at, repr(text[at : piece.start()])
            at = piece.end()
            given, final, control, plain = piece.groups()
            if final is not None:
                self._control(given, final)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._down()
            else:
                self._put(plain)
        assert at == len(text), repr(text[at:])

    def _control(self, given: str, final: str) -> None:
        line = self._lines[self._row]
        if final == "A":
            top = max(0, len(self._lines) - self.height)
            self._row = max(top, self._row - int(given or 1))
        elif final == "K" and given in ("", "0"):
            del line[self._column :]
        elif final == "K" and given == "2":
            line.clear()
        elif final == "J" and given in ("", "0"):
            del line[self._column :], self._lines[self._row + 1 :]
        else:
            assert final in "mhl", f"ESC [ {given} {final}"

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append([])

    def _put(self, plain: str) -> None:
        for character in plain:
            if self._column == self.columns:
                self._column = 0
                self._down()
            line = self._lines[self._row]
            line += " " * (self._column + 1 - len(line))
            line[self._column] = character
            self._column += 1


class Terminal:
    """A command on a terminal that it leads; `seen` has all that it wrote there, without what moves the cursor."""

    def __init__(
        self, *command: str, columns: int = 100, lines: int = 30, environment: Mapping[str, str] | None = None
    ) -> None:
        self._near, far = pty.openpty()
        termios.tcsetwinsize(far, (lines, columns))
        surely = {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
        # readline, which pytest loads, sets the size in the environment of what pytest-xdist starts.
        other = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}
        inherited = {name: value for name, value in os.environ.items() if name not in other}
        self.process = subprocess.Popen(
            ("setsid", "--ctty", *command),
            stdout=far,
            stderr=far,
            stdin=far,
            cwd=ROOT,
            env=inherited | surely | dict(environment or {}),
        )
        os.close(far)
        self.screen = Screen(columns, lines)
        self.written = b""
        self._unread = b""

    @property
    def seen(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.written.decode(errors="replace"))

    @property
    def lines(self) -> list[str]:
        """What stood at the beginning of a line, whether it was rewritten or not."""
        return [line.rstrip() for line in re.split(r"[\r\n]+", self.seen)]

    def resize(self, columns: int, lines: int) -> None:
        """In a moment in which nothing is on its way."""
        while select.select([self._near], [], [], 0.04)[0] and self._read():
            pass
        self.screen.resize(columns, lines)
        termios.tcsetwinsize(self._near, (lines, columns))

    def press(self, keys: str) -> None:
        """Type; Ctrl-C is "\\x03"."""
        os.write(self._near, keys.encode())

    def hang_up(self) -> None:
        """The terminal goes away, as when its window is closed."""
        os.close(self._near)

    async def until(self, pattern: str) -> None:
        """Until it has written that at some time."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not re.search(pattern, self.seen):
            assert await asyncio.to_thread(self._is_readable, deadline), self.seen
            assert self._read(), self.seen

    async def until_shown(self, pattern: str) -> str:
        """Until its screen shows that; returns all of it, with what has scrolled away."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not re.search(pattern, shown := "\n".join(self.screen.text)):
            assert await asyncio.to_thread(self._is_readable, deadline), shown
            assert await asyncio.to_thread(self._read_frame), shown
        return shown

    async def ended(self) -> str:
        """Until it has ended by itself; returns what its screen shows then."""
        while await asyncio.to_thread(self._read):
            pass
        await asyncio.to_thread(self.process.wait, 20)
        return "\n".join(self.screen.text)

    def end(self) -> str:
        self.process.terminate()
        while self._read():
            pass
        self.process.wait(20)
        os.close(self._near)
        return self.seen

    def kill(self) -> None:
        """Whatever the test left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._near)

    def _is_readable(self, deadline: float) -> bool:
        return bool(select.select([self._near], [], [], max(0.0, deadline - time.monotonic()))[0])

    def _read(self) -> bool:
        with contextlib.suppress(OSError):  # the terminal is gone when the process is
            data = os.read(self._near, 4096)
            self.written += data
            self._show(data)
            return bool(data)
        return False

    def _read_frame(self) -> bool:
        """Read on while there is more: a view that is half drawn is not what a person sees."""
        going_on = self._read()
        while going_on and select.select([self._near], [], [], BETWEEN_FRAMES)[0]:
            going_on = self._read()
        return going_on

    def _show(self, data: bytes) -> None:
        """Draw what is whole: a character or a control sequence may have been cut."""
        data = self._unread + data
        cut = data.rfind(b"\x1b")
        whole = len(data) if cut < 0 or re.match(rb"\x1b\[[0-9;?]*[a-zA-Z]", data[cut:]) else cut
        while whole and data[whole - 1] >= 0x80 and len(data) - whole < 4:
            try:
                data[:whole].decode()
                break
            except UnicodeDecodeError:
                whole -= 1
        self._unread = data[whole:]
        self.screen.write(data[:whole].decode(errors="replace"))
