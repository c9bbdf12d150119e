"""Processes that inspect a model's folder begin as forks of the tests' own, which has imported torch and transformers.

Started as the product does, as the system tier starts them, each would take 5 s of processor time to import them. Pipes
and limits are the same.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import pytest

MODULES = ("node.chat.reduction_process", "node.chat.template_process", "node.policy.inspection_process")


class ForkingPopen(subprocess.Popen[Any]):
    """A Popen that runs `python -P -m` of one of MODULES in a fork of this process."""

    def _execute_child(self, *arguments: Any) -> None:
        command, env, pipes = arguments[0], arguments[6], arguments[10:16]
        if list(command[1:3]) != ["-P", "-m"] or command[3] not in MODULES:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        importlib.import_module(command[3])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads here hold no lock that it needs
            self.pid = os.fork()
        if not self.pid:
            if arguments[21]:  # start_new_session: whoever waits in vain ends the whole group
                os.setsid()
            _run(command[3:], env=env, standard=(pipes[0], pipes[3], pipes[5]))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _run(argv: Sequence[str], *, env: Mapping[str, str], standard: Sequence[int]) -> NoReturn:
    """Run the module that `argv` begins with as a new process would, and exit."""
    code = 1
    try:
        for number, descriptor in enumerate(standard):
            if descriptor != -1:
                os.dup2(descriptor, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        gc.disable()
        warnings.simplefilter("ignore")
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(argv)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001  (nothing of this process goes on after it)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@pytest.fixture(autouse=True)
def forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the processes of MODULES as forks, but in tests that a marker moves up to the system tier."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("service") is not None:
            patch.setattr(subprocess, "Popen", ForkingPopen)
        yield
