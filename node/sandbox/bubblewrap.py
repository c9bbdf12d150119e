"""Run one program per sandbox with bubblewrap: namespaces, read-only root, system call filter, resource limits.

How an end is attributed:

- the program exits, crashes, uses up its steps or processor time, or writes too much: its own fault;
- it never starts, is killed from outside, or gets no processor time: this machine's, and SandboxFailed is raised. No
  allowed system call lets a program wait, or have itself killed so.

Not guaranteed: that the kernel has no vulnerability behind the 45 allowed system calls.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import select
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from node.sandbox import seccomp
from node.sandbox.errors import SandboxFailed
from node.sandbox.harness import READY
from node.sandbox.root import COMMAND, ENVIRONMENT, mounts

INSTALL: Final = "where answers are run, install it: apt install bubblewrap"
_UNUSABLE = (
    "allow unprivileged user namespaces here (Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0; "
    "in Docker: --security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
)
_ISOLATION = (
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"),
    *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL"),
    # As process 1 of its namespace it leaves nothing behind and cannot be killed from within.
    *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"),
)
_CHILD = re.compile(rb'"child-pid": ([0-9]+)')
_READ_BYTES = 64 * 1024
CPU_SECONDS = 4
_LIMITS: Final = (
    (resource.RLIMIT_AS, 256 * 1024 * 1024),
    (resource.RLIMIT_STACK, 8 * 1024 * 1024),
    (resource.RLIMIT_NOFILE, 16),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_NPROC, 0),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
)
"""Set from outside before the program starts, with that of processor time: the filter forbids setting limits."""

_MAX_COMPLAINT_BYTES = 500
_MIN_CPU_LIMIT_SHARE = 0.5
"""A program killed after at least this share of its CPU limit was killed by the limit: the kernel counts ticks, which
on a shared machine exceed the time the process had.
"""

_SELF_TEST = b"expression 1000 5\nx * 3i 14\n", b"i 42\n"


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """`wall_seconds` is far above `cpu_seconds`, so that a busy machine need not fail."""

    wall_seconds: float = 30.0
    cpu_seconds: int = CPU_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Outcome of a program.

    `answers` is its output, truncated at the limit; `complete` means exit status 0. `cpu_seconds` includes the
    interpreter's start, and is 0 for a program ended from here.
    """

    answers: bytes
    complete: bool
    cpu_seconds: float


class _StopReason(Enum):
    """Why reading from a program stopped."""

    ENDED = auto()
    TOO_MUCH = auto()
    TOO_LATE = auto()


class Sandbox:
    """Runs programs, each in its own sandbox; thread-safe."""

    def __init__(self, limits: SandboxLimits = SandboxLimits()) -> None:
        self._limits = limits

    def check(self) -> None:
        """Raise SandboxFailed, with what to do, unless a known program gives the expected output."""
        request, answers = _SELF_TEST
        try:
            result = self.run(request, max_bytes=len(answers))
        except SandboxFailed as error:
            if error.code == "sandbox_missing":
                raise
            raise SandboxFailed(f"bubblewrap does not work: {error}; {_UNUSABLE}", code="sandbox_unusable") from error
        if not result.complete or result.answers != answers:
            raise SandboxFailed(f"sandbox self-test gave {result}", code="sandbox_unusable")

    def run(self, request: bytes, *, max_bytes: int) -> ProgramResult:
        """Run the program in `request` (see `node.sandbox.harness`), reading at most `max_bytes` of its answers.

        Raises SandboxFailed.
        """
        deadline = time.monotonic() + self._limits.wall_seconds
        with contextlib.ExitStack() as files:
            try:
                process = _Process(request, files, cpu_limit=self._limits.cpu_seconds)
                return _judge(process, deadline=deadline, max_bytes=max_bytes)
            except (OSError, subprocess.SubprocessError) as error:
                raise SandboxFailed(f"program cannot be run: {error}") from error


