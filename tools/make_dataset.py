"""Write the two datasets that the project generates itself: `python -m tools.make_dataset math|code --to FILE.jsonl`.

Rows for `swarmproof dataset add` (`question`, `answer`, `kind`, `solution`), or with `--demonstrations` conversations
for `swarmproof sft`, of other questions than any row asks. No two rows ask the same in other words: `5+3` is `3+5`,
`x+3=8` is `8-3`, and functions with the same outputs are one. The same seed gives the same rows on every machine. Like
the project, what this writes is under the Apache License 2.0; none of it is taken from other texts.

    math  2,000 sums, differences and equations of numbers below 100; grader `math/1`
    code  500 functions of an integer, described in words, with six cases each; grader `unit-tests/1`

Questions are short and solutions a few characters, so that a policy of 0.4 million parameters over single characters
learns them (`benchmarks.curves`). A demonstration works its answer out between `<think>` and `</think>`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from node.environments.code import NUMBER_OPERATIONS, NumberOperation
from shardcast.files import write_atomically
from shardcast.wire import derive

INPUTS = (-17, -4, 0, 3, 8, 29)
LEAST_OUTPUTS = 3
"""A function with fewer different outputs is left out: a constant should not come near it."""

_NUMBERS = range(10, 100)
_OPERANDS = range(2, 10)

Step = tuple[NumberOperation, int]
"""An operation with its operand."""

Work = Callable[[float, Random], str]
"""A solution worked out, in which each step is wrong with the probability that is given, and later ones follow it."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A problem: what `dataset add` reads of it, a text that earns 1, and how it is worked out or guessed at."""

    question: str
    answer: Any
    kind: str
    solution: str
    asks: tuple[str | int, ...]
    """The calculation, or a function's outputs: the same for problems that are one question in different words."""
    work: Work
    guess: Callable[[Random], str]

    @property
    def row(self) -> dict[str, Any]:
        """Return the line of the dataset."""
        return {"question": self.question, "answer": self.answer, "kind": self.kind, "solution": self.solution}


def math_problems() -> Iterator[Generated]:
    """Yield every problem of the math dataset."""
    for a, b in itertools.product(_NUMBERS, repeat=2):
        yield _calculation(f"What is {a}+{b}?", "sum", a, "+", b)
        if a >= b:
            yield _calculation(f"What is {a}-{b}?", "difference", a, "-", b)
            yield _calculation(f"Solve x+{b}={a}.", "equation", a, "-", b)


def code_problems() -> Iterator[Generated]:
    """Yield every problem of the code dataset: two operations, one after the other."""
    steps = [
        (operation, n)
        for operation in NUMBER_OPERATIONS
        for n in (_OPERANDS if "{n}" in operation.told else _OPERANDS[:1])
    ]
    for first, second in itertools.product(steps, repeat=2):
        problem = _function(first, second, among=steps)
        outputs = {case["output"] for case in problem.answer["cases"]}
        if first[0] is not second[0] and len(outputs) >= LEAST_OUTPUTS:
            yield problem


PROBLEMS: Mapping[str, tuple[Callable[[], Iterator[Generated]], int]] = {
    "math": (math_problems, 2000),
    "code": (code_problems, 500),
}
"""By name, all problems that there are, and how many of them are rows."""


def drawn(name: str, *, seed: int) -> tuple[list[Generated], list[Generated]]:
    """Return the problems that are rows of a dataset, and those that ask what no row asks."""
    make, count = PROBLEMS[name]

    def place(problem: Generated) -> bytes:
        return derive("swarmproof/1 generated dataset", seed.to_bytes(8, "big"), problem.question.encode())

    problems = sorted(make(), key=place)
    questions: dict[tuple[str | int, ...], Generated] = {}
    for problem in problems:
        questions.setdefault(problem.asks, problem)
    rows = list(questions.values())[:count]
    asked = {problem.asks for problem in rows}
    return rows, [problem for problem in problems if problem.asks not in asked]


