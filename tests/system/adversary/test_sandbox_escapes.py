"""Code that tries to get out of the sandbox, or to get a reward without an answer.

Each comes through the door: as the text of a completion. Where an attempt can tell whether it succeeded, the code
gives the right answer only if it did not: then a reward of 1 shows that it ran, that it tried, and that it failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from locations import ROOT
from sandboxing import expressions, functions, impatient, limited, needs_sandbox

from node.sandbox import SandboxFailed, SandboxLimits
from node.sandbox.root import ENVIRONMENT

pytestmark = needs_sandbox

SOON = SandboxLimits().wall_seconds / 2
"""What ends before this was not ended by the sandbox's clock."""

SOURCE = functions()
PROBLEM = SOURCE.problem(3)
RIGHT = PROBLEM.data["answer"].removeprefix("```python\ndef f(v):\n").removesuffix("\n```")


def reward(source: str) -> float:
    """Of a completion with this code."""
    return SOURCE.reward(PROBLEM, f"<think>hm</think>\n```python\n{textwrap.dedent(source).strip()}\n```")


def answering(before: str = "", within: str = "pass") -> str:
    """A right answer after something else: code that runs first, and code that runs with every case."""
    body = textwrap.indent(textwrap.dedent(within).strip(), "    ")
    return f"{textwrap.dedent(before).strip()}\ndef f(v):\n{body}\n{RIGHT}\n"


def attempt(statement: str, *, stopped_by: str = "OSError") -> float:
    """The reward of code that answers rightly if `statement` ended in one of the errors `stopped_by`, and only then."""
    return reward(
        answering(
            f"import os, sys\ntry:\n{textwrap.indent(textwrap.dedent(statement).strip(), '    ')}\n"
            f"except ({stopped_by},):\n    escaped = False\nelse:\n    escaped = True\n",
            "if escaped: return None",
        )
    )


def test_an_attempt_that_succeeds_is_not_taken_for_one_that_failed():
    assert attempt("pass") == 0.0
    assert attempt("raise OSError") == 1.0
    assert attempt("raise TypeError") == 0.0


# -- out of the process


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET"])
def test_network(family):
    assert attempt(f"import _socket; _socket.socket(_socket.{family}, _socket.SOCK_DGRAM)") == 1.0


@pytest.mark.parametrize(
    "statement",
    [
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn(sys.executable, [sys.executable], {})",
        "if os.system('true') != 0: raise OSError",
        "import _thread; _thread.start_new_thread(print, ())",
    ],
)
def test_another_process_or_thread(statement):
    assert attempt(statement, stopped_by="OSError, RuntimeError") == 1.0


def test_a_fork_bomb():
    bomb = "while True:\n    try: os.fork()\n    except OSError: pass"
    assert reward(answering(f"import os\n{bomb}")) == 0.0


@pytest.mark.parametrize("program", ["/bin/sh", "/usr/bin/env", "/proc/self/exe", "/dev/null", "/harness.py"])
def test_another_program(program):
    assert attempt(f"os.execv('{program}', ['x'])") == 1.0


def test_a_fresh_interpreter_has_the_same_limits_and_no_other_input():
    """`exec` of the interpreter itself is possible. It leaves the harness behind, and wins nothing."""
    inside = "import os; os.write(3, b'l\\n'); os.fork()"
    assert reward(answering(f"import os, sys\nos.execv(sys.executable, ['python', '-S', '-c', {inside!r}])")) == 0.0


@pytest.mark.parametrize(
    "call", ["os.kill(1, 9)", "os.kill(0, 9)", "os.kill(-1, 9)", "os.kill(os.getpid(), 15)", "os.killpg(0, 9)"]
)
def test_signals(call):
    assert attempt(call) == 1.0


def test_finding_the_parent():
    assert attempt("if os.getppid() <= 0: raise OSError") == 1.0
    assert attempt("assert os.getpid() == 1", stopped_by="AssertionError") == 0.0


