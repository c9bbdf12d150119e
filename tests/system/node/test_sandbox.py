"""The sandbox when something is wrong with it: then nothing follows, and nobody's answer is called wrong.

What it keeps in is tried in tests/system/adversary/test_sandbox_escapes.py.
"""

from __future__ import annotations

import itertools
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from sandboxing import expressions, impatient, needs_sandbox

from node.environments import EnvironmentFault, check_rewards, load_environment
from node.environments.code import Code
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason
from node.protocol.run import EnvironmentSpec, RunSpec
from node.sandbox import Sandbox, SandboxFailed, SandboxLimits, seccomp
from node.sandbox.root import PYTHON_VERSION, mounts
from node.submission.reader import VerifierFailed
from node.verification.measure import as_verifier_failure
from node.verification.plan import Rules
from node.verification.verify import undecided

REQUEST = b"expression 1000 5\nx * 3i 14\n"
CODE = EnvironmentSpec(name="code", arguments={"python": PYTHON_VERSION})


@pytest.fixture
def bubblewrap(tmp_path, monkeypatch):
    """Puts a program of that name in the place of the real one."""

    def put(script):
        path = tmp_path / "bwrap"
        path.write_text(f"#!{sys.executable} -IS\nimport os, signal, sys, time\n{textwrap.dedent(script)}")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return put


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def failure() -> SandboxFailed:
    """What the reward of a right answer raises."""
    source = expressions()
    problem = source.problem(0)
    with pytest.raises(SandboxFailed) as caught:
        source.reward(problem, f"</think>{problem.data['answer']}")
    return caught.value


# -- it fails closed


def test_without_bubblewrap_no_answer_is_run_and_none_is_wrong(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert failure().code == "sandbox_missing"
    assert "apt install bubblewrap" in str(failure())


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("sys.exit('bwrap: No permissions to create new namespace')", "sandbox_broken", "No permissions"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "sandbox_broken", "did not start"),
        ("print('Ready')\nprint('i 1')", "sandbox_broken", "did not start"),
        ("os.write(1, b'ready\\n')\nos.kill(os.getpid(), signal.SIGKILL)", "sandbox_broken", "signal 9"),
        ("os.write(1, b'ready\\n')\nsys.exit(137)", "sandbox_doubt", "killed from outside"),
        ("os.write(1, b'read')\nsys.exit(0)", "sandbox_broken", "did not start"),
    ],
)
def test_a_sandbox_that_breaks_down_raises_and_gives_no_reward(bubblewrap, script, code, said):
    bubblewrap(script)
    assert failure().code == code
    assert said in str(failure())


def test_a_sandbox_that_hangs_before_the_program_starts_raises(bubblewrap, monkeypatch):
    bubblewrap("time.sleep(60)")
    impatient(monkeypatch, wall_seconds=1.0)
    assert failure().code == "sandbox_broken"


def test_a_check_says_what_stands_against_it(bubblewrap, monkeypatch):
    bubblewrap("sys.exit('bwrap: setting up uid map: Permission denied')")
    with pytest.raises(SandboxFailed, match=r"uid map.*user namespaces") as caught:
        Sandbox().check()
    assert caught.value.code == "sandbox_unusable"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxFailed, match="apt install bubblewrap") as caught:
        Sandbox().check()
    assert caught.value.code == "sandbox_missing"


def test_a_check_wants_the_right_value_and_not_just_an_end(bubblewrap):
    bubblewrap("os.write(1, b'ready\\ni 41\\n')")
    with pytest.raises(SandboxFailed, match="self-test"):
        Sandbox().check()


def test_a_machine_without_a_filter_runs_nothing(monkeypatch, bubblewrap):
    bubblewrap("os.write(1, b'ready\\ni 42\\n')")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxFailed, match="riscv64"):
        Sandbox().run(REQUEST, max_bytes=5)


