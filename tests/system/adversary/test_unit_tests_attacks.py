"""Programs that want the reward of `unit-tests/1` without solving the task, through the door: as completions."""

from __future__ import annotations

import json
import textwrap

import pytest
from sandboxing import needs_sandbox

from node.graders import check_answer, check_grader, grade
from node.protocol.grading import UnitTestsGrader
from node.sandbox.root import PYTHON_VERSION

pytestmark = needs_sandbox

ALL, SHARE = (UnitTestsGrader(python=PYTHON_VERSION, partial=partial) for partial in (False, True))
ADD = json.dumps(
    {
        "function": "add",
        "cases": [
            {"arguments": [1, 2], "output": 3},
            {"arguments": [0.5, 0.5], "output": 1},
            {"arguments": ["a", "\u00e9\n"], "output": "a\u00e9\n"},
            {"arguments": [[1], [None, True]], "output": [1, None, True]},
        ],
    }
)
SUM = json.dumps({"cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}]})
RIGHT = "def add(a, b):\n    return a + b\n"


def program(source: str) -> str:
    return f"<think>hm</think>\nHere it is:\n```python\n{textwrap.dedent(source)}```\nDone."


def test_a_right_function_earns_everything_and_a_half_right_one_its_share() -> None:
    check_answer(ALL, ADD)
    check_grader(ALL)
    assert grade(ALL, ADD, program(RIGHT)) == grade(SHARE, ADD, program(RIGHT)) == 1.0
    some = program("def add(a, b):\n    return int(a) + int(b)\n")
    assert (grade(ALL, ADD, some), grade(SHARE, ADD, some)) == (0.0, 0.25)
    assert grade(ALL, ADD, RIGHT) == 1.0
    assert grade(ALL, ADD, RIGHT + "</think>") == 0.0


def test_a_right_program_earns_everything_whatever_space_it_prints() -> None:
    read = "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())), end=' \\n\\n')\nsys.exit()\n"
    assert grade(ALL, SUM, program(read)) == 1.0
    assert grade(ALL, SUM, program("print(sum(map(int, input().split())))\n")) == 1.0
    assert grade(SHARE, SUM, program("print(3)\n")) == 0.5


READING = ["open(0).read()", "open('/dev/stdin', 'rb').read()", "input()"]


@pytest.mark.parametrize("read", READING)
@pytest.mark.parametrize("end", ["exit()", "quit()", "import sys; sys.exit(0)"])
def test_programs_read_and_end_as_they_do_on_judging_sites(read: str, end: str) -> None:
    assert grade(ALL, SUM, program(f"print(sum(map(int, {read}.split())))\n{end}\n")) == 1.0


@pytest.mark.parametrize(
    "module", ["threading", "queue", "statistics", "random", "time", "datetime", "heapq", "typing"]
)
def test_a_usual_import_is_no_mistake(module: str) -> None:
    assert grade(ALL, ADD, program(f"import {module}\n{RIGHT}")) == 1.0


def test_what_programs_draw_and_what_time_it_is_is_the_same_on_every_machine() -> None:
    source = """
        import random, time
        def f(): return [random.randrange(1000), random.Random().randrange(1000), time.time(), time.monotonic_ns()]
    """
    cases = json.dumps({"function": "f", "cases": [{"arguments": [], "output": [864, 864, 0, 0]}]})
    assert grade(ALL, cases, program(source)) == 1.0


def test_numbers_of_cases_are_what_json_writes() -> None:
    cases = json.dumps(
        {
            "function": "f",
            "cases": [{"arguments": [2.0], "output": "2.0"}, {"arguments": [2], "output": "2"}],
        }
    )
    assert grade(ALL, cases, program("f = str\n")) == 1.0
    large = json.dumps({"function": "f", "cases": [{"arguments": [1e16], "output": 1e16}]})
    assert grade(ALL, large, program("def f(x): return x\n")) == 1.0


def test_the_last_block_of_python_is_the_program() -> None:
    for after in ("Output:\n```text\n3\n```", "```bash\npython add.py\n```", "```\nnot closed"):
        assert grade(ALL, ADD, f"```Python\n{RIGHT}```\n{after}") == 1.0
    assert grade(ALL, ADD, f"```python\n{RIGHT}```\n```py\n1\n```") == 0.0
    assert grade(ALL, ADD, f"```text\n{RIGHT}```") == 0.0


WITHOUT_SOLVING = {
    "exit before the cases": "import sys; sys.exit(0)",
    "exit at once": "import os; os._exit(0)",
    "exit in a case": "import os\ndef add(a, b): os._exit(0)",
    "an equal to everything": """
        class Equal:
            def __eq__(self, other): return True
            def __repr__(self): return "3"
        def add(a, b): return Equal()
    """,
    "a number of a class of its own": "class N(int): pass\ndef add(a, b): return N(7)",
    "print the outputs": "print('3\\n1\\n')\ndef add(a, b): print(a + b)",
    "write to every descriptor": """
        import os
        for file in range(16):
            try: os.write(file, b'3\\n1\\n')
            except OSError: pass
        os._exit(0)
    """,
    "find the expected outputs": """
        import gc, sys
        found = [thing for thing in gc.get_objects() if isinstance(thing, dict) and 'output' in thing]
        frame = sys._getframe()
        while frame:
            found += [value for name, value in frame.f_locals.items() if 'output' in name or 'expected' in name]
            frame = frame.f_back
        outputs = [one['output'] for one in found if isinstance(one, dict)] or found
        def add(a, b): return outputs.pop(0)
    """,
    "replace the harness": """
        import __main__
        __main__.json_of = lambda *_: '3'
        def add(a, b): return None
    """,
    "replace builtins": """
        import builtins, json
        builtins.len = lambda *_: 0
        json.JSONEncoder.encode = lambda *_: '3'
        def add(a, b): return b''
    """,
    "forge all lines": """
        import os, sys
        for file in range(3, 16):
            try: os.write(file, b'3\\n3\\n3\\n3\\n')
            except OSError: pass
        os._exit(0)
    """,
    "raise what is not an exception": "def add(a, b): raise KeyboardInterrupt",
    "return itself for ever": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "return too much": "def add(a, b): return 'x' * 10**7",
    "loop": "def add(a, b):\n    while True: pass",
    "loop outside": "while True: pass",
    "recurse": "def add(a, b): return add(a, b)",
    "take all memory": "def add(a, b): return [0] * 10**9",
    "no code": "",
    "not Python": "fn add(a, b) { a + b }",
    "another function": "def sub(a, b): return a + b",
}


@pytest.mark.parametrize("attack", WITHOUT_SOLVING)
def test_a_program_that_does_not_solve_the_task_does_not_earn_its_reward(attack: str) -> None:
    assert grade(ALL, ADD, program(WITHOUT_SOLVING[attack])) == 0.0
    # One of four cases is had by a constant 3, which a share pays for, as the page says.
    assert grade(SHARE, ADD, program(WITHOUT_SOLVING[attack])) <= 0.25


def test_a_case_that_fails_does_not_take_the_others_with_it() -> None:
    raising = "def add(a, b):\n    if a == 1: raise SystemExit\n    return a + b\n"
    assert grade(SHARE, ADD, program(raising)) == 0.75


def test_a_program_that_ends_early_has_no_share_of_what_it_had_done() -> None:
    """Else a program would be paid up to where this machine's clock, and not another's, has stopped it."""
    ending = "import os\ndef add(a, b):\n    if a == 0.5: os._exit(0)\n    return a + b\n"
    assert grade(SHARE, ADD, program(ending)) == 0.0


def test_arguments_that_a_case_changes_are_not_the_next_ones() -> None:
    cases = [{"arguments": [[1, 2]], "output": 2}, {"arguments": [[1, 2]], "output": 2}]
    answer = json.dumps({"function": "last", "cases": cases})
    assert grade(ALL, answer, program("def last(v): return v.pop()\n")) == 1.0
