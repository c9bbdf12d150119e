"""The supervisor against real processes: what a person's machine looks like after each kind of end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import is_running
from waiting import until

from coordinator.lab.processes.errors import KeepsDying
from coordinator.lab.processes.supervisor import Command, RestartPolicy, Supervisor, clean_environment

SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)"
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
)
WITH_CHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(f'child {child.pid}', flush=True)\n"
    "time.sleep(600)"
)
QUICK = RestartPolicy(first_seconds=0.05, max_seconds=0.2, settled_seconds=60.0, attempts=4)


def sleeper(name: str = "sleeper", *, program: str = SLEEPER, wave: int = 0) -> Command:
    return Command(name, ("-c", program), wave=wave)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "logs", restart=QUICK, grace_seconds=0.5) as supervisor:
        yield supervisor


def wait_for_word(supervisor: Supervisor, word: str, *, name: str = "sleeper", times: int = 1) -> None:
    path = supervisor.log_path(name)
    until(lambda: path.exists() and path.read_text().count(word) >= times)


def test_a_process_that_is_killed_is_started_again_and_counted(supervisor: Supervisor) -> None:
    supervisor.start([sleeper()])
    first = supervisor.pid("sleeper")
    wait_for_word(supervisor, "up")
    os.kill(first, signal.SIGKILL)

    def replaced() -> bool:
        supervisor.poll()
        return supervisor.pid("sleeper") not in {None, first}

    until(replaced)
    wait_for_word(supervisor, "up", times=2)
    assert supervisor.restarts == {"sleeper": 1}
    assert is_running(supervisor.pid("sleeper"))


def test_a_program_that_cannot_start_ends_the_demo_and_shows_its_log(supervisor: Supervisor) -> None:
    supervisor.start([sleeper(program="raise SystemExit('no such option')")])
    with pytest.raises(KeepsDying, match="no such option"):
        until(lambda: False, meanwhile=supervisor.poll)


def test_stop_ends_all_processes_even_one_that_ignores_sigterm(supervisor: Supervisor) -> None:
    supervisor.start([sleeper(), sleeper("stubborn", program=STUBBORN, wave=1)])
    wait_for_word(supervisor, "up")
    wait_for_word(supervisor, "up", name="stubborn")
    pids = list(supervisor.pids.values())
    supervisor.stop()
    assert not any(is_running(pid) for pid in pids)


def test_a_later_wave_is_stopped_before_an_earlier_one(tmp_path: Path) -> None:
    """A worker has to hand its slot back while the coordinator still takes it."""
    program = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        f"    with open({str(tmp_path / 'order')!r}, 'a') as file: file.write(sys.argv[1])\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    with Supervisor(tmp_path / "logs", grace_seconds=60.0) as supervisor:
        for name, wave in (("1", 1), ("0", 0), ("2", 2)):
            supervisor.start([Command(name, ("-c", program, name), wave=wave)])
            wait_for_word(supervisor, "up", name=name)
        supervisor.stop()
    assert (tmp_path / "order").read_text() == "210"


def test_what_a_dead_process_had_started_does_not_live_on(supervisor: Supervisor) -> None:
    supervisor.start([sleeper(program=WITH_CHILD)])
    wait_for_word(supervisor, "child")
    grandchild = int(supervisor.log_path("sleeper").read_text().split()[1])
    assert is_running(grandchild)
    os.kill(supervisor.pid("sleeper"), signal.SIGKILL)
    until(lambda: not is_running(grandchild), meanwhile=supervisor.poll)


def test_a_supervisor_killed_with_9_leaves_no_child(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from pathlib import Path\n"
        "from coordinator.lab.processes.supervisor import Command, Supervisor\n"
        f"supervisor = Supervisor(Path({str(tmp_path)!r}))\n"
        f"supervisor.start([Command('a', ('-c', {SLEEPER!r})), Command('b', ('-c', {STUBBORN!r}))])\n"
        "print(*supervisor.pids.values(), flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        for name in ("a", "b"):
            until(lambda name=name: "up" in (tmp_path / f"{name}.log").read_text())
        assert all(is_running(pid) for pid in pids)
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: not any(is_running(pid) for pid in pids))


def test_children_do_not_see_the_secrets_of_whoever_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "s3cret")
    environment = clean_environment()
    assert "SOME_SERVICE_TOKEN" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_two_processes_of_one_name_are_a_mistake(supervisor: Supervisor) -> None:
    supervisor.start([sleeper()])
    with pytest.raises(ValueError, match="runs already"):
        supervisor.start([sleeper()])
