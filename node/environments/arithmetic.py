"""Addition of two numbers, small enough for a character model of 400 thousand parameters."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from node.environments.base import Problem, answer_in, draws


class Arithmetic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Q:61+48=?` with two terms of exactly `digits` digits; the answer is their sum in decimal."""

    name: ClassVar[str] = "arithmetic"
    digits: Annotated[int, Meta(ge=1, le=9)] = 2

    def problem(self, index: int) -> Problem:
        numbers = draws(self.name, index)
        lowest = 10 ** (self.digits - 1)
        left, right = (lowest + next(numbers) % (9 * lowest) for _ in range(2))
        return Problem(f"Q:{left}+{right}=?\nA:", {"terms": (left, right), "answer": str(left + right)})

    def reward(self, problem: Problem, completion: str) -> float:
        return float(answer_in(completion) == problem.data["answer"])
