"""What runs inside the sandbox, before and around a stranger's code: `python /harness.py`, with nothing of ours beside.

On standard input comes a request: a line `{form} {steps} {bytes of code}`, the code in UTF-8, and then the cases. On
standard output go `ready`, before the code is looked at, and then, if the process gets to the end of the cases, one
line for each. Whatever else happens, nothing is written.

- `expression`, `function`: cases and values are lines, `i 5` or `l 3 -1 4`; every case has to have a value.
- `calls NAME`, `program`: cases are lines of JSON, the arguments of a call or a program's standard input. A line is
  the JSON of what the call returns (tuples as arrays), or of what the program prints, trimmed; `!` where a case
  raises, or gives nothing that can be written so.
- `cells N`: the code is of several cells, and cases are the numbers of characters of each. What is written is the
  output of each of the last N, with a zero between them (session.py).

Nothing in this file is out of the code's reach once it runs: it may replace any of it, or write to the output
itself. That gains nothing. The request holds no expected value, and what is written is only compared with them.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # that of `typing` takes as long to import as all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any, Self

READY = b"ready\n"
MOST_ITEMS = 1000
Value = int | list[int]
MOST_CHARACTERS = 16_384
"""Of the JSON of one case's value."""

MOST_NESTED = 32
FAILED = "!\n"
WHITE_SPACE = " \t\n\r\f\v"
NOT_THE_SAME_EVERYWHERE = ("time", "_random", "_datetime")
"""Modules whose use is a mistake here, and not an attack: others (random, datetime, uuid) import them."""

CLOCKS = ("time", "monotonic", "perf_counter", "process_time")


def refuse_without_filter() -> None:
    """Raise OSError where a call that is on no list is made: then nothing would stop a program from forking."""
    try:
        os.sched_yield()
    except OSError:
        return
    raise OSError("the system call filter is not in force")


def hide_streams() -> int:
    """Take the answers' pipe from where the code prints, and leave it nothing to read or to fill."""
    answers = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    return answers


def limit_steps(steps: int) -> None:
    """End the process after so many instructions of the interpreter: seconds are others on every machine."""

    def count(frame: FrameType, *_: object) -> Any:
        nonlocal steps
        steps -= 1
        if steps < 0:
            os._exit(1)
        # Lines would do, if `while True: pass` were not one that never begins again.
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return count

    sys.settrace(count)


def values(form: str, code: str, cases: list[Value]) -> list[object]:
    """What the code makes of each case; raises whatever it raises."""
    if form == "expression":
        compiled = compile(code, "<answer>", "eval")
        return [eval(compiled, {"x": case}) for case in cases]  # noqa: S307  (this is the place for it)
    names: dict[str, Any] = {"__name__": "answer"}
    exec(compile(code, "<answer>", "exec"), names)  # noqa: S102  (this is the place for it)
    return [names["f"](case) for case in cases]


def decode(line: str) -> Value:
    """A case from its line."""
    kind, *numbers = line.split()
    return [int(number) for number in numbers] if kind == "l" else int(numbers[0])


def encode(value: object) -> str:
    """A line; exact types only, so that no method of the code's own classes is asked what it is equal to."""
    if type(value) is int:
        return f"i {number(value)}\n"
    if type(value) is list and len(value) <= MOST_ITEMS:
        return " ".join(["l", *map(number, value)]) + "\n"
    raise TypeError


def number(value: object) -> str:
    """A 64-bit integer in decimal."""
    if type(value) is int and -(2**63) <= value < 2**63:
        return str(value)
    raise TypeError


def json_of(value: Any, dumps: Callable[[object], str], depth: int = 0) -> str:
    """Canonical JSON of a value of exact types; whole floats are written as integers, members are sorted by key."""
    kind = type(value)
    if depth > MOST_NESTED:
        raise TypeError
    if kind is list or kind is tuple:
        return "[" + ",".join([json_of(item, dumps, depth + 1) for item in value]) + "]"
    if kind is dict and all(type(key) is str for key in value):
        members = [dumps(key) + ":" + json_of(value[key], dumps, depth + 1) for key in sorted(value)]
        return "{" + ",".join(members) + "}"
    if kind is float and abs(value) < float("inf"):
        return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)
    if kind is bool or kind is int or kind is str or value is None:
        return dumps(value)
    raise TypeError