@pytest.mark.parametrize(
    "statement",
    [
        "os.chroot('/python')",
        "os.setuid(0)",
        "os.setgid(0)",
        "os.setgroups([0])",
        "os.setresuid(0, 0, 0)",
        "os.sethostname('x')" if hasattr(os, "sethostname") else "import _socket; _socket.sethostname('x')",
        "os.unshare(0x10000000)" if hasattr(os, "unshare") else "os.pidfd_open(1)",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "os.setpriority(os.PRIO_PROCESS, 0, -20)",
        "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",  # TIOCSTI: type into the terminal
    ],
)
def test_more_privileges(statement):
    assert attempt(statement) == 1.0


def test_raising_the_limits():
    for limit in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_NOFILE"):
        statement = f"import resource; resource.setrlimit(resource.{limit}, (resource.RLIM_INFINITY,) * 2)"
        assert attempt(statement, stopped_by="OSError, ValueError") == 1.0, limit


def test_lowering_the_limits():
    """Of processor time, code could else have itself killed as if from outside, and no wrong answer be wrong."""
    for limit in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_STACK"):
        assert attempt(f"import resource; resource.setrlimit(resource.{limit}, (1, 1))") == 1.0, limit


@pytest.mark.parametrize(
    "call",
    [
        "fcntl.lockf(open('/dev/null', 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.fcntl(open('/harness.py'), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
        "fcntl.fcntl(os.open('/python', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE)",
        "fcntl.fcntl(3, 1031, 2**20)",  # F_SETPIPE_SZ: a buffer of the kernel's
    ],
)
def test_holding_on_to_files_of_the_host(call):
    """They are the same files in every sandbox, and outside: who locks one keeps others waiting, or tells them so."""
    assert attempt(f"import fcntl; {call}") == 1.0


def test_pushing_the_hosts_files_out_of_memory():
    """Of a library that all of the host uses. A program that has it read again and again waits for its disk, too."""
    pageout = "import mmap; mmap.mmap(os.open(os.__file__, os.O_RDONLY), 0, prot=mmap.PROT_READ).madvise(21)"
    assert attempt(pageout) == 1.0


def test_limiting_another_process():
    assert attempt("import resource; resource.prlimit(2, resource.RLIMIT_AS)") == 1.0


# -- into the file system


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/root", "/home", "/work", "/tmp", "/proc/self/mem", "/sys", "/run", "/var", "/usr", "/bin/sh"],
)
def test_files_of_the_host(path):
    assert attempt(f"os.stat({path!r})") == 1.0


def test_nothing_is_there_but_the_interpreter():
    listed = "sorted(os.listdir('/'))"
    assert (
        attempt(f"if set({listed}) <= {{'dev', 'harness.py', 'lib', 'lib64', 'python', 'session.py'}}: raise OSError")
        == 1.0
    )
    assert attempt("if os.listdir('/dev') == ['null']: raise OSError") == 1.0
    assert attempt("if sorted(os.listdir('/python')) == ['bin', sys.platlibdir]: raise OSError") == 1.0


@pytest.mark.parametrize("module", ["msgspec", "numpy", "torch", "node", "pip", "setuptools"])
def test_packages_of_the_host(module):
    assert attempt(f"import {module}", stopped_by="ImportError") == 1.0


@pytest.mark.parametrize(
    "statement",
    [
        "open('/x', 'w')",
        "open('/tmp/x', 'w')",
        "open('/dev/shm/x', 'w')",
        "open('/harness.py', 'w')",
        "open(os.__file__, 'a')",
        "open(sys.executable, 'r+b')",
        "os.remove('/harness.py')",
        "os.rename('/harness.py', '/x')",
        "os.mkdir('/x')",
        "os.chmod('/harness.py', 0o777)",
        "os.utime('/harness.py')",
        "os.mkfifo('/x')",
        "os.memfd_create('x')",
    ],
)
def test_writing(statement):
    assert attempt(statement) == 1.0


@pytest.mark.parametrize("statement", ["os.symlink('/etc/passwd', '/x')", "os.link('/harness.py', '/x')"])
def test_links(statement):
    assert attempt(statement) == 1.0


@pytest.mark.parametrize(
    "statement", ["os.mknod('/x', 0o600 | 0o60000, 0x800)", "open('/dev/mem')", "open('/dev/sda')"]
)
def test_devices(statement):
    assert attempt(statement) == 1.0