class _Process:
    """A bubblewrap process and its pipes; closing `files` also kills whatever still runs."""

    def __init__(self, request: bytes, files: contextlib.ExitStack, *, cpu_limit: int) -> None:
        # An empty or relative entry would mean the working folder, which is untrusted.
        folders = filter(os.path.isabs, os.get_exec_path())
        bubblewrap = shutil.which("bwrap", path=os.pathsep.join(folders))
        if bubblewrap is None:
            raise SandboxFailed(f"bubblewrap is missing; {INSTALL}", code="sandbox_missing")
        self._files = files
        self.cpu_limit = cpu_limit
        self.answers, answers_in = self._pipe()
        self._info_pipe, told_in = self._pipe()
        wait_for, self._start_pipe = self._pipe()
        self._close_later(self._start_pipe)
        self._stderr_file = self._memory_file(b"")
        filter_fd = self._memory_file(_seccomp_program())
        options = ("--seccomp", str(filter_fd), "--info-fd", str(told_in), "--block-fd", str(wait_for))
        variables = [part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)]
        self._bubblewrap = subprocess.Popen(  # noqa: S603  (arguments of ours; the code is in the request)
            [bubblewrap, *_ISOLATION, *variables, *mounts(), "--chdir", "/", *options, *COMMAND],
            stdin=self._memory_file(request),
            stdout=answers_in,
            stderr=self._stderr_file,
            pass_fds=(filter_fd, told_in, wait_for),
            env={},
        )
        os.close(answers_in)
        os.close(told_in)
        try:
            self.exited = self._close_later(os.pidfd_open(self._bubblewrap.pid))
        except OSError:
            self._bubblewrap.kill()
            self._bubblewrap.wait()
            raise
        files.callback(self.end)
        self._child: int | None = None
        self.cpu_seconds = 0.0

    def start(self, deadline: float) -> None:
        """Set the limits of the waiting process in the sandbox and let it start, if bubblewrap got that far."""
        info = b""
        while (
            b"}" not in info
            and _readable(self._info_pipe, deadline)
            and (piece := os.read(self._info_pipe, _READ_BYTES))
        ):
            info += piece
        if (match := _CHILD.search(info)) is None:
            return
        child = int(match[1])
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):  # it has ended already
            self._child = self._close_later(os.pidfd_open(child))
            self._files.callback(self.end)  # must run before the descriptor is closed
            for limit, value in (*_LIMITS, (resource.RLIMIT_CPU, self.cpu_limit)):
                resource.prlimit(child, limit, (value, value))
            os.write(self._start_pipe, b"\n")

    def error_output(self) -> str:
        """Return the error output of bubblewrap or the interpreter."""
        return (
            os.pread(self._stderr_file, _MAX_COMPLAINT_BYTES, 0).decode(errors="replace").strip() or "no error output"
        )

    def end(self) -> int:
        """Kill whatever still runs, and return bubblewrap's exit status as subprocess does."""
        if self._bubblewrap.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # bubblewrap ends with its child, and then reports the child's resource usage.
                signal.pidfd_send_signal(self.exited if self._child is None else self._child, signal.SIGKILL)
            _, status, usage = os.wait4(self._bubblewrap.pid, 0)
            self.cpu_seconds = usage.ru_utime + usage.ru_stime
            self._bubblewrap.returncode = os.waitstatus_to_exitcode(status)
        return self._bubblewrap.returncode

    def _pipe(self) -> tuple[int, int]:
        reading, writing = os.pipe()
        return self._close_later(reading), writing

    def _memory_file(self, content: bytes) -> int:
        """Create an anonymous file with `content`, positioned at its start."""
        file = self._close_later(os.memfd_create("sandbox"))
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
        return file

    def _close_later(self, file: int) -> int:
        self._files.callback(os.close, file)
        return file


def _judge(process: _Process, *, deadline: float, max_bytes: int) -> ProgramResult:
    process.start(deadline)
    stop, written = _read(process, deadline=deadline, max_bytes=len(READY) + max_bytes)
    status = process.end()
    if not written.startswith(READY):
        raise SandboxFailed(f"program did not start ({status}): {process.error_output()}")
    answers = written[len(READY) :]
    if stop is _StopReason.TOO_MUCH:
        return ProgramResult(answers=answers, complete=False, cpu_seconds=0.0)
    if stop is _StopReason.TOO_LATE:
        raise SandboxFailed(
            "program timed out without using its CPU time: this machine is too busy", code="sandbox_doubt"
        )
    if status < 0:
        raise SandboxFailed(f"bubblewrap was killed by signal {-status}")
    killed = status - seccomp.LEAST_SIGNAL_STATUS == signal.SIGKILL
    if killed and process.cpu_seconds < process.cpu_limit * _MIN_CPU_LIMIT_SHARE:
        # A program cannot kill itself so; mostly it is the kernel, out of memory.
        raise SandboxFailed("program was killed from outside, probably for lack of memory", code="sandbox_doubt")
    return ProgramResult(answers=answers, complete=status == 0, cpu_seconds=process.cpu_seconds)


def _read(process: _Process, *, deadline: float, max_bytes: int) -> tuple[_StopReason, bytes]:
    """Read what the program writes until it exits, exceeds `max_bytes`, or the deadline passes."""
    written, poller = b"", select.poll()
    for file in (process.answers, process.exited):
        poller.register(file, select.POLLIN)
    while len(written) <= max_bytes:
        ready = {file for file, _ in poller.poll(_milliseconds_until(deadline))}
        if not ready:
            return _StopReason.TOO_LATE, written
        if process.answers not in ready:
            return _StopReason.ENDED, written
        piece = os.read(process.answers, max_bytes + 1 - len(written))
        written += piece
        if not piece:
            poller.unregister(process.answers)
    return _StopReason.TOO_MUCH, written


def _readable(file: int, deadline: float) -> bool:
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(_milliseconds_until(deadline)))


def _milliseconds_until(deadline: float) -> int:
    return max(0, round(1000 * (deadline - time.monotonic())))


def _seccomp_program() -> bytes:
    machine = platform.machine()
    if machine not in seccomp.ARCHITECTURES:
        raise SandboxFailed(f"there is no system call filter for {machine}", code="sandbox_unusable")
    return seccomp.program(seccomp.ARCHITECTURES[machine])