def test_what_lies_in_the_working_folder_is_not_taken_for_bubblewrap(tmp_path, monkeypatch, bubblewrap):
    """An empty entry in PATH means the folder where the verifier was started: downloads, say."""
    bubblewrap("os.write(1, b'ready\\ni 42\\n')")
    monkeypatch.chdir(tmp_path)
    for path in (os.pathsep, "."):
        monkeypatch.setenv("PATH", path)
        assert failure().code == "sandbox_missing"


def test_a_program_that_the_filter_does_not_hold_is_not_started():
    """bubblewrap refuses a kernel without filters; of one that takes them and does nothing, the harness finds out."""
    harness = [sys.executable, "-P", "-s", "-S", "-B", str(Path(seccomp.__file__).with_name("harness.py"))]
    ended = subprocess.run(harness, input=REQUEST, capture_output=True, check=False, timeout=30)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"filter" in ended.stderr


def test_a_verifier_or_auditor_of_a_run_that_executes_code_does_not_start_without_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    spec = RunSpec(name="code", environments=(EnvironmentSpec(name="arithmetic"), CODE))
    environments = [load_environment(environment) for environment in spec.environments]
    with pytest.raises(SandboxFailed, match="apt install bubblewrap"):
        Rules("ab" * 32, spec, environments)
    plain = RunSpec(name="plain", environments=spec.environments[:1])
    Rules("ab" * 32, plain, environments[:1])


