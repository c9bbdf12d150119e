"""Programming problems whose answers are executed in `node.sandbox` (docs/environments.md).

Both forms describe a chain of operations in words. `expression` wants a Python expression in `x`, short enough for a
character model; `function` wants a function over a list of integers in a fenced block. The answer is run on hidden
inputs, and its output is compared here, outside the sandbox, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from node.environments.base import EnvironmentFault, Problem, answer_in, draws
from node.sandbox import Sandbox, SandboxFailed
from node.sandbox.root import PYTHON_VERSION

CASES = 8
MAX_CODE_BYTES = 64 * 1024
MAX_STEPS = 500_000
"""Interpreter instructions for one answer over all cases, the same on every machine; more earn nothing."""

SURE_CPU_SECONDS = 0.5
"""Correct answers slower than this are not judged, as they might time out elsewhere (at eight times as much)."""

_LARGEST_INPUT = 50
_LONGEST_LIST = 12
_LARGEST_OPERAND = 9
_FENCE = "```"
_SQUARE = "square"

Numbers = list[int]


class NumberOperation(NamedTuple):
    """An operation on an integer v with an operand n: its description, its effect, and its Python source."""

    told: str
    apply: Callable[[int, int], int]
    written: str


class ListOperation(NamedTuple):
    """An operation on a list v of integers; otherwise like NumberOperation."""

    told: str
    apply: Callable[[Numbers, int], Numbers]
    written: str


Operation = TypeVar("Operation", NumberOperation, ListOperation)

NUMBER_OPERATIONS: Final = (
    NumberOperation("add {n}", lambda v, n: v + n, "{v}+{n}"),
    NumberOperation("take {n}", lambda v, n: v - n, "{v}-{n}"),
    NumberOperation("times {n}", lambda v, n: v * n, "{v}*{n}"),
    NumberOperation("from {n}", lambda v, n: n - v, "{n}-{v}"),
    NumberOperation("mod {n}", lambda v, n: v % n, "{v}%{n}"),
    NumberOperation(_SQUARE, lambda v, _: v * v, "{v}**2"),
)
LIST_OPERATIONS: Final = (
    ListOperation("add {n} to each number", lambda v, n: [i + n for i in v], "[i + {n} for i in v]"),
    ListOperation("multiply each number by {n}", lambda v, n: [i * n for i in v], "[i * {n} for i in v]"),
    ListOperation("keep the numbers divisible by {n}", lambda v, n: [i for i in v if i % n == 0],
                  "[i for i in v if i % {n} == 0]"),
    ListOperation("drop the numbers divisible by {n}", lambda v, n: [i for i in v if i % n],
                  "[i for i in v if i % {n}]"),
    ListOperation("move the first {n} numbers to the end", lambda v, n: v[n:] + v[:n], "v[{n}:] + v[:{n}]"),
    ListOperation("reverse the list", lambda v, _: v[::-1], "v[::-1]"),
    ListOperation("sort the list in ascending order", lambda v, _: sorted(v), "sorted(v)"),
    ListOperation("remove every number that occurred earlier in the list", lambda v, _: list(dict.fromkeys(v)),
                  "list(dict.fromkeys(v))"),
    ListOperation("replace each number by the sum of all numbers up to it", lambda v, _: list(accumulate(v)),
                  "[sum(v[:i + 1]) for i in range(len(v))]"),
    ListOperation(_SQUARE + " each number", lambda v, _: [i * i for i in v], "[i * i for i in v]"),
)  # fmt: skip

PROMPT: Final = """Write a Python function f(v) that takes a list of integers and does the following, step by step:
{steps}
Then it returns the list. It must neither read nor print anything.
Think first, end your thoughts with </think>, and then give the function in a block between ```python and ```.
"""


class Code(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Q:py add 3, times 4\\nA:` with `steps` operations; `(x+3)*4`, or anything equal to it, is correct.

    `python` is the judging version, e.g. "3.11": answers may mean something else in another.
    """

    name: ClassVar[str] = "code"
    form: Literal["expression", "function"] = "expression"
    steps: Annotated[int, Meta(ge=1, le=6)] = 2
    python: Annotated[str, Meta(pattern=r"^3\.[0-9]{1,2}$")] = "3.11"

    def problem(self, index: int) -> Problem:
        """Return problem `index`; `data`: hidden `inputs` and `outputs`, and a correct `answer`."""
        return _expression(self.steps, index) if self.form == "expression" else _function(self.steps, index)

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1 if the answer, executed, gives the correct value for every case, else 0; raises SandboxFailed."""
        source = _source_in(completion) if self.form == "function" else answer_in(completion)
        code = None if source is None else _utf8(source)
        if not code or len(code) > MAX_CODE_BYTES:
            return 0.0
        head = f"{self.form} {MAX_STEPS} {len(code)}\n".encode()
        expected = _lines(problem.data["outputs"])
        result = Sandbox().run(head + code + _lines(problem.data["inputs"]), max_bytes=len(expected))
        if not result.complete or result.answers != expected:
            return 0.0
        if result.cpu_seconds > SURE_CPU_SECONDS:
            raise SandboxFailed(f"correct answer took {result.cpu_seconds:.1f} s", code="sandbox_doubt")
        return 1.0

    def check_machine(self) -> None:
        """Raise EnvironmentFault or SandboxFailed if this machine cannot compute rewards."""
        if self.python != PYTHON_VERSION:
            raise EnvironmentFault(
                f"this run judges answers with Python {self.python}, but this is Python {PYTHON_VERSION}",
                code="python_version",
            )
        Sandbox().check()


def _expression(steps: int, index: int) -> Problem:
    numbers = draws(Code.name, index)
    inputs = [_between(numbers, -_LARGEST_INPUT, _LARGEST_INPUT) for _ in range(CASES)]
    outputs, written = list(inputs), "x"
    told: list[str] = []
    for operation, operand in _chain(numbers, NUMBER_OPERATIONS, steps):
        told.append(operation.told.format(n=operand))
        written = operation.written.format(v=written if written == "x" else f"({written})", n=operand)
        outputs = [operation.apply(value, operand) for value in outputs]
    prompt = f"Q:py {', '.join(told)}\nA:"
    return Problem(prompt, {"inputs": inputs, "outputs": outputs, "answer": written})


def _function(steps: int, index: int) -> Problem:
    numbers = draws(Code.name, index)
    # The empty list is always a case: nearly correct functions fail on it.
    lengths = [0, *(_between(numbers, 1, _LONGEST_LIST) for _ in range(CASES - 1))]
    inputs = [[_between(numbers, -_LARGEST_INPUT, _LARGEST_INPUT) for _ in range(length)] for length in lengths]
    outputs, written = list(inputs), ["def f(v):"]
    told: list[str] = []
    for operation, operand in _chain(numbers, LIST_OPERATIONS, steps):
        told.append(f"{len(told) + 1}. {operation.told.format(n=operand)};")
        written.append("    v = " + operation.written.format(n=operand))
        outputs = [operation.apply(value, operand) for value in outputs]
    answer = "\n".join([_FENCE + "python", *written, "    return v", _FENCE])
    return Problem(PROMPT.format(steps="\n".join(told)), {"inputs": inputs, "outputs": outputs, "answer": answer})


def _chain(numbers: Iterator[int], operations: Sequence[Operation], steps: int) -> Iterator[tuple[Operation, int]]:
    """Yield `steps` operations with operands, none twice in a row and at most one square, so values fit into 64
    bits.
    """
    candidates = operations
    for _ in range(steps):
        operation = candidates[next(numbers) % len(candidates)]
        yield operation, _between(numbers, 2, _LARGEST_OPERAND)
        if operation.told.startswith(_SQUARE):
            operations = [other for other in operations if other is not operation]
        candidates = [other for other in operations if other is not operation]


def _between(numbers: Iterator[int], low: int, high: int) -> int:
    return low + next(numbers) % (high - low + 1)


def _source_in(completion: str) -> str | None:
    """Return the last block between ```python and ``` in the answer; None without one."""
    _, mark, tail = (answer_in(completion) or "").rpartition(_FENCE + "python\n")
    source, end, _ = tail.partition(_FENCE)
    return source if mark and end else None


def _utf8(text: str) -> bytes | None:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no token decoder produces
        return None


def _lines(values: Sequence[int | Numbers]) -> bytes:
    """Encode values in the sandbox's line format."""
    return "".join(
        f"i {value}\n" if isinstance(value, int) else " ".join(["l", *map(str, value)]) + "\n" for value in values
    ).encode()
