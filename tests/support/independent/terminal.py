"""A terminal as a function of the sequence's code points (section 4.9)."""

from __future__ import annotations

Cell = tuple[int, int, int]
EMPTY: Cell = (0, 0, 0)
MOVES = {104: (0, -1), 106: (1, 0), 107: (-1, 0), 108: (0, 1)}


class Terminal:
    """A screen of `rows` by `columns` cells of (code point, foreground, background), with a place and a phase."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.screen = [[EMPTY] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.phase = "text"

    def feed(self, u: int) -> None:
        """Take the code point of the next token."""
        if (u < 32 and u != 10) or self.phase == "ended":
            return
        if self.phase == "keys":
            self._key(u)
        elif u != 10:
            self._print(u)
        elif self.phase == "text":
            self.row, self.column, self.phase = self.row + 1, 0, "line"
        else:
            self._begin()

    def _print(self, u: int) -> None:
        self.phase = "text"
        if self.row == self.rows:
            self.screen = [*self.screen[1:], [EMPTY] * self.columns]
            self.row = self.rows - 1
        if self.column < self.columns:
            self.screen[self.row][self.column] = (u, 1, 0)
            self.column += 1

    def _begin(self) -> None:
        cells = ((row, column) for row in range(self.rows) for column in range(self.columns))
        self.row, self.column = next(((r, c) for r, c in cells if self.screen[r][c][0] == 64), (-1, -1))
        if self.row < 0:
            self.row = self.column = 0
        else:
            self.screen[self.row][self.column] = (32, 1, 0)
        self.phase = "keys"

    def _key(self, u: int) -> None:
        if u == 10:
            self.phase = "ended"
        elif u in MOVES:
            row, column = self.row + MOVES[u][0], self.column + MOVES[u][1]
            inside = 0 <= row < self.rows and 0 <= column < self.columns
            if inside and self.screen[row][column] != EMPTY:
                self.row, self.column = row, column
        else:
            self.screen[self.row][self.column] = (u, 2, 0)

    def frame(self) -> list[list[Cell]]:
        """Return what is seen."""
        if self.phase in ("text", "line"):
            return [[EMPTY] * self.columns for _ in range(self.rows)]
        seen = [[EMPTY if cell[0] == 32 else cell for cell in line] for line in self.screen]
        if self.phase == "keys":
            code, foreground, _ = seen[self.row][self.column]
            seen[self.row][self.column] = (code, foreground, 1)
        return seen