def test_a_worker_needs_none_for_the_problems(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert load_environment(CODE).problem(1).prompt.startswith("Q:py ")


def test_another_python_than_the_runs_does_not_judge():
    """What code means changes between versions, and the auditor's verdict with it."""
    with pytest.raises(EnvironmentFault, match=r"3\.99") as caught:
        check_rewards([Code(python="3.99")])
    assert caught.value.code == "python_version"


def test_the_verdict_is_that_nothing_can_be_said(monkeypatch):
    """Neither a rejection of the worker nor a reward of 0; and the log does not tell what the machine looks like."""
    monkeypatch.setenv("PATH", "")
    source = expressions()
    problem = source.problem(0)
    with pytest.raises(VerifierFailed) as caught, as_verifier_failure("the reward"):
        source.reward(problem, f"</think>{problem.data['answer']}")
    verdict = undecided(caught.value, tokens=7)
    assert (verdict.outcome, verdict.reason) == (Outcome.INDETERMINATE, Reason.VERIFIER_FAILED)
    assert verdict.rewards is None
    assert verdict.detail == "SandboxFailed."


# -- it works


@needs_sandbox
def test_a_program_gives_its_answers_and_how_long_it_took():
    ended = Sandbox().run(REQUEST, max_bytes=5)
    assert (ended.answers, ended.complete) == (b"i 42\n", True)
    assert 0 < ended.cpu_seconds < 2
    assert not Sandbox(SandboxLimits(wall_seconds=20)).run(REQUEST, max_bytes=4).complete


@needs_sandbox
def test_the_sandbox_leaves_no_file_open_and_no_process_to_wait_for():
    children = psutil.Process().children
    before, processes = open_files(), {child.pid for child in children()}
    for _ in range(3):
        Sandbox().run(REQUEST, max_bytes=5)
    assert open_files() == before
    assert {child.pid for child in children()} == processes


@needs_sandbox
def test_a_program_that_cannot_be_limited_is_not_begun_and_leaves_nothing(monkeypatch):
    """A security module may forbid it. The program waits meanwhile, and must neither run nor wait for ever."""

    def refuse(*_):
        raise PermissionError("not you")

    monkeypatch.setattr(resource, "prlimit", refuse)
    before, files = {child.pid for child in psutil.Process().children(recursive=True)}, open_files()
    with pytest.raises(SandboxFailed, match="not you"):
        Sandbox().run(REQUEST, max_bytes=5)
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    assert open_files() == files


def test_no_folder_of_a_person_is_mounted():
    """Whole folders of the host are the interpreter's library, and nothing else."""
    arguments = mounts()
    sources = [arguments[at + 1] for at, word in enumerate(arguments) if word in {"--ro-bind", "--bind", "--dev-bind"}]
    folders = [source for source in sources if Path(source).is_dir()]
    assert len(folders) == 1
    assert folders[0].endswith(f"python{PYTHON_VERSION}")
    assert "--bind" not in arguments
    assert arguments[-2:] == ("--remount-ro", "/")


# -- the filter


def judged(program: bytes, *, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What a classic BPF machine makes of one system call."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("<HBBI", program))
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, operand = instructions[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x15:
            at += if_true if accumulator == operand else if_false
        elif operation == 0x35:
            at += if_true if accumulator >= operand else if_false
        else:
            assert operation == 0x06
            return operand


@pytest.mark.parametrize(
    ("architecture", "exit_group", "ioctl"), [(seccomp.X86_64, 231, 16), (seccomp.AARCH64, 94, 29)]
)
def test_the_filter_lets_through_what_is_on_its_list_and_nothing_else(architecture, exit_group, ioctl):
    program = seccomp.program(architecture)
    for number in range(1024):
        answer = judged(program, architecture=architecture, number=number, arguments=(200, 0x5412, 1))
        wanted = seccomp.ALLOW if number in seccomp.allowed(architecture) else seccomp.NO_SUCH_CALL
        assert answer == wanted, number
    for status, answer in ((0, seccomp.ALLOW), (127, seccomp.ALLOW), (128, seccomp.NO_SUCH_CALL)):
        assert judged(program, architecture=architecture, number=exit_group, arguments=(status,)) == answer
        assert judged(program, architecture=architecture, number=exit_group, arguments=(2**32 + status,)) == answer
    assert judged(program, architecture=architecture, number=ioctl, arguments=(0, 0x5451)) == seccomp.ALLOW
    fcntl, futex, limit = {seccomp.X86_64: (72, 202, 302), seccomp.AARCH64: (25, 98, 261)}[architecture]
    allowed = {fcntl: {0, 1, 2, 3, 1030}, futex: {1, 129}}
    for number, second in itertools.product(allowed, [*range(300), *range(1024, 1060)]):
        wanted = seccomp.ALLOW if second in allowed[number] else seccomp.NO_SUCH_CALL
        assert judged(program, architecture=architecture, number=number, arguments=(0, second)) == wanted
    for address, answer in ((0, seccomp.ALLOW), (1, seccomp.NO_SUCH_CALL), (2**32, seccomp.NO_SUCH_CALL)):
        assert judged(program, architecture=architecture, number=limit, arguments=(0, 0, address)) == answer
    assert judged(program, architecture=architecture, number=0x40000000) == seccomp.NO_SUCH_CALL
    for other in {0x40000003, 0x40000028, seccomp.X86_64, seccomp.AARCH64} - {architecture}:
        assert judged(program, architecture=other, number=0) == seccomp.KILL


@pytest.mark.parametrize(("architecture", "machine"), [(seccomp.X86_64, "x86_64"), (seccomp.AARCH64, "aarch64")])
def test_calls_by_which_programs_get_out_are_on_no_list(architecture, machine):
    """By name, so that a wrong number in the table shows; the numbers are the kernel's."""
    x86_64 = {"clone": 56, "fork": 57, "vfork": 58, "kill": 62, "ptrace": 101, "socket": 41, "mount": 165, "bpf": 321}
    aarch64 = {"clone": 220, "kill": 129, "ptrace": 117, "socket": 198, "mount": 40, "bpf": 280, "tgkill": 131}
    both = {"clone3": 435, "io_uring_setup": 425, "pidfd_open": 434, "memfd_secret": 447}
    out = {**(x86_64 if machine == "x86_64" else aarch64), **both}
    assert not seccomp.allowed(architecture) & set(out.values())


CALLS = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in map(int, sys.argv[1:]):
    assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1, number
    assert ctypes.get_errno() == errno.ENOSYS, (number, ctypes.get_errno())
print("all refused")
"""
OTHER_ABI = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid of i386); int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""


def filtered(code: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Python with ctypes under the filter alone: the sandbox's own has no ctypes."""
    filter_fd = os.memfd_create("filter")
    os.write(filter_fd, seccomp.program(seccomp.ARCHITECTURES[platform.machine()]))
    os.lseek(filter_fd, 0, os.SEEK_SET)
    bubblewrap = shutil.which("bwrap")
    assert bubblewrap is not None
    command = [bubblewrap, "--unshare-user", "--ro-bind", "/", "/", "--seccomp", str(filter_fd)]
    try:
        return subprocess.run(
            [*command, os.path.realpath(sys.executable), "-s", "-S", "-P", "-c", code, *arguments],
            env={"PYTHONHASHSEED": "0"},
            pass_fds=(filter_fd,),
            capture_output=True,
            check=False,
            timeout=30,
        )
    finally:
        os.close(filter_fd)


@needs_sandbox
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")
def test_the_kernel_refuses_what_the_filter_does_not_name():
    numbers = {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "clone": 56, "fork": 57, "vfork": 58,
        "clone3": 435, "socket": 41, "kill": 62, "tgkill": 234, "mount": 165, "unshare": 272, "setns": 308,
        "pivot_root": 155, "bpf": 321, "userfaultfd": 323, "perf_event_open": 298, "io_uring_setup": 425,
        "keyctl": 250, "add_key": 248, "init_module": 175, "kexec_load": 246, "memfd_create": 319, "execveat": 322,
        "personality": 135, "prctl": 157, "seccomp": 317, "nanosleep": 35, "getrandom": 318,
        "getpid by x32": 2**30 + 39,
    }  # fmt: skip
    result = filtered(CALLS, *map(str, numbers.values()))
    assert result.stdout == b"all refused\n", result.stderr.decode()


@needs_sandbox
@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86-64")
def test_32_bit_calls_end_the_program():
    assert filtered(OTHER_ABI).returncode == 128 + 31


# -- one layer without the other

ALLOW_ALL = b"".join(
    struct.pack("<HBBI", *instruction)
    for instruction in (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, {"x86_64": 24, "aarch64": 124}.get(platform.machine(), 0)),  # sched_yield, as the harness tries
        (0x06, 0, 0, seccomp.NO_SUCH_CALL),
        (0x06, 0, 0, seccomp.ALLOW),
    )
)
CONNECT = """
import _socket
def f(v):
    try:
        s = _socket.socket()
        s.connect(("127.0.0.1", {port}))
    except OSError:
        return 1
    return 2
"""


@needs_sandbox
def test_without_the_filter_there_is_still_no_network(monkeypatch):
    monkeypatch.setattr(seccomp, "program", lambda _: ALLOW_ALL)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = CONNECT.format(port=server.getsockname()[1]).encode()
        request = f"function 100000 {len(code)}\n".encode() + code + b"i 0\n"
        assert Sandbox().run(request, max_bytes=10).answers == b"i 1\n"


@needs_sandbox
def test_without_the_filter_it_still_is_alone_and_nobody(monkeypatch):
    """It sees no other process, is the first of its namespace, and has no capabilities."""
    monkeypatch.setattr(seccomp, "program", lambda _: ALLOW_ALL)
    code = b"""
import os
def f(v):
    try: os.chroot('/python')
    except OSError: pass
    else: return [-1]
    return [os.getpid(), os.getppid(), os.getuid(), os.uname().nodename == 'sandbox' and 1]
"""
    request = f"function 100000 {len(code)}\n".encode() + code + b"i 1\n"
    ended = Sandbox().run(request, max_bytes=100)
    assert ended.answers == b"l 1 0 65534 1\n"
