"""One program in one sandbox of its own, by bubblewrap: namespaces, a read-only root, a system call filter, limits.

Whose fault an end is:

- the program exits, crashes, uses up its steps or its processor time, or writes too much: its own;
- it never starts, is killed from outside, or makes no use of its time because it gets none: this machine's, and
  then SandboxFailed says that nothing follows. No call is left by which a program can wait or have itself killed so.

Not guaranteed: that the kernel has no hole behind the 45 system calls that are left.
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
    # As process 1 of its namespace it leaves nothing behind, and cannot be killed from within.
    *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"),
)
_CHILD = re.compile(rb'"child-pid": ([0-9]+)')
_READ_BYTES = 64 * 1024
CPU_SECONDS = 4
_LIMITS: Final = (
    (resource.RLIMIT_AS, 256 * 1024 * 1024),
    (resource.RLIMIT_STACK, 8 * 1024 * 1024),
    (resource.RLIMIT_CPU, CPU_SECONDS),
    (resource.RLIMIT_NOFILE, 16),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_NPROC, 0),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
)
"""Set from outside, before the program begins: from within, the filter lets nobody set any."""

_MAX_COMPLAINT_BYTES = 500
_CPU_LIMIT_COUNTS = 0.5
"""The part of its processor time behind which a killed program was ended by that limit: the kernel holds it to what
its ticks saw, which on a machine that shares its processors is more than what the process had."""

_SELF_TEST = b"expression 1000 5\nx * 3i 14\n", b"i 42\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """`wall_seconds` is many times the processor time that is allowed, so that a busy machine need not fail."""

    wall_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a program.

    `answers` is what it wrote, cut off behind the limit; `complete` says that it ended by itself, with status 0.
    `cpu_seconds` includes the start of the interpreter, and is 0 for a program that was ended from here.
    """

    answers: bytes
    complete: bool
    cpu_seconds: float


class _Stop(Enum):
    """Why nothing more is read from a program."""

    ENDED = auto()
    TOO_MUCH = auto()
    TOO_LATE = auto()


class Sandbox:
    """Runs programs, each in a sandbox of its own; safe to share between threads."""

    def __init__(self, limits: Limits = Limits()) -> None:
        self._limits = limits

    def check(self) -> None:
        """Raise SandboxFailed, with what to do, unless a known program gives what it must."""
        request, answers = _SELF_TEST
        try:
            ended = self.run(request, max_bytes=len(answers))
        except SandboxFailed as error:
            if error.code == "sandbox_missing":
                raise
            raise SandboxFailed(f"bubblewrap does not work: {error}; {_UNUSABLE}", code="sandbox_unusable") from error
        if not ended.complete or ended.answers != answers:
            raise SandboxFailed(f"a known program gave {ended}", code="sandbox_unusable")

    def run(self, request: bytes, *, max_bytes: int) -> Ended:
        """Run the program of `request` (see `node.sandbox.harness`), and read at most `max_bytes` of answers.

        Raises SandboxFailed.
        """
        deadline = time.monotonic() + self._limits.wall_seconds
        with contextlib.ExitStack() as files:
            try:
                return _judge(_Process(request, files), deadline=deadline, max_bytes=max_bytes)
            except (OSError, subprocess.SubprocessError) as error:
                raise SandboxFailed(f"a program cannot be run: {error}") from error


