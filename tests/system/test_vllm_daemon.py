"""The worker's daemon with vLLM as real processes that are ended by a terminal, by a kill, and by a crash.

What would break for whom: a contributor whose GPU stays occupied by processes that nobody owns, or who is shown pages
of traceback for a Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from processes import is_running
from swarm import Swarm, running, small_spec
from waiting import until

from node.runtime.signals import EXIT_AT_ONCE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

START_SECONDS = 180.0
END_SECONDS = 30.0
GRACE_SECONDS = 3.0
AT_ONCE_SECONDS = 30.0


def start(swarm: Swarm, state: Path, log: Path, *, grace: float = GRACE_SECONDS) -> subprocess.Popen[bytes]:
    """A daemon in a process group of its own, as a terminal makes one."""
    command = [sys.executable, "-m", "node.cli", "worker", "--coordinator", swarm.url, "--run-id", swarm.home.run_id]
    command += ["--state", str(state), "--engine", "vllm", "--threads", "1", "--kv-cache-gib", "0.1"]
    command += ["--grace", str(grace)]
    (state / "status.json").unlink(missing_ok=True)  # of the daemon before
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def at_work(state: Path) -> bool:
    """Whether the daemon has slots under way, and has finished one: so its engine runs."""
    path = state / "status.json"
    if not path.exists():
        return False
    status = json.loads(path.read_text())
    return bool(status["slots"] and status["tokens"])


def family(daemon: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(daemon.pid).children(recursive=True)


def ended(processes: list[psutil.Process]) -> bool:
    return not any(is_running(one.pid) for one in processes)


def is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end before it is asked
        return "EngineCore" in process.name()
    return False


@pytest.fixture
def swarm(tmp_path: Path, tiny_policy_path: Path) -> Iterator[Swarm]:
    spec = small_spec()
    sampling = msgspec.structs.replace(spec.sampling, max_new_tokens=380, group_size=16)
    spec = msgspec.structs.replace(
        spec, sampling=sampling, batch=msgspec.structs.replace(spec.batch, groups_per_step=64)
    )
    with running(tmp_path / "run", tiny_policy_path, spec=spec) as swarm:
        yield swarm


def interrupt(daemon: subprocess.Popen[bytes]) -> None:
    """What a terminal does on Ctrl-C: every process of the group is told."""
    os.killpg(daemon.pid, signal.SIGINT)


def test_ctrl_c_finishes_slots_and_leaves_no_process_and_no_traceback(swarm: Swarm, tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "log"
    daemon = start(swarm, state, log)
    until(lambda: at_work(state), seconds=START_SECONDS, what=log.read_text)
    processes = family(daemon)
    assert any(map(is_engine, processes))
    interrupt(daemon)
    assert daemon.wait(END_SECONDS) == 0
    until(lambda: ended(processes), seconds=END_SECONDS, what=log.read_text)
    said = log.read_text()
    assert "Traceback" not in said
    assert "leaked" not in said
    assert "EngineDied" not in said, "Ctrl-C must not end the engine under slots that may be finished"


def test_ctrl_c_takes_back_a_start_of_the_engine(swarm: Swarm, tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "log"
    daemon = start(swarm, state, log)
    until(lambda: any(map(is_engine, family(daemon))), seconds=START_SECONDS, what=log.read_text)
    processes = family(daemon)
    interrupt(daemon)
    assert daemon.wait(END_SECONDS) == 0
    until(lambda: ended(processes), seconds=END_SECONDS, what=log.read_text)
    assert "Traceback" not in log.read_text()


@pytest.mark.usefixtures("forked_vllm_commands")
def test_a_second_ctrl_c_ends_the_daemon_at_once_and_its_engine_soon(swarm: Swarm, tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "log"
    daemon = start(swarm, state, log, grace=4 * AT_ONCE_SECONDS)
    until(lambda: at_work(state), seconds=START_SECONDS, what=log.read_text)
    processes = family(daemon)
    interrupt(daemon)
    until(lambda: "a second signal exits at once" in log.read_text(), seconds=END_SECONDS, what=log.read_text)
    interrupt(daemon)
    assert daemon.wait(AT_ONCE_SECONDS) == EXIT_AT_ONCE
    until(lambda: ended(processes), seconds=END_SECONDS, what=log.read_text)


@pytest.mark.usefixtures("forked_vllm_commands")
def test_the_engine_of_a_daemon_that_is_killed_ends_too(swarm: Swarm, tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "log"
    daemon = start(swarm, state, log)
    until(lambda: at_work(state), seconds=START_SECONDS, what=log.read_text)
    processes = family(daemon)
    daemon.kill()
    daemon.wait()
    until(lambda: ended(processes), seconds=END_SECONDS, what=log.read_text)
