"""Multiplication with a calculator tool: an environment of several turns, small enough for a character model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from node.environments.base import Problem, answer_in, draws
from node.protocol.environment_spec import END_OF_THOUGHT

MAX_NUMBERS: Final = 8
MAX_DIGITS: Final = 9
_CALCULATION = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}(?:[-+*][0-9]{{1,{MAX_DIGITS}}}){{0,{MAX_NUMBERS - 1}}}")


class Calculator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Q:23*47=?` with two factors of exactly `digits` digits; the answer is their product in decimal.

    A turn with a `</think>` gives the answer. Any other is a calculation for the tool, such as `23*47`: up to eight
    numbers of up to nine digits, joined by `+`, `-` and `*`. The reply is `=1081`, or `=?` for anything else, with a
    line feed.
    """

    name: ClassVar[str] = "calculator"
    digits: Annotated[int, Meta(ge=1, le=MAX_DIGITS)] = 2

    def problem(self, index: int) -> Problem:
        numbers = draws(self.name, index)
        lowest = 10 ** (self.digits - 1)
        left, right = (lowest + next(numbers) % (9 * lowest) for _ in range(2))
        return Problem(f"Q:{left}*{right}=?\nA:", {"factors": (left, right), "answer": str(left * right)})

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:  # noqa: ARG002  (the tool does not depend on the problem)
        if END_OF_THOUGHT in turns[-1]:
            return None
        value = calculate(turns[-1].strip())
        return "=?\n" if value is None else f"={value}\n"

    def reward(self, problem: Problem, completion: str) -> float:
        return float(answer_in(completion) == problem.data["answer"])

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self.reward(problem, turns[-1])


def calculate(text: str) -> int | None:
    """Evaluate a calculation, products first; None for anything else. Takes bounded time on hostile text."""
    if len(text) > MAX_NUMBERS * (MAX_DIGITS + 1) or not _CALCULATION.fullmatch(text):
        return None
    total = 0
    for sign, product in re.findall(r"([-+]?)([0-9*]+)", text):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total
