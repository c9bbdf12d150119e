"""Code of the tool `python` in its sandbox: what a model is told of it, and that nobody else is told otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandboxing import needs_sandbox

from node.sandbox import SandboxFailed, cells
from node.sandbox.cells import MAX_CELLS_BYTES, run_cells
from node.sandbox.root import ENVIRONMENT

pytestmark = needs_sandbox


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """No test is answered by what another one ran."""
    run_cells.cache_clear()


def say(*code: str, steps: int = 100_000, characters: int = 2000) -> str:
    return run_cells(code, wanted=1, steps=steps, characters=characters)[0]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 + 1", "2"),
        ("x = 5", ""),
        ("print('a')\nprint('b', end='')\n[1, 'c']", "a\nb\n[1, 'c']"),
        ("def f(n: int) -> int: return n * 2\nf(21)", "42"),
        ("print('a')\n1 / 0", "a\nZeroDivisionError: division by zero"),
        ("raise KeyError('a\\nb')", "KeyError: 'a\\nb'"),
        ("assert False", "AssertionError"),
        ("a b", "SyntaxError: invalid syntax (<python>, line 1)"),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError: maximum recursion depth exceeded"),
        ("exit()\nprint('not this')", ""),
        ("import os", "ModuleNotFoundError: No module named 'os' here"),
        ("open('/harness.py')", "PermissionError: there are no files here"),
        ("input()", "EOFError: EOF when reading a line"),
        ("import sys\nprint(1, file=sys.stderr)\nsys.setrecursionlimit(10**6)\nsys.exit(3)", "1"),
        ("print('\\ud800')", "?"),
        ("from math import comb\ncomb(50, 25)", "126410606437752"),
    ],
)
def test_a_call_says_what_its_code_prints_then_its_value_or_its_error(code: str, said: str) -> None:
    assert say(code) == said


def test_names_stay_from_call_to_call_and_each_says_its_own() -> None:
    code = ("x = 20", "print(x)\n1 / 0\nx = 9", "x += 1; x", "x * 2")
    assert run_cells(code, wanted=3, steps=1000, characters=100) == (
        "20\nZeroDivisionError: division by zero",
        "21",
        "42",
    )
    for turn, said in enumerate(("", "20\nZeroDivisionError: division by zero", "21", "42"), 1):
        assert say(*code[:turn]) == said


def test_the_instructions_of_all_calls_are_counted_together() -> None:
    loop = "for _ in range(300): pass\nprint('done')"
    assert say(loop, steps=1000) == "done"
    stopped = "TimeoutError: stopped after 1000 instructions"
    assert say(loop, loop, steps=1000) == stopped
    assert run_cells((loop, loop, "1"), wanted=2, steps=1000, characters=100) == (stopped, stopped)
    assert say("print('a')\nwhile True: pass") == "a\nTimeoutError: stopped after 100000 instructions"


def test_an_output_has_an_end() -> None:
    assert say("'x' * 100", characters=16) == "'" + "x" * 14 + "…"
    assert len(say("for _ in range(3000): print('x' * 300)")) == 2000
    assert say("#" * (MAX_CELLS_BYTES + 1)).startswith("ValueError: more than 65536 bytes")


# -- the same everywhere

P = "<__main__.P object>"
UNORDERED = "{3, 'b', None, int, print, (1, None), P(), P()}"
CLASSES = """
class P: pass
class Q(P):
    def __hash__(self): return hash((None, P))
    def __eq__(self, other): return True
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f"print({UNORDERED})", f"{{3, 'b', None, <class 'int'>, <built-in function print>, (1, None), {P}, {P}}}"),
        ("[*frozenset([None, 2]) | {str, 2}, *{v for v in 'ello'}]", "[None, 2, <class 'str'>, 'e', 'l', 'o']"),
        ("eval('{9, None}'), set('ab') ^ {'b', None}, {1, 2} & {2, len}", "({9, None}, {'a', None}, {2})"),
        ("names = {}; exec('s = {9, None}; i = id(s)', names); names['s'], names['i']", "({9, None}, 1)"),
        ("eval(compile('{9, None}', 'file', 'eval'))", "{9, None}"),
        ("exec('import os', {})", "ModuleNotFoundError: No module named 'os' here"),
        ("{1} <= {2, 1}, {1} == {1}, isinstance({1}, set), set[int], {1}.copy()", "(True, True, True, set[int], {1})"),
        ("s = {1}; s |= {None}; s.discard(1); s.update('z', [1]); s -= {'z'}; s, s.pop()", "({1}, None)"),
        (
            "{'a': 1, None: 2, len: 3}.keys() - [5] | {'b'}, {1: 2}.items() & [(1, 2)]",
            "({'a', None, <built-in function len>, 'b'}, {(1, 2)})",
        ),
        (
            "f = lambda: 0; str(f)[::-1], repr(f).upper()",
            "('>0x0 ta >adbmal< noitcnuf<', '<FUNCTION <LAMBDA> AT 0X0>')",
        ),
        (
            "f = lambda: 0; len(f'{f}{f!r:>40}'), len('%s' % f), len('{}'.format(f)), [len(format(f))]",
            "(66, 26, 26, [26])",
        ),
        (
            "[*map(str, [[].append])][0][-4:], sorted([max, min], key=str)",
            "('0x0>', [<built-in function max>, <built-in function min>])",
        ),
        ("isinstance('a', str), type('a') is str, str(5), str.upper('a')", "(True, True, '5', 'A')"),
        ("id(P), id(P()), id(P), id('x')", "(1, 2, 1, 3)"),
        ("hash(P()) == hash(P()), hash(None), {Q(), Q()}", "(False, 3, {<__main__.Q object>})"),
        ("hash(float('nan')), hash(1.5) == hash(3 / 2), hash('a') == hash('a')", "(1, True, True)"),
        ("lambda: 0, (n for n in ())", "(<function <lambda> at 0x0>, <generator object <genexpr> at 0x0>)"),
        ("[].append, object()", "(<built-in method append of list object at 0x0>, <object object at 0x0>)"),
        ("import random, time\nrandom.seed(); random.random(), time.time()", "(0.8444218515250481, 0.0)"),
        ("import datetime\ndatetime.date(2024, 2, 28) + datetime.timedelta(2)", "datetime.date(2024, 3, 1)"),
        (
            "import decimal\ndecimal.Decimal(1) / 7, '_decimal' in vars(decimal)",
            f"(Decimal('0.{'142857' * 4}1429'), False)",
        ),
        ("class D:\n  def __del__(self): print(1)\nd = D(); d.d = d; del d\nfor _ in range(2000): []", ""),
    ],
)
def test_no_address_shows_and_sets_keep_their_order(code: str, said: str) -> None:
    """Else an honest worker is refused for what another process had at another place in its memory."""
    assert say(CLASSES + code) == said


