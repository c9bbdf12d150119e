"""Starts the processes of a swarm, restarts those that die, and leaves none behind.

Each process leads a session of its own, so a Ctrl-C in the terminal reaches the supervisor alone, which then
stops them in order. Whatever a process started itself is killed with it. Single-threaded: `poll` does the
work, and must be called by the main thread, whose end is what the launcher ties the children to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from coordinator.lab.processes.errors import KeepsDying

log = logging.getLogger(__name__)

GRACE_SECONDS = 8.0
POLL_SECONDS = 0.05
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
# Two cores are shared by a dozen processes: a second thread in each makes all of them slower.
_ADDED_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class Command:
    """One process: arguments to this Python, and when it is started.

    Those of a lower `wave` start earlier and stop later.
    """

    name: str
    arguments: tuple[str, ...]
    wave: int = 0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How soon a dead process is started again, and how often in a row before that is called hopeless."""

    first_seconds: float = 0.25
    max_seconds: float = 5.0
    settled_seconds: float = 15.0
    attempts: int = 8

    def delay(self, failures: int) -> float:
        """Return seconds before the restart after `failures` (at least 1) short lives in a row."""
        return min(self.max_seconds, self.first_seconds * 2.0 ** (failures - 1))


@dataclass(slots=True)
class _Child:
    command: Command
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    starts: int = 0
    failures: int = 0


def clean_environment() -> dict[str, str]:
    """Return the environment of a child: none of the user's credentials, and one thread per process."""
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _ADDED_VARIABLES


def launch(arguments: Sequence[str], *, output: Path, errors: Path) -> subprocess.Popen[bytes]:
    """Start this Python with `arguments` in a session of its own; it ends when this process does."""
    # The kernel ties a child to the thread that started it, not to the process.
    assert threading.current_thread() is threading.main_thread(), "children are started by the main thread"
    launcher = (sys.executable, "-I", "-S", str(Path(__file__).with_name("launcher.py")), str(os.getpid()))
    with output.open("ab") as stdout, errors.open("ab") as stderr:
        return subprocess.Popen(  # noqa: S603  (our own program, no shell)
            (*launcher, sys.executable, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=clean_environment(),
            start_new_session=True,
        )


@contextlib.contextmanager
def launched(arguments: Sequence[str], *, output: Path, errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager around `launch`, for a program that ends by itself; killed if it has not."""
    process = launch(arguments, output=output, errors=errors)
    try:
        yield process
    finally:
        _bury(process)


@dataclass(slots=True)
class Supervisor:
    """The swarm's parent; use as a context manager, so that leaving it in any way stops every child."""

    log_folder: Path
    restart: RestartPolicy = RestartPolicy()
    grace_seconds: float = GRACE_SECONDS
    _children: dict[str, _Child] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, commands: Iterable[Command]) -> None:
        """Start these processes and keep them running."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        for command in commands:
            if command.name in self._children:
                raise ValueError(f"{command.name} runs already")
            child = self._children[command.name] = _Child(command)
            self._spawn(child)

    def poll(self) -> None:
        """Reap dead processes and restart them after their backoff; raises KeepsDying at the last attempt."""
        now = time.monotonic()
        for child in self._children.values():
            if child.process is not None and _has_ended(child.process):
                self._note_death(child, child.process, now)
            if child.process is None and now >= child.start_at:
                self._spawn(child)

    def stop(self) -> None:
        """End every process, the last wave first: SIGTERM, a grace period, SIGKILL. Interrupt it to hurry."""
        waves = sorted({child.command.wave for child in self._children.values()}, reverse=True)
        try:
            for wave in waves:
                self._stop_wave([child for child in self._children.values() if child.command.wave == wave])
        except KeyboardInterrupt:
            log.warning("interrupted again: killing what is left")
        finally:
            for child in self._children.values():
                if child.process is not None:
                    _bury(child.process)
                    child.process = None
            self._children.clear()

    def pid(self, name: str) -> int | None:
        """Return the process id under this name, or None while it is dead."""
        process = self._children[name].process
        return None if process is None else process.pid

    @property
    def pids(self) -> dict[str, int | None]:
        """The process id of each process."""
        return {name: self.pid(name) for name in self._children}

    @property
    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        return {name: max(0, child.starts - 1) for name, child in self._children.items()}

    def log_path(self, name: str) -> Path:
        """Return the file that a process's standard output and error go to."""
        return self.log_folder / f"{name}.log"

    def log_tail(self, name: str, *, lines: int = 15) -> str:
        """Return the last lines of a process's log."""
        text = self.log_path(name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _spawn(self, child: _Child) -> None:
        path = self.log_path(child.command.name)
        child.process = launch(child.command.arguments, output=path, errors=path)
        child.starts += 1
        child.started_at = time.monotonic()

    def _note_death(self, child: _Child, process: subprocess.Popen[bytes], now: float) -> None:
        code = _bury(process)
        child.process = None
        lived = now - child.started_at
        child.failures = 1 if lived >= self.restart.settled_seconds else child.failures + 1
        name = child.command.name
        if child.failures >= self.restart.attempts:
            raise KeepsDying(f"{name} ended {child.failures} times in a row; its log ends:\n{self.log_tail(name)}")
        delay = self.restart.delay(child.failures)
        child.start_at = now + delay
        log.warning("%s ended with %d after %.1f s; starting it again in %.2f s", name, code, lived, delay)

    def _stop_wave(self, children: list[_Child]) -> None:
        running = [child.process for child in children if child.process is not None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.grace_seconds
        while any(not _has_ended(process) for process in running) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for child in children:
            if child.process is not None:
                if not _has_ended(child.process):
                    log.warning("%s did not end within %.0f s: killing it", child.command.name, self.grace_seconds)
                _bury(child.process)
                child.process = None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process has ended, leaving it a zombie so that its id is not reused."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _bury(process: subprocess.Popen[bytes]) -> int:
    """Kill the process with everything in its group, and reap it; returns its exit code."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (a closed terminal) do what Ctrl-C does: raise KeyboardInterrupt."""
    previous = {name: signal.signal(name, signal.default_int_handler) for name in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
