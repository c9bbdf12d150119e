"""What runs inside the sandbox, before and around a stranger's code: `python /harness.py`, with nothing of ours beside.

On standard input comes a request: a line `{form} {steps} {bytes of code}`, the code in UTF-8, and then one line for
each case: `i 5`, or `l 3 -1 4`. On standard output go `ready`, before the code is looked at, and then, if it gives
a value for every case, one line for each in the same form. Whatever else happens, nothing is written.

Nothing in this file is out of the code's reach once it runs: it may replace any of it, or write to the output
itself. That gains nothing. The request holds no expected value, and what is written is only compared with them.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # that of `typing` takes as long to import as all the rest
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

READY = b"ready\n"
MOST_ITEMS = 1000
Value = int | list[int]
NOT_THE_SAME_EVERYWHERE = ("time", "_random")
"""Modules whose use is a mistake here, and not an attack: others (random, datetime, uuid) import them."""


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


def main() -> None:
    """Answer one request."""
    refuse_without_filter()
    with open(0, "rb", closefd=False) as requests:
        form, steps, size = requests.readline().decode().split()
        code = requests.read(int(size)).decode()
        cases = [decode(line) for line in requests.read().decode().splitlines()]
    answers = hide_streams()
    # An import of what is None fails.
    for module in NOT_THE_SAME_EVERYWHERE:
        sys.modules[module] = None  # type: ignore[assignment]
    os.write(answers, READY)
    status = 1
    try:
        limit_steps(int(steps))
        lines = [encode(value) for value in values(form, code, cases)]
        sys.settrace(None)
        os.write(answers, "".join(lines).encode())
        status = 0
    finally:
        os._exit(status)  # no handler, finaliser or traceback of the code's is run


if __name__ == "__main__":
    main()
