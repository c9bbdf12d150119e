"""What an installed environment may do on the machine that runs it, tried from within, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import packages
import pytest
from waiting import until

from node.environments import EnvironmentFault, load_environment
from node.environments.isolated.store import VARIABLE, EnvironmentStore
from node.protocol.environment_spec import EnvironmentSpec

ENTRY = "[swarmproof.environments]\nprobe = probe:Probe\n"
CLASS = """
class Probe:
    def __init__(self, count: int = 1) -> None:
        self.count = count

    def problem(self, index):
        return {"prompt": f"{self.count} {index} {tried()}", "answer": "2"}

    def reward(self, problem, completion):
        return graded(completion, problem["answer"])

def tried():
    return ""

def graded(completion, answer):
    return float(completion == answer)
"""


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Load an environment whose module ends with `code`, which may replace `tried` and `graded`."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "store"))

    def loaded(code="", **arguments):
        files = {"probe.py": CLASS + textwrap.dedent(code)}
        installed = packages.install(EnvironmentStore(tmp_path / "store"), "probe", files, entry_points=ENTRY)
        package = installed.lock.package
        return load_environment(EnvironmentSpec(name="probe", arguments=arguments, package=package))

    return loaded


def test_an_installed_environment_makes_problems_and_rewards_with_the_runs_arguments(probe):
    environment = probe(count=3)
    problem = environment.problem(7)
    assert problem.prompt == "3 7 "
    assert [environment.reward(problem, completion) for completion in ("2", "3", "\ud800")] == [1.0, 0.0, 0.0]
    with pytest.raises(EnvironmentFault, match="does not accept its arguments"):
        probe("# another one\n", size=3)


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        ("open('/etc/passwd').read()", "FileNotFoundError"),
        ("open(__file__, 'a')", "Read-only"),
        ("open('/usr/lib/x', 'w')", "Read-only"),
        ("os.listdir('/home')", "FileNotFoundError"),
        ("sorted(os.listdir('/proc/1/root'))", "'bin', 'dev', 'etc', 'guest'"),
        ("os.environ['SWARMPROOF_SECRET']", "KeyError"),
        ("[open(f'/tmp/{i}', 'w').write('x' * 10**7) for i in range(10)]", "No space left"),
        ("subprocess.check_output(['/bin/sh', '-c', 'cat /etc/passwd'])", "CalledProcessError"),
        ("bytearray(20 * 1024**3)", "MemoryError"),
    ],
    ids=lambda value: value[:25],
)
def test_what_it_tries_fails_and_it_goes_on(probe, monkeypatch, attempt, said):
    monkeypatch.setenv("SWARMPROOF_SECRET", "hunter2")
    environment = probe(f"""
        import os, subprocess

        def tried():
            try:
                return repr({attempt})
            except BaseException as error:
                return f"{{error!r}}"
    """)
    assert pytest.approx(1.0) == environment.reward(environment.problem(0), "2")
    prompt = environment.problem(0).prompt
    assert any(part in prompt for part in said.split("|")), prompt
    assert "root:" not in prompt


def test_a_connection_is_refused_with_its_reason(probe):
    with pytest.raises(EnvironmentFault) as fault:
        probe("""
            import socket

            def tried():
                socket.create_connection(("127.0.0.1", 80), 2)
        """)
    assert fault.value.code == "needs_network"


def test_one_that_dies_is_replaced_and_nobody_is_judged(probe):
    environment = probe("""
        import os

        def graded(completion, answer):
            if completion == "die":
                os._exit(3)
            return 1.0
    """)
    problem = environment.problem(0)
    with pytest.raises(EnvironmentFault) as fault:
        environment.reward(problem, "die")
    assert fault.value.code == "environment_died"
    assert environment.reward(problem, "2") == 1.0


def test_it_ends_with_the_node_even_where_that_is_killed_and_the_environment_is_stuck(probe, tmp_path):
    """A worker that is killed leaves no process that computes for ever."""
    environment = probe("""
        def graded(completion, answer):
            while completion == "stuck":
                pass
            return 1.0
    """)
    problem = environment.problem(0)
    assert environment.reward(problem, "2") == 1.0
    (folder,) = (tmp_path / "store").iterdir()
    code = f"""
import sys, threading
from node.environments import load_environment
from node.environments.isolated.lock import read_lock
from node.protocol.environment_spec import EnvironmentSpec
package = read_lock(open({str(folder / "lock.txt")!r}, "rb").read()).package
environment = load_environment(EnvironmentSpec(name="probe", package=package))
threading.Thread(target=lambda: environment.reward(environment.problem(0), "stuck"), daemon=True).start()
print("asked", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdout.readline() == b"asked\n"
        until(lambda: guests_of(node.pid) and max(map(_cpu_ticks, guests_of(node.pid))) > 20)
        ours = guests_of(node.pid)
        node.send_signal(signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ours))


def guests_of(node: int) -> set[int]:
    """All descendants of a process."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in found | {node}} - found:
        found |= more
    return found


def _cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