def attempts(form: str, code: str, cases: list[Any], kept: tuple[Any, Any]) -> list[str]:
    """One line for each case, whatever the code does with it."""
    dumps, io = kept
    compiled = compile(code, "<answer>", "exec")
    names: dict[str, Any] = {"__name__": "answer"}
    name = form.removeprefix("calls ")
    if form != "program":
        exec(compiled, names)  # noqa: S102  (this is the place for it)
    lines = []
    for case in cases:
        try:
            value = printed(compiled, case, io) if form == "program" else names[name](*case)
            line = json_of(value, dumps)
            lines.append(line + "\n" if len(line) <= MOST_CHARACTERS else FAILED)
        except BaseException:  # noqa: BLE001  (also SystemExit: the other cases are still to come)
            lines.append(FAILED)
    return lines


def printed(compiled: CodeType, case: str, io: Any) -> str:
    """What a program prints, given its standard input; an exit with status 0 is an end like any other."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(case.encode()), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    output = sys.stdout
    try:
        exec(compiled, {"__name__": "__main__"})  # noqa: S102  (this is the place for it)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    output.flush()
    written: bytes = output.buffer.getvalue()
    return trimmed(written.decode())


def provide(io: Any) -> dict[str, Any]:
    """Put in place what programs expect of Python; return modules that stand still, and have a fixed first seed."""
    import _random  # noqa: PLC0415
    import builtins  # noqa: PLC0415

    still = type(sys)("time")
    for clock in CLOCKS:
        setattr(still, clock, lambda: 0.0)
        setattr(still, clock + "_ns", lambda: 0)
    still.sleep = lambda *_: None  # type: ignore[attr-defined]

    class Random(_random.Random):
        """Numbers that begin with seed 0 where none is given."""

        def __new__(cls, *_: object, **__: object) -> Self:
            return super().__new__(cls, 0)  # type: ignore[call-arg]

        def seed(self, number: Any = None, /) -> None:
            super().seed(0 if number is None else number)

    seeded = type(sys)("_random")
    seeded.Random = Random  # type: ignore[attr-defined]
    files = builtins.open

    def opened(file: Any, mode: str = "r", *more: Any, **others: Any) -> Any:
        if file in (0, "/dev/stdin"):  # the descriptor itself has nothing to read
            return sys.stdin.buffer if "b" in mode else sys.stdin
        return files(file, mode, *more, **others)

    builtins.open = io.open = opened
    # Those of the module `site`, which is not imported.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    return {"time": still, "_random": seeded}


def trimmed(text: str) -> str:
    """What a program printed, without white space at the ends of lines and at its end."""
    return "\n".join([line.rstrip(WHITE_SPACE) for line in text.split("\n")]).rstrip(WHITE_SPACE)


def main() -> None:
    """Answer one request."""
    refuse_without_filter()
    with open(0, "rb", closefd=False) as requests:
        form, steps, size = requests.readline().decode().rsplit(maxsplit=2)
        code = requests.read(int(size)).decode()
        rest = requests.read().decode()
    cells: list[str] = []
    cases: list[Any] = []
    kept: tuple[Any, Any] | None = None
    if form.startswith("cells "):
        import io  # noqa: PLC0415

        sys.path.append("/")
        import session  # type: ignore[import-not-found]  # noqa: PLC0415

        sys.path.pop()
        for size in rest.split():
            cells.append(code[: int(size)])
            code = code[int(size) :]
        kept = None, io
    elif form in ("expression", "function"):
        cases = [decode(line) for line in rest.splitlines()]
    else:
        # Only here: an import that the other forms do not need takes longer than all the rest.
        import io  # noqa: PLC0415
        import json  # noqa: PLC0415

        cases = [json.loads(line) for line in rest.split("\n")[:-1]]
        kept = json.JSONEncoder(separators=(",", ":")).encode, io
    answers = hide_streams()
    provided = {} if kept is None else provide(kept[1])
    # An import of what is None fails.
    for module in NOT_THE_SAME_EVERYWHERE:
        sys.modules[module] = provided.get(module)  # type: ignore[assignment]
    os.write(answers, READY)
    status = 1
    try:
        if cells:
            session.answer(int(steps), cells, int(form.removeprefix("cells ")), answers)
        limit_steps(int(steps))
        if kept is None:
            lines = [encode(value) for value in values(form, code, cases)]
        else:
            lines = attempts(form, code, cases, kept)
        sys.settrace(None)
        os.write(answers, "".join(lines).encode())
        status = 0
    finally:
        os._exit(status)  # no handler, finaliser or traceback of the code's is run


if __name__ == "__main__":
    main()