def test_files_that_were_left_open():
    """The filter, the request and bubblewrap's own pipes must be closed; what is left is the answers' pipe."""
    counting = """
        found = []
        for file in range(3, 16):
            try: found.append(os.fstat(file).st_mode & 0o170000)
            except OSError: pass
        if found == [0o10000]: raise OSError
    """
    assert attempt(counting) == 1.0


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    allowed = {*ENVIRONMENT, "PWD", "LC_CTYPE"}
    assert attempt(f"if os.environ.keys() <= {allowed}: raise OSError") == 1.0


# -- more than its share


def test_a_memory_bomb():
    assert reward(answering("x = b'x' * 10**10")) == 0.0
    assert reward(answering("x = [b'x' * 2**20]\nwhile True: x += x")) == 0.0
    assert attempt("x = bytearray(2**28)", stopped_by="MemoryError") == 1.0


@pytest.mark.parametrize("loop", ["while True: pass", "for _ in iter(int, 1): pass", "x = [0 for _ in iter(int, 1)]"])
def test_an_endless_loop_ends_after_so_many_steps_whatever_the_machine(loop, monkeypatch):
    """Not by a clock, which is another one elsewhere: that of the processor would come too late here."""
    limited(monkeypatch, SandboxLimits(cpu_seconds=1000))
    assert reward(answering(loop)) == 0.0


def test_an_endless_loop_that_cannot_be_interrupted():
    """Inside of one C function no step is counted, and no handler runs."""
    assert expressions().reward(expressions().problem(0), "</think>sum(iter(int,1))") == 0.0


def test_switching_off_the_count_of_steps():
    assert reward(answering("import sys\nsys.settrace(None)\nwhile True: pass")) == 0.0


def test_surviving_the_signal_of_the_processor_limit():
    ignoring = "import signal, sys\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nsys.settrace(None)\nwhile True: pass"
    assert reward(answering(ignoring)) == 0.0


@pytest.mark.parametrize("seconds", [-1, 0.02])
def test_sleeping_for_ever(seconds):
    """Who takes naps uses so little processor time that it looks as if a busy machine gave it none."""
    napping = f"""
        import _thread, sys
        sys.settrace(None)
        lock = _thread.allocate_lock()
        lock.acquire()
        while True:
            lock.acquire(True, {seconds})
            sum(range(200_000))
    """
    before = time.monotonic()
    assert reward(answering(napping)) == 0.0
    assert time.monotonic() - before < SOON


@pytest.mark.parametrize(
    "call", ["select.select([], [], [], 9)", "select.poll().poll(9000)", "open(0).read(); raise OSError"]
)
def test_sleeping_by_the_kernel(call):
    assert attempt(f"import select\n{call}") == 1.0


def test_waiting_for_a_signal():
    before = time.monotonic()
    assert reward(answering("import signal\nsignal.pause()")) == 1.0
    assert time.monotonic() - before < SOON


def test_endless_output():
    assert reward(answering("while True: print('x' * 10**6)")) == 0.0
    before = time.monotonic()
    assert reward(answering("import os\nwhile True: os.write(3, b'x' * 4096)")) == 0.0
    assert time.monotonic() - before < SOON


@pytest.mark.parametrize("value", ["10**10**9", "1 << 10**10", "2**63", "[2**64] * 3"])
def test_enormous_numbers(value):
    assert reward(f"def f(v):\n    return {value}") == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "(" * 10_000 + ")" * 10_000,
        "[" * 50_000,
        "-" * 60_000 + "1",
        "x = " + "+".join(["1"] * 30_000),
        "lambda: " * 5_000 + "0",
        "x" + ".x" * 20_000,
        "\n".join(" " * depth + "if 1:" for depth in range(150)),
        "\x00",
        "\ufeff\u202e",
        "# coding: utf-7\n+AGE-",
        "def f(v): return " + "9" * 5_000,
    ],
)
def test_source_that_is_hard_to_parse(code):
    assert reward(code) == 0.0


def test_answers_that_are_hard_to_write_down():
    assert reward("def f(v):\n    x = []\n    for _ in range(9999): x = [x]\n    return x") == 0.0
    assert reward("def f(v):\n    v.append(v)\n    return v") == 0.0
    assert reward("def f(v):\n    return [0] * 10**7") == 0.0