class _Process:
    """A bubblewrap process and the ends of its pipes, which `files` closes; that ends whatever still runs, too."""

    def __init__(self, request: bytes, files: contextlib.ExitStack) -> None:
        # An empty or relative entry would mean the working folder, where anything may lie.
        folders = filter(os.path.isabs, os.get_exec_path())
        bubblewrap = shutil.which("bwrap", path=os.pathsep.join(folders))
        if bubblewrap is None:
            raise SandboxFailed(f"bubblewrap is missing; {INSTALL}", code="sandbox_missing")
        self._files = files
        self.answers, answers_in = self._pipe()
        self._told, told_in = self._pipe()
        wait_for, self._begin = self._pipe()
        self._kept(self._begin)
        self._complaints = self._memory(b"")
        filter_fd = self._memory(_filter())
        options = ("--seccomp", str(filter_fd), "--info-fd", str(told_in), "--block-fd", str(wait_for))
        variables = [part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)]
        self._bubblewrap = subprocess.Popen(  # noqa: S603  (arguments of ours; the code is in the request)
            [bubblewrap, *_ISOLATION, *variables, *mounts(), "--chdir", "/", *options, *COMMAND],
            stdin=self._memory(request),
            stdout=answers_in,
            stderr=self._complaints,
            pass_fds=(filter_fd, told_in, wait_for),
            env={},
        )
        os.close(answers_in)
        os.close(told_in)
        try:
            self.gone = self._kept(os.pidfd_open(self._bubblewrap.pid))
        except OSError:
            self._bubblewrap.kill()
            self._bubblewrap.wait()
            raise
        files.callback(self.end)
        self._child: int | None = None
        self.cpu_seconds = 0.0

    def begin(self, deadline: float) -> None:
        """Limit the process in the sandbox, which waits for this, and let it begin, if bubblewrap gets so far."""
        told = b""
        while b"}" not in told and _readable(self._told, deadline) and (piece := os.read(self._told, _READ_BYTES)):
            told += piece
        if (match := _CHILD.search(told)) is None:
            return
        child = int(match[1])
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):  # it has come to its end already
            self._child = self._kept(os.pidfd_open(child))
            self._files.callback(self.end)  # which must come before that is closed
            for what, most in _LIMITS:
                resource.prlimit(child, what, (most, most))
            os.write(self._begin, b"\n")

    def complaint(self) -> str:
        """What bubblewrap or the interpreter said about its failure."""
        return os.pread(self._complaints, _MAX_COMPLAINT_BYTES, 0).decode(errors="replace").strip() or "it says nothing"

    def end(self) -> int:
        """Make sure that all of it is gone, and return bubblewrap's status as subprocess gives it."""
        if self._bubblewrap.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Without its child bubblewrap ends too, and then tells what the child used.
                signal.pidfd_send_signal(self.gone if self._child is None else self._child, signal.SIGKILL)
            _, status, usage = os.wait4(self._bubblewrap.pid, 0)
            self.cpu_seconds = usage.ru_utime + usage.ru_stime
            self._bubblewrap.returncode = os.waitstatus_to_exitcode(status)
        return self._bubblewrap.returncode

    def _pipe(self) -> tuple[int, int]:
        reading, writing = os.pipe()
        return self._kept(reading), writing

    def _memory(self, content: bytes) -> int:
        """A file that is nowhere, with its position at the beginning."""
        file = self._kept(os.memfd_create("sandbox"))
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
        return file

    def _kept(self, file: int) -> int:
        self._files.callback(os.close, file)
        return file


def _judge(process: _Process, *, deadline: float, max_bytes: int) -> Ended:
    process.begin(deadline)
    stop, written = _read(process, deadline=deadline, max_bytes=len(READY) + max_bytes)
    status = process.end()
    if not written.startswith(READY):
        raise SandboxFailed(f"the program did not start ({status}): {process.complaint()}")
    answers = written[len(READY) :]
    if stop is _Stop.TOO_MUCH:
        return Ended(answers=answers, complete=False, cpu_seconds=0.0)
    if stop is _Stop.TOO_LATE:
        raise SandboxFailed("a program could not use its time on this machine", code="sandbox_doubt")
    if status < 0:
        raise SandboxFailed(f"bubblewrap was killed by signal {-status}")
    killed = status - seccomp.LEAST_SIGNAL_STATUS == signal.SIGKILL
    if killed and process.cpu_seconds < CPU_SECONDS * _CPU_LIMIT_COUNTS:
        # It cannot do that to itself. Mostly it is the kernel, when the machine is short of memory.
        raise SandboxFailed("a program was killed from outside", code="sandbox_doubt")
    return Ended(answers=answers, complete=status == 0, cpu_seconds=process.cpu_seconds)


def _read(process: _Process, *, deadline: float, max_bytes: int) -> tuple[_Stop, bytes]:
    """What the program writes, until it is gone, has written more than `max_bytes`, or is late."""
    written, poller = b"", select.poll()
    for file in (process.answers, process.gone):
        poller.register(file, select.POLLIN)
    while len(written) <= max_bytes:
        ready = {file for file, _ in poller.poll(_milliseconds_until(deadline))}
        if not ready:
            return _Stop.TOO_LATE, written
        if process.answers not in ready:
            return _Stop.ENDED, written
        piece = os.read(process.answers, max_bytes + 1 - len(written))
        written += piece
        if not piece:
            poller.unregister(process.answers)
    return _Stop.TOO_MUCH, written


def _readable(file: int, deadline: float) -> bool:
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(_milliseconds_until(deadline)))


def _milliseconds_until(deadline: float) -> int:
    return max(0, round(1000 * (deadline - time.monotonic())))


def _filter() -> bytes:
    machine = platform.machine()
    if machine not in seccomp.ARCHITECTURES:
        raise SandboxFailed(f"there is no system call filter for {machine}", code="sandbox_unusable")
    return seccomp.program(seccomp.ARCHITECTURES[machine])
