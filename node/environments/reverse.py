"""Reversal of a short word; the demonstration's second task."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from node.environments.base import Problem, answer_in, draws

LETTERS = "abcdefgh"


class Reverse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Q:rev gaeh` with `shortest` to `longest` letters from a to h; the answer is the word backwards."""

    name: ClassVar[str] = "reverse"
    shortest: Annotated[int, Meta(ge=1, le=64)] = 3
    longest: Annotated[int, Meta(ge=1, le=64)] = 5

    def __post_init__(self) -> None:
        if self.longest < self.shortest:
            raise ValueError("`longest` is below `shortest`")

    def problem(self, index: int) -> Problem:
        numbers = draws(self.name, index)
        length = self.shortest + next(numbers) % (self.longest - self.shortest + 1)
        word = "".join(LETTERS[next(numbers) % len(LETTERS)] for _ in range(length))
        return Problem(f"Q:rev {word}\nA:", {"word": word, "answer": word[::-1]})

    def reward(self, problem: Problem, completion: str) -> float:
        return float(answer_in(completion) == problem.data["answer"])
