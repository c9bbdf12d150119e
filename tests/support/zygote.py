"""Python programs that begin as forks of one that has imported what they need.

A program that imports torch and transformers takes 5 s of processor time before it does anything, and one that starts
vLLM imports that three times over, 10 s each. Where a test is about what many processes do with each other, and another
one starts the same as a shell would, they are forked: with the arguments, environment, files, session and parent that
`subprocess.Popen` or multiprocessing would give them.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from locations import ROOT
from zygote_process import FORKED_BY_MULTIPROCESSING, MOST_BYTES

SUPPORT = Path(__file__).parent
PROGRAM = SUPPORT / "zygote_process.py"
COMMANDS = (
    "coordinator.app",
    "coordinator.cli",
    "coordinator.lab.redteam.process",
    "coordinator.training.trainer",
    "coordinator.verifier.daemon",
    "node.audit.auditor",
    "node.relay.daemon",
    "node.worker.daemon",
)
VLLM = (
    "node.engines.vllm",
    "node.engines.vllm_worker",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
PR_SET_CHILD_SUBREAPER = 36
SIZE_OF_A_COMMAND = 4096
_adopting = threading.Lock()


class Zygote:
    """A process that has imported `modules` and is asked to fork."""

    def __init__(self, *modules: str) -> None:
        self._asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join((str(ROOT), str(SUPPORT)))
        with asked:
            command = [sys.executable, "-P", str(PROGRAM), str(asked.fileno()), ",".join(modules)]
            self._process = subprocess.Popen(
                [*command, " " * SIZE_OF_A_COMMAND],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                pass_fds=[asked.fileno()],
            )

    def fork(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
        folder: str | None = None,
        session: bool = False,
        terminal: bool = False,
        tied: bool = False,
        forks: bool = False,
    ) -> int:
        """Begin `python ARGUMENTS` as a child of this process, with these descriptors under these numbers; its id.

        With `session` it leads one, with `terminal` of the terminal that is its standard input, too; if it is `tied`,
        it is killed when this process ends, and if it `forks`, so do those that it starts by multiprocessing.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "descriptors": list(descriptors),
            "folder": folder or str(Path.cwd()),
            "session": session,
            "terminal": terminal,
            "tied": tied,
            "forks": forks,
            "parent": os.getpid(),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        message = json.dumps(request).encode()
        assert len(message) <= MOST_BYTES
        with adopting():
            socket.send_fds(self._asking, [message], list(descriptors.values()))
            answer = self._asking.recv(32)
        assert answer, f"no program can begin: the zygote ended with {self._process.wait()}"
        return int(answer)

    def close(self) -> None:
        self._asking.close()
        self._process.wait()


@contextmanager
def adopting() -> Iterator[None]:
    """Let processes become children of this one whose parents end meanwhile (prctl(2), PR_SET_CHILD_SUBREAPER).

    One thread at a time may be in it.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    with _adopting:
        assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        try:
            yield
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class ForkedPopen(subprocess.Popen[Any]):
    """A Popen whose `python [-P] -m MODULE` is a fork of `zygote`; anything else is started as ever.

    A process that the supervisor ties to itself by its launcher is tied as well, and one that `setsid --ctty` gives a
    terminal has that.
    """

    zygote: Zygote
    forks: bool

    def _execute_child(self, *arguments: Any) -> None:
        given, pass_fds, folder, environment = arguments[0], *arguments[4:7]
        pipes, session = arguments[10:16], arguments[21]
        command = [given] if isinstance(given, str | bytes | os.PathLike) else [os.fsdecode(each) for each in given]
        launcher = command[1:3] == ["-I", "-S"] and command[3].endswith("/processes/launcher.py")
        if launcher:
            command = command[5:]
        terminal = command[:2] == ["setsid", "--ctty"]
        if terminal:
            command = command[2:]
        if command[:2] == ["env", "--default-signal=INT"]:  # as every fork has it
            command = command[2:]
        is_module = command[1:2] == ["-m"] or command[1:3] == ["-P", "-m"]
        if command[0] != sys.executable or not is_module:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        standard = (each if each != -1 else number for number, each in enumerate((pipes[0], pipes[3], pipes[5])))
        self.pid = self.zygote.fork(
            command[1:],
            environment=os.environ if environment is None else environment,
            descriptors={number: number for number in pass_fds} | dict(enumerate(standard)),
            folder=None if folder is None else os.fsdecode(folder),
            session=session or terminal,
            terminal=terminal,
            tied=launcher,
            forks=self.forks,
        )
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One for the product's commands, and for the scripts that train in several processes."""
    found = Zygote(*COMMANDS)
    yield found
    found.close()


@pytest.fixture(scope="module")
def forked_commands(zygote: Zygote) -> Iterator[None]:
    """Start `python -m ...` as forks from here to the module's end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forking(zygote))
        yield


def forking(zygote: Zygote, *, forks: bool = False) -> type[ForkedPopen]:
    """Return a Popen that asks `zygote`; if it `forks`, the processes that multiprocessing starts are forks, too."""
    return type("Popen", (ForkedPopen,), {"zygote": zygote, "forks": forks})


@pytest.fixture(scope="session")
def vllm_zygote() -> Iterator[Zygote]:
    """One for vLLM's processes, each of which forks into the next."""
    from node.engines.vllm_host import _set_environment
    from node.engines.vllm_settings import VllmSettings

    _set_environment(VllmSettings(cpu_threads=1))
    found = Zygote(*VLLM)
    yield found
    found.close()


@pytest.fixture(scope="module")
def forked_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start vLLM's processes as forks from here to the module's end; where it has a GPU, as it does itself."""
    if torch.cuda.is_available():
        yield
        return
    vllm_zygote: Zygote = request.getfixturevalue("vllm_zygote")

    def begin(path: Any, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
        arguments = [os.fsdecode(each) for each in args]
        if FORKED_BY_MULTIPROCESSING not in arguments:
            return int(start(path, args, passfds))
        descriptors = {number: number for number in (0, 1, 2, *passfds)}
        return vllm_zygote.fork(arguments[1:], environment=os.environ, descriptors=descriptors, forks=True)

    start = multiprocessing.util.spawnv_passfds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.util, "spawnv_passfds", begin)
        yield


@pytest.fixture
def forked_vllm_commands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start `python -m ...`, and vLLM's processes of those, as forks in one test; where it has a GPU, as they are."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(subprocess, "Popen", forking(request.getfixturevalue("vllm_zygote"), forks=True))