# -- crashing


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(v): return f(v)",
        "def f(v): return f(v)",
        "def f(v): pass\nf.__code__ = f.__code__.replace(co_code=b'\\xff' * 100)",
        "import os\nos.abort()",
        "raise SystemExit(0)",
        "import sys\nsys.exit(0)",
        "def f(v): raise KeyboardInterrupt",
        "import sys\nsys.modules.clear()",
        "import builtins\nbuiltins.__dict__.clear()",
    ],
)
def test_a_crash_or_an_early_end_is_the_codes_own(code):
    assert reward(code) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "import mmap\npage = mmap.mmap(-1, 4096)\npage.resize(2**20)\npage[2**19]",
        "import resource, sys\nsys.settrace(None)\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
    ],
    ids=["SIGBUS", "SIGKILL"],
)
def test_a_signal_that_looks_like_the_machines(code):
    assert reward(code) == 0.0


@pytest.mark.parametrize("status", [0, 1, 127, 128, 137, 139, 255, -1])
def test_an_exit_that_looks_like_being_killed_from_outside(status):
    """Otherwise code could make its verdict indeterminate, again and again, by leaving with status 128 + 9."""
    assert reward(answering(f"import os\nos._exit({status})")) == 0.0


def test_what_is_left_to_run_at_the_end_is_not_run():
    late = """
        import atexit, sys
        def forever():
            while True: pass
        class Late:
            __del__ = lambda self: forever()
        late = Late()
        late.self = late
        atexit.register(forever)
    """
    before = time.monotonic()
    assert reward(answering(late)) == 1.0
    assert time.monotonic() - before < SOON


# -- a reward without an answer


@pytest.mark.parametrize("text", ["passed", "ready\\n", '{\\"reward\\": 1.0}', "l\\n" * 8, "i 0\\n" * 8, "1.0", ""])
def test_writing_results_into_the_pipe(text):
    """What comes through it are answers, and never a judgement."""
    assert reward(f'import os\nos.write(3, b"{text}")\nos._exit(0)') == 0.0
    assert reward(f'print("{text}", flush=True)\nraise SystemExit(0)') == 0.0


def test_right_answers_followed_by_anything_else_are_not_right():
    assert reward(answering()) == 1.0
    assert reward(answering("import os\nos.write(3, b'i 1\\n')")) == 0.0


@pytest.mark.parametrize(
    "replacement",
    [
        "import __main__\n__main__.encode = lambda value: 'passed'",
        "import __main__\n__main__.values = lambda *_: []",
        "import builtins\nbuiltins.str = lambda _: '0'\nbuiltins.map = lambda *_: ['0']",
        "import sys\nsys._getframe(2).f_locals['cases'].clear()",
        "import sys, os\nos.write = lambda *_: 0\nos._exit = lambda _: None",
    ],
)
def test_replacing_the_harness(replacement):
    assert reward(answering(replacement, "return []")) == 0.0


def test_the_expected_values_are_nowhere_in_its_memory():
    """It looks at every object there is, and at every frame. The outputs are in it in disguise, to compare with."""
    disguised = [[value ^ 5 for value in output] for output in PROBLEM.data["outputs"] if len(output) > 2]
    assert disguised
    searching = f"""
        import gc, sys
        reachable, frame = gc.get_objects(), sys._getframe()
        while frame is not None:
            reachable += [frame.f_locals, frame.f_globals]
            frame = frame.f_back
        lists = [x for x in reachable if type(x) is list]
        for x in reachable:
            if type(x) is dict: lists += [y for y in list(x.values()) if type(y) is list]
        lists += [z for y in list(lists) for z in y if type(z) is list]
        sys.settrace(None)
        wanted = [[value ^ 5 for value in output] for output in {disguised}]
        given = {[case for case in PROBLEM.data["inputs"] if len(case) > 2][:1]}
        if not any(given[0] == x for x in lists if x is not given[0]): raise TypeError
        if not any(x == y for x in lists for y in wanted): raise OSError
    """
    assert attempt(searching) == 1.0


@pytest.mark.parametrize(
    "value",
    [
        "type('Any', (), {'__eq__': lambda *_: True})()",
        "type('Any', (int,), {'__eq__': lambda *_: True, '__str__': lambda _: '1'})()",
        "type('Any', (list,), {'__eq__': lambda *_: True, '__iter__': lambda _: iter(())})()",
        "[type('Any', (int,), {'__str__': lambda _: 'passed'})()]",
        "True",
        "None",
        "(x for x in v)",
        "'passed'",
    ],
)
def test_values_that_claim_to_equal_everything(value):
    assert reward(f"def f(v): return {value}") == 0.0