LAST_DIGITS = (
    "import math\nprint(sum(hash((math.sin(n / 7), math.exp(n / 99), (n + 1) ** 1.7)) % 997 for n in range(5000)))"
)


def test_functions_of_the_c_library_do_not_depend_on_the_processor() -> None:
    """sin, exp and pow of glibc have other last digits with and without fused multiply-add, on one machine's processor
    and another's. Outside, the variable that the sandbox has makes them those without.
    """
    said = {}
    for name, variables in (("own", {}), ("plain", ENVIRONMENT)):
        command = [sys.executable, "-S", "-c", LAST_DIGITS]
        said[name] = subprocess.run(command, env=variables, capture_output=True, check=True).stdout.decode().strip()
    assert say(LAST_DIGITS, steps=500_000) == said["plain"]
    if "fma" in Path("/proc/cpuinfo").read_text().split() and platform.libc_ver()[0] == "glibc":
        assert said["own"] != said["plain"]


# -- nothing gets out

REACH = "import random\nos = random._os\nprint("


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (REACH + "os.fork())", "OSError: [Errno 38] Function not implemented"),
        (REACH + "os.listdir('/home'))", "FileNotFoundError: [Errno 2] No such file or directory: '/home'"),
        (REACH + "os.open('/x', os.O_CREAT | os.O_RDWR))", "OSError: [Errno 30] Read-only file system: '/x'"),
        (REACH + "os.execv('/bin/sh', ['sh']))", "FileNotFoundError: [Errno 2] No such file or directory"),
        (REACH + "os.kill(1, 9))", "OSError: [Errno 38] Function not implemented"),
        (REACH + "os.urandom(4))", "NotImplementedError: /dev/urandom (or equivalent) not found"),
        (REACH + "sorted(os.listdir('/')))", "['dev', 'harness.py', 'lib', 'lib64', 'python', 'session.py']"),
        (REACH + "os.sys.modules['importlib._bootstrap'] is None)", "KeyError: 'importlib._bootstrap'"),
        ("import random\nrandom._os.sys.settrace(None)\nwhile True: pass", None),
        (REACH + "os.sys.modules['_decimal'])", "None"),
        ("__import__('socket')", "ModuleNotFoundError: No module named 'socket' here"),
        ("[c for c in object.__subclasses__() if c.__name__ == 'Popen']", "[]"),
    ],
)  # fmt: skip
def test_code_that_gets_at_the_real_modules_gets_no_further(code: str, said: str | None) -> None:
    """As the first list in tests/system/adversary/test_sandbox_escapes.py; the sandbox around the code is that one."""
    if said is None:
        with pytest.raises(SandboxFailed):
            say(code)
    else:
        assert say(code) == said


