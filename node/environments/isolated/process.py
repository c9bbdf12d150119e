"""The process of an environment: started, asked one query at a time, and replaced when it cannot be relied on.

A process that dies, is silent beyond its deadline or answers what is no answer is killed with its whole session, and
the query ends in an EnvironmentFault: nobody is judged by it. The next query has a new process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from node.environments.base import EnvironmentFault
from node.environments.isolated.messages import (
    MAX_LINE_BYTES,
    PROTOCOL,
    A,
    Fault,
    Garbage,
    Load,
    Loaded,
    Query,
    decode_answer,
    encode_query,
)

log = logging.getLogger(__name__)

LOAD_SECONDS: Final = 300.0
ANSWER_SECONDS: Final = 30.0
"""Deadline for a problem, a reply or a reward; exceeding it is nobody's fault, so the verdict is indeterminate."""

GUEST_PROGRAM: Final = Path(__file__).parent.parent / "guest" / "main.py"
"""What an environment's interpreter runs: `python -P -s -B -u GUEST_PROGRAM`. It needs the standard library alone."""

GUEST_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/nonexistent",
        "PYTHONHASHSEED": "0",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
)
"""All the environment variables of the process: what makes behaviour reproducible, and nothing of the user's."""

_CHUNK_BYTES: Final = 256 * 1024


class GuestProcess:
    """One environment's process; answers one query at a time, thread-safe.

    `command` starts it, with `variables` as its environment variables; `load` is its first query, whenever it starts.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        load: Load,
        *,
        variables: Mapping[str, str] = GUEST_VARIABLES,
        load_seconds: float = LOAD_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._name, self._load = name, load
        self._command, self._variables = list(command), dict(variables)
        self._load_seconds, self._answer_seconds = load_seconds, answer_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._loaded: Loaded | None = None

    @property
    def pid(self) -> int | None:
        """The process' id; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> Loaded:
        """Load the environment, unless it is. Raises EnvironmentFault, as `ask`, and with the codes of FaultCode."""
        with self._lock:
            if self._loaded is None or self._process is None:
                self._start()
            assert self._loaded is not None
            return self._loaded

    def ask(self, query: Query, answer: type[A]) -> A:
        """Send a query and return its answer, starting another process where there is none.

        Raises EnvironmentFault: environment_slow, environment_died, environment_garbled (no answer of the protocol),
        environment_changed (a new process has other problems), or a code of FaultCode.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self._exchange(query, answer, seconds=self._answer_seconds)

    def close(self) -> None:
        """End the process; the next query starts another one."""
        with self._lock:
            self._discard()

    def _start(self) -> None:
        self._discard()
        try:
            self._process = _starter().submit(_started, self._command, self._variables).result()
        except OSError as error:
            raise self._fault("environment_died", f"its process cannot be started: {error}") from error
        self._finalizer = weakref.finalize(self, _end, self._process)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        try:
            loaded = self._exchange(self._load, Loaded, seconds=self._load_seconds)
            if loaded.protocol != PROTOCOL:
                raise self._fault(
                    "environment_garbled",
                    f"its process speaks version {loaded.protocol} of the protocol, and this node {PROTOCOL}",
                )
            if self._loaded not in (None, loaded):
                raise self._fault("environment_changed", "its new process has other problems than the last one had")
        except EnvironmentFault:
            self._discard()
            raise
        self._loaded = loaded

    def _exchange(self, query: Query, answer: type[A], *, seconds: float) -> A:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        try:
            _send(process.stdin.fileno(), encode_query(query), deadline)
            received = decode_answer(_receive_line(process.stdout.fileno(), deadline), answer)
        except TimeoutError as error:
            self._discard()
            raise self._fault("environment_slow", f"no answer within {seconds:g} s") from error
        except (OSError, EOFError) as error:
            self._discard()
            raise self._fault("environment_died", f"its process ended unexpectedly: {error!r}") from error
        except Garbage as error:
            self._discard()
            raise self._fault("environment_garbled", f"its process gave no answer of the protocol: {error}") from error
        except BaseException:
            self._discard()  # half an exchange would be read as the next answer
            raise
        if isinstance(received, Fault):
            raise self._fault(received.code, printable(received.detail))
        return received

    def _fault(self, code: str, detail: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._name}: {detail}", code=code)

    def _discard(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


_starters: list[ThreadPoolExecutor] = []
_starters_lock = threading.Lock()


def _starter() -> ThreadPoolExecutor:
    """Return the thread that starts every process, and lives as long as this one.

    A sandbox that is to die with its parent dies with the thread that started it (PR_SET_PDEATHSIG).
    """
    with _starters_lock:
        if not _starters:
            _starters.append(ThreadPoolExecutor(1, thread_name_prefix="environments"))
        return _starters[0]


os.register_at_fork(after_in_child=_starters.clear)


def _started(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  (the node's own command)
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=variables,
        start_new_session=True,
    )


def printable(text: str) -> str:
    """Return a text of an environment's without what moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _send(pipe: int, line: bytes, deadline: float) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise Garbage(f"the query has {len(line)} bytes, and a line at most {MAX_LINE_BYTES}")
    left = memoryview(line)
    while left:
        _wait(pipe, select.POLLOUT, deadline)
        with contextlib.suppress(BlockingIOError):
            left = left[os.write(pipe, left) :]


def _receive_line(pipe: int, deadline: float) -> bytes:
    """Read up to the first line feed; raises Garbage for a longer line, or one with something behind it."""
    line = bytearray()
    while True:
        _wait(pipe, select.POLLIN, deadline)
        chunk = os.read(pipe, _CHUNK_BYTES)
        if not chunk:
            raise EOFError("end of its answers")
        line += chunk
        if b"\n" in chunk:
            break
        if len(line) > MAX_LINE_BYTES:
            raise Garbage(f"a line of more than {MAX_LINE_BYTES} bytes")
    if line.index(b"\n") != len(line) - 1:
        raise Garbage("more than one answer")
    return bytes(line)


def _wait(pipe: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not poll.poll(remaining * 1000):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the session, with all its descendants, and reap the process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()
