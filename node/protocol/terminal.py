"""The terminal of frame-based policies: a screen as a pure function of the tokens so far (docs/protocol.md, 4.9).

A program prints the prompt, unseen, until an empty line; from then on each token is a key that the policy pressed, and
the program answers it by changing the screen. Whoever has the tokens has the frames: nobody sends any. A screen has a
fixed size, a token changes it in bounded time, and no sequence of tokens is an error.

A cell is one number: its code point, its foreground * 2**16 and its background * 2**20. Needs no model and no torch,
because environments replay it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.int32]
"""Cells [rows, columns], each as one number."""

MAX_ROWS: Final = 64
MAX_COLUMNS: Final = 256
MAX_CODEPOINTS: Final = 2**16
"""Code points are below this: those of Unicode's basic plane."""
MAX_COLOURS: Final = 16
FOREGROUND_BIT: Final = 16
BACKGROUND_BIT: Final = 20
CODEPOINT: Final = 2**FOREGROUND_BIT - 1
BACKGROUND: Final = 15 << BACKGROUND_BIT
"""The bits of a cell that are its code point, and those that are its background."""

PRINTED, TYPED = 1, 2
"""Foregrounds: what the program wrote, and what a key did. An empty cell has 0."""
CURSOR: Final = 1
"""The background under the cursor; 0 elsewhere."""
LEAST_FOREGROUNDS, LEAST_BACKGROUNDS = 3, 2

ENTER = LINE_FEED = ord("\n")
START = ord("@")
SPACE = FIRST_VISIBLE = ord(" ")
"""Code points below are no characters; but for the line feed they change nothing."""
MOVES: Final = {ord("h"): (0, -1), ord("j"): (1, 0), ord("k"): (-1, 0), ord("l"): (0, 1)}
"""Keys that move the cursor, by so many rows and columns."""


class Phase(IntEnum):
    """What the next token is to the program: text, text at the beginning of a line, a key, or nothing any more."""

    TEXT = 0
    LINE = 1
    KEYS = 2
    ENDED = 3


@dataclass(slots=True)
class Terminal:
    """A screen and its program. While text is printed, the cursor is where the next character goes: `row` may be one
    below the screen and `column` one beside it.
    """

    screen: Cells
    row: int = 0
    column: int = 0
    phase: Phase = Phase.TEXT

    @staticmethod
    def blank(rows: int, columns: int) -> Terminal:
        """Return the terminal before the first token."""
        return Terminal(np.zeros((rows, columns), dtype=np.int32))

    @property
    def cursor(self) -> tuple[int, int]:
        """The cursor's row and column."""
        return self.row, self.column

    def feed(self, codepoint: int) -> None:
        """Apply a token with this code point; 0 for a token that is no character."""
        if codepoint < FIRST_VISIBLE and codepoint != LINE_FEED:
            return
        if self.phase is Phase.KEYS:
            self._press(codepoint)
        elif self.phase is not Phase.ENDED:
            self._print(codepoint)

    def frame(self) -> Cells:
        """Return a copy of what the policy sees: nothing during the text, then the screen, with its cursor until Enter.

        A space looks like an empty cell.
        """
        if self.phase in {Phase.TEXT, Phase.LINE}:
            return np.zeros_like(self.screen)
        seen = np.where((self.screen & CODEPOINT) == SPACE, np.int32(0), self.screen)
        if self.phase is Phase.KEYS:
            seen[self.row, self.column] |= CURSOR << BACKGROUND_BIT
        return seen

    def _print(self, codepoint: int) -> None:
        rows, columns = self.screen.shape
        if codepoint == LINE_FEED:
            if self.phase is Phase.LINE:
                self._begin()
            else:
                self.row, self.column, self.phase = self.row + 1, 0, Phase.LINE
            return
        self.phase = Phase.TEXT
        if self.row == rows:
            self.screen[:-1] = self.screen[1:].copy()
            self.screen[-1] = 0
            self.row -= 1
        if self.column < columns:
            self.screen[self.row, self.column] = codepoint | PRINTED << FOREGROUND_BIT
            self.column += 1

    def _begin(self) -> None:
        """Start the keys phase: the cursor goes to the first `@`, which becomes a space, or else to the first cell."""
        marks = np.flatnonzero((self.screen & CODEPOINT) == START)
        if len(marks):
            self.screen.flat[marks[0]] = SPACE | PRINTED << FOREGROUND_BIT
        self.row, self.column = divmod(int(marks[0]) if len(marks) else 0, self.screen.shape[1])
        self.phase = Phase.KEYS

    def _press(self, codepoint: int) -> None:
        if codepoint == ENTER:
            self.phase = Phase.ENDED
        elif codepoint in MOVES:
            down, right = MOVES[codepoint]
            self._move(self.row + down, self.column + right)
        else:
            self.screen[self.row, self.column] = codepoint | TYPED << FOREGROUND_BIT

    def _move(self, row: int, column: int) -> None:
        """Move the cursor if the target is a non-empty cell of the screen."""
        rows, columns = self.screen.shape
        if 0 <= row < rows and 0 <= column < columns and self.screen[row, column]:
            self.row, self.column = row, column