# -- doubt


@pytest.mark.parametrize(
    "code",
    [
        "[0] * 10**10",
        "try: [0] * 10**10\nexcept MemoryError: print('caught')",
        "10**10**10",
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        "sum(iter(int, 1))",
        "def f(n):\n    try: return f(n + 1)\n    except: return 7\nf(0)",
        "import collections\ncollections._sys.settrace(None)\nprint(1)",
        "import collections\ncollections._sys.stdout.close()",
        "import random\nrandom._os.abort()",
        "import random\nrandom._os.write(3, b'\\0\\0')\nrandom._os._exit(0)",
        "import random\nwhile True: random._os.write(3, b'x' * 65536)",
    ],
)
def test_what_may_end_otherwise_elsewhere_has_no_reply(code: str) -> None:
    """Memory, seconds and crashes are not the same everywhere: then nobody is told anything, and nobody is blamed."""
    with pytest.raises(SandboxFailed) as caught:
        say(code)
    assert caught.value.code == "sandbox_doubt"


def test_a_hostile_program_costs_a_verifier_no_more_than_its_budget() -> None:
    """A doubtful reply is the last of a submission; what is sure took half a second, and twenty of all is the most."""
    before = os.times()
    with pytest.raises(SandboxFailed):
        say("10**10**10")
    after = os.times()
    used = sum(after[:4]) - sum(before[:4])
    assert used < 2.0, "an answer to `code` has four seconds"


def test_slow_code_has_no_reply_though_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "SURE_CPU_SECONDS", 0.0)
    with pytest.raises(SandboxFailed, match="took") as caught:
        say("1 + 1")
    assert caught.value.code == "sandbox_doubt"


def test_equal_code_is_run_once_and_many_threads_get_the_same() -> None:
    """A group's completions are often equal, and a worker looks at its own group once more before it hands it in."""
    code = "import random\n{random.random() for _ in range(3)}, id(print)"
    busy = threading.Event()

    def burn() -> None:
        while not busy.is_set():
            sum(range(10_000))

    burning = threading.Thread(target=burn)
    burning.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            said = list(pool.map(lambda at: say(code, characters=1000 + at), range(8)))
    finally:
        busy.set()
        burning.join()
    assert len(set(said)) == 1
    before = run_cells.cache_info().hits
    say(code, characters=1000)
    assert run_cells.cache_info().hits == before + 1
