"""The grader `unit-tests/1`: a Python program, run in `node.sandbox` on cases whose outputs never enter it.

The answer is a JSON object: `{"function": "f", "cases": [{"arguments": [1, 2], "output": 3}]}`, or, for programs that
read and print, `{"cases": [{"input": "1 2\\n", "output": "3\\n"}]}`. All cases of a completion run one after another in
one sandbox; what it writes is compared here, byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from node.graders.errors import BadAnswer, GraderFault
from node.graders.json_values import BadJson, parse
from node.graders.text import WHITE_SPACE, lower
from node.protocol.grading import UnitTestsGrader
from node.sandbox import Sandbox, SandboxFailed
from node.sandbox.harness import MOST_CHARACTERS, json_of, trimmed
from node.sandbox.root import PYTHON_VERSION

MAX_CASES: Final = 64
MAX_CODE_BYTES: Final = 64 * 1024
SURE_CPU_SECONDS: Final = 0.5
"""Programs that earn something and took longer are not judged, as they might time out elsewhere."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}\Z")
_FENCE: Final = "```"
_LANGUAGES: Final = ("", "python", "python3", "py")
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Cases(NamedTuple):
    """What the sandbox is told, and the lines that are expected of it."""

    form: str
    inputs: Sequence[str]
    outputs: Sequence[str]


def grade_unit_tests(spec: UnitTestsGrader, answer: str, text: str) -> float:
    """Return the reward of the text's last block of code.

    Raises GraderFault where another Python judges, and SandboxFailed where this machine cannot tell.
    """
    check_machine(spec)
    code = _code_in(text)
    try:
        cases = _cases_in(answer)
    except BadAnswer:
        return 0.0
    if not code or len(code) > MAX_CODE_BYTES:
        return 0.0
    head = f"{cases.form} {spec.steps} {len(code)}\n".encode()
    request = head + code + "".join(f"{line}\n" for line in cases.inputs).encode()
    # Wrong outputs may be longer than right ones, and must not hide the right ones after them.
    result = Sandbox().run(request, max_bytes=len(cases.outputs) * (MOST_CHARACTERS + 1))
    lines = result.answers.split(b"\n")[:-1]
    if not result.complete or len(lines) != len(cases.outputs):
        return 0.0
    right = sum(line == output.encode() for line, output in zip(lines, cases.outputs, strict=True))
    reward = right / len(lines) if spec.partial else float(right == len(lines))
    if reward and result.cpu_seconds > SURE_CPU_SECONDS:
        raise SandboxFailed(f"right answer took {result.cpu_seconds:.1f} s", code="sandbox_doubt")
    return reward


def check_unit_tests(answer: str) -> None:
    """Raise BadAnswer unless the answer is a list of cases within the limits."""
    _cases_in(answer)


def check_machine(spec: UnitTestsGrader) -> None:
    """Raise GraderFault unless this is the Python that the run judges with."""
    if spec.python != PYTHON_VERSION:
        raise GraderFault(
            f"this run judges programs with Python {spec.python}, but this is Python {PYTHON_VERSION}",
            code="python_version",
        )


def _code_in(text: str) -> bytes | None:
    """Return the last block between ```python, or ```, and ```; without a fence the text."""
    pieces = text.split(_FENCE)
    # Pieces 1, 3, 5 ... stand inside, but for a last one after which no fence ends it.
    blocks = [piece.partition("\n") for piece in pieces[1 : len(pieces) - 1 : 2]]
    programs = [block for language, _, block in blocks if lower(language.strip(WHITE_SPACE)) in _LANGUAGES]
    source = programs[-1] if programs else "" if blocks else text
    try:
        return source.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no token decoder produces
        return None


@lru_cache(maxsize=8)
def _cases_in(answer: str) -> Cases:
    try:
        value = parse(answer, exact=False)
    except BadJson as error:
        raise BadAnswer(f"test cases are not JSON within the limits: {error}", code="bad_cases") from error
    if not isinstance(value, dict) or not set(value) <= {"function", "cases"} or "cases" not in value:
        raise BadAnswer("test cases are an object with cases, and function where one is called", code="bad_cases")
    function, cases = value.get("function"), value["cases"]
    if not isinstance(cases, list) or not 1 <= len(cases) <= MAX_CASES:
        raise BadAnswer(f"there are 1 .. {MAX_CASES} test cases", code="bad_cases")
    if function is None:
        return _program_cases(cases)
    if not isinstance(function, str) or not _NAME.match(function):
        raise BadAnswer("function is not the name of a function", code="bad_cases")
    for case in cases:
        if (
            not isinstance(case, dict)
            or set(case) != {"arguments", "output"}
            or not isinstance(case["arguments"], list)
        ):
            raise BadAnswer("a case of a function has arguments, an array, and output", code="bad_cases")
    return Cases(
        f"calls {function}",
        [_arguments(case["arguments"]) for case in cases],
        [_line(case["output"]) for case in cases],
    )


def _program_cases(cases: Sequence[Any]) -> Cases:
    for case in cases:
        if not isinstance(case, dict) or set(case) != {"input", "output"}:
            raise BadAnswer("a case of a program has input and output", code="bad_cases")
        if not isinstance(case["input"], str) or not isinstance(case["output"], str):
            raise BadAnswer("input and output of a program are strings", code="bad_cases")
    return Cases(
        "program", [_line(case["input"]) for case in cases], [_line(trimmed(case["output"])) for case in cases]
    )


def _line(value: Any) -> str:
    """Return the canonical JSON of an output, as the sandbox writes it."""
    try:
        return _checked(json_of(value, _encode))
    except (TypeError, OverflowError) as error:
        raise BadAnswer(f"a case has a value that no program can return: {error}", code="bad_cases") from error


def _arguments(value: list[Any]) -> str:
    """Return the JSON of what a case gives to the program: 2.0 stays a float."""
    _line(value)
    return _checked(_encode(value))


def _checked(line: str) -> str:
    if len(line) > MOST_CHARACTERS:
        raise BadAnswer(f"a case has a value of more than {MOST_CHARACTERS} characters", code="bad_cases")
    return line