def demonstrations(
    problems: Sequence[Generated], *, count: int, mistakes: float, guesses: float, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield `count` conversations about `problems`, drawn with repetition.

    Each step is wrong with probability `mistakes`, and a conversation is a guess with probability `guesses`.
    """
    rng = Random(seed)
    for _ in range(count):
        problem = rng.choice(problems)
        text = f"<think></think>{problem.guess(rng)}" if rng.random() < guesses else problem.work(mistakes, rng)
        turns = (("user", problem.question), ("assistant", text))
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _calculation(question: str, kind: str, a: int, sign: str, b: int) -> Generated:
    right = str(a + b if sign == "+" else a - b)
    return Generated(
        question,
        right,
        kind,
        solution=right,
        asks=(sign, a, b) if sign == "-" else (sign, min(a, b), max(a, b)),
        work=lambda mistakes, rng: _columns(a, sign, b, mistakes, rng),
        guess=lambda rng: str(rng.randint(20, 198) if sign == "+" else rng.randint(0, 89)),
    )


def _columns(a: int, sign: str, b: int, mistakes: float, rng: Random) -> str:
    """Work from the right, `<think>8+3+0=11,4+7+1=12</think>121`: the third term is what the last column carried."""
    columns, digits, carry = [], "", 0
    for x, y in ((a % 10, b % 10), (a // 10, b // 10)):
        total = x + y + carry if sign == "+" else x - y - carry
        if rng.random() < mistakes:
            total += rng.choice((-2, -1, 1, 2))
        total = max(total, 0) if sign == "+" else total
        columns.append(f"{x}{sign}{y}{sign}{carry}={total if sign == '+' else total % 10}")
        digits, carry = f"{total % 10}{digits}", int(not 0 <= total <= 9)
    first = carry if sign == "+" else 0
    return f"<think>{','.join(columns)}</think>{int(f'{first}{digits}')}"


def _function(*steps: Step, among: Sequence[Step]) -> Generated:
    outputs = list(INPUTS)
    for operation, n in steps:
        outputs = [operation.apply(value, n) for value in outputs]
    cases = [{"arguments": [x], "output": output} for x, output in zip(INPUTS, outputs, strict=True)]
    return Generated(
        f"Write f(x): {', '.join(operation.told.format(n=n) for operation, n in steps)}.",
        {"function": "f", "cases": cases},
        ", ".join(operation.told.partition(" ")[0] for operation, _ in steps),
        solution=_program(steps),
        asks=tuple(outputs),
        work=lambda mistakes, rng: _parts(steps, among, mistakes, rng),
        guess=lambda rng: _program(rng.choices(among, k=len(steps))),
    )


def _parts(steps: Sequence[Step], among: Sequence[Step], mistakes: float, rng: Random) -> str:
    """Write each operation by itself, then the program, `<think>x+3 x*4</think>f=lambda x:(x+3)*4`."""
    chosen = [rng.choice(among) if rng.random() < mistakes else step for step in steps]
    parts = " ".join(operation.written.format(v="x", n=n) for operation, n in chosen)
    return f"<think>{parts}</think>{_program(chosen)}"


def _program(steps: Sequence[Step]) -> str:
    written = "x"
    for operation, n in steps:
        written = operation.written.format(v=written if written == "x" else f"({written})", n=n)
    return f"f=lambda x:{written}"


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROBLEMS)
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="JSON lines, replaced if they are there")
    parser.add_argument("--seed", type=int, default=0, help="draws the rows (0)")
    parser.add_argument("--demonstrations", type=int, metavar="COUNT", help="write as many conversations, and no rows")
    parser.add_argument("--mistakes", type=_share, default=0.0, help="share of a demonstration's steps (0)")
    parser.add_argument("--guesses", type=_share, default=0.0, help="share of demonstrations without any work (0)")
    chosen = parser.parse_args()
    rows, others = drawn(chosen.name, seed=chosen.seed)
    if chosen.demonstrations is None:
        write_lines(chosen.to, (problem.row for problem in rows))
        return
    shares = {"mistakes": chosen.mistakes, "guesses": chosen.guesses}
    write_lines(chosen.to, demonstrations(others, count=chosen.demonstrations, **shares, seed=chosen.seed))


if __name__ == "__main__":
    main()
