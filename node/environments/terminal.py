"""Terminal with a cursor and a target, for a policy that sees frames (docs/protocol.md, section 4.9)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from node.environments.base import Problem, draws
from node.protocol.terminal import MAX_CODEPOINTS, Phase, Terminal

MAX_KEYS: Final = 64
"""Evaluated keys per completion; one that needs more earns nothing."""


class TerminalTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Move the cursor from `@` to `*` in an empty field, then press Enter.

    The prompt is the field, line by line, and an empty line. Keys are `h`, `j`, `k`, `l`, and a line feed for Enter. A
    completion is replayed by the terminal the policy sees, on a screen of the field's size.
    """

    name: ClassVar[str] = "terminal"
    rows: Annotated[int, Meta(ge=2, le=16)] = 4
    columns: Annotated[int, Meta(ge=2, le=64)] = 8

    def problem(self, index: int) -> Problem:
        numbers = draws(self.name, index)
        cells = self.rows * self.columns
        start = next(numbers) % cells
        target = (start + 1 + next(numbers) % (cells - 1)) % cells
        field = [" "] * cells
        field[start], field[target] = "@", "*"
        lines = ["".join(field[at : at + self.columns]) for at in range(0, cells, self.columns)]
        where = {"start": divmod(start, self.columns), "target": divmod(target, self.columns)}
        return Problem("\n".join(lines) + "\n\n", where)

    def reward(self, problem: Problem, completion: str) -> float:
        terminal = Terminal.blank(self.rows, self.columns)
        for character in problem.prompt + completion[:MAX_KEYS]:
            terminal.feed(codepoint_of(character))
        return float(terminal.phase is Phase.ENDED and terminal.cursor == problem.data["target"])


def codepoint_of(character: str) -> int:
    """Return the codepoint a terminal takes for `character`; 0 outside Unicode's basic plane."""
    codepoint = ord(character)
    return codepoint if codepoint < MAX_CODEPOINTS else 0