def test_a_class_of_numbers_is_not_a_number_even_if_right():
    assert reward(answering(within="class Own(list): pass") + "g = f\ndef f(v): return tuple(g(v))") == 0.0
    assert reward(answering() + "g = f\nclass Own(list): pass\ndef f(v): return Own(g(v))") == 0.0


def test_one_answer_cannot_leave_anything_for_the_next():
    """A group's completions are judged one after the other."""
    for trace in ("open('/x', 'w')", "import os; os.mkdir('/tmp')", "import sys; sys.hello = 1"):
        reward(f"try:\n    {trace}\nexcept OSError: pass\ndef f(v): return v")
    assert attempt("import os, sys; os.stat('/x'), sys.hello") == 1.0
    assert attempt("if not hasattr(sys, 'hello'): raise OSError") == 1.0


# -- another reward on another machine


@pytest.mark.parametrize("module", ["time", "random", "datetime", "_datetime", "secrets", "uuid", "tempfile"])
def test_modules_that_are_not_the_same_everywhere(module):
    expected = "ImportError, OSError, NotImplementedError"
    assert attempt(f"import {module}", stopped_by=expected) == 1.0


@pytest.mark.parametrize("call", ["os.urandom(8)", "os.getrandom(8)", "os.uname()", "os.getloadavg()"])
def test_asking_about_the_machine(call):
    assert attempt(call, stopped_by="OSError, NotImplementedError") == 1.0


def test_the_hash_of_a_text_is_the_same_in_every_run():
    """Else the order of a set would be another for the auditor, and the operator would look like a liar."""
    known = (
        subprocess.run(
            [sys.executable, "-c", "print(hash('abc'))"], env={"PYTHONHASHSEED": "0"}, capture_output=True, check=True
        )
        .stdout.decode()
        .strip()
    )
    assert attempt(f"if hash('abc') == {known}: raise OSError") == 1.0


# -- what stays behind

WAITING = """
import sys
from sandboxing import functions
code = "sum(iter(int, 1))"
print("begun", flush=True)
functions().reward(functions().problem(3), f"</think>```python\\n{code}\\n```")
"""


def test_nothing_outlives_a_verifier_that_was_killed():
    root = ROOT
    verifier = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests" / "support"), *sys.path])},
    )
    assert verifier.stdout is not None
    verifier.stdout.readline()
    deadline = time.monotonic() + 20
    below: list[psutil.Process] = []
    while len(below) < 2 and time.monotonic() < deadline:
        below = psutil.Process(verifier.pid).children(recursive=True)
        time.sleep(0.05)
    verifier.send_signal(signal.SIGKILL)
    verifier.wait()
    verifier.stdout.close()
    _, alive = psutil.wait_procs(below, timeout=10)
    assert len(below) >= 2
    assert not alive


def test_nothing_is_left_when_a_program_was_ended(monkeypatch):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    files = len(list(Path("/proc/self/fd").iterdir()))
    impatient(monkeypatch, wall_seconds=2.0)
    with pytest.raises(SandboxFailed):
        reward(answering("import os\nos.close(3)\nsum(iter(int, 1))"))
    reward(answering("import os\nwhile True: os.write(3, b'x' * 4096)"))
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_a_machine_that_is_too_busy_is_not_the_codes_fault(monkeypatch):
    """Its time ran out while it was running, not asleep: that says nothing about the code."""
    impatient(monkeypatch, wall_seconds=2.0)
    with pytest.raises(SandboxFailed) as caught:
        reward(answering("import sys\nsys.settrace(None)\nwhile True: pass"))
    assert caught.value.code == "sandbox_doubt"


def test_a_right_answer_that_is_slow_here_might_fail_elsewhere():
    slow = "import sys\nsys.settrace(None)\ndel sys.modules['time']\nimport time\nwhile time.process_time() < 1: pass"
    with pytest.raises(SandboxFailed, match="correct answer took") as caught:
        reward(answering(slow))
    assert caught.value.code == "sandbox_doubt"
