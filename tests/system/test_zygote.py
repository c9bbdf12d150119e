"""A program that begins as a fork must not be able to tell: else the tests of forked programs test something else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import is_running
from terminal import Terminal
from waiting import until
from zygote import Zygote, forking

PROGRAM = """
import atexit, json, os, signal, sys, threading
open_files = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
print(json.dumps({
    "arguments": sys.argv[1:],
    "read": sys.stdin.read(),
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0),
    "open": sorted(open_files),
    "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "interrupted by": str(signal.getsignal(signal.SIGINT)),
}))
print("wrong", file=sys.stderr)
atexit.register(print, "at its end")
threading.Thread(target=print, args=("of a thread",)).start()
sys.exit(3)
"""
WAITING = """
import sys, time
try:
    print("up", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit("interrupted")
"""
LOOPING = """
import asyncio, json, multiprocessing, os, signal, threading

def tell():
    handlers = [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]
    print(json.dumps([handlers, signal.set_wakeup_fd(-1), threading.active_count(), len(os.listdir("/proc/self/fd"))]))

def start():
    process = multiprocessing.get_context("spawn").Process(target=tell)
    process.start()
    process.join()

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
    await asyncio.to_thread(start)

if __name__ == "__main__":
    asyncio.run(main())
"""
FAILING = "raise ValueError('a defect')"
SUPERVISING = """
import os, subprocess, sys
from pathlib import Path
from coordinator.lab.processes import supervisor
from zygote import Zygote, forking

subprocess.Popen = forking(Zygote("json"))
process = supervisor.launch(("-m", "waiting_one"), output=Path("out"), errors=Path("errors"))
print(process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def popen() -> Iterator[type[subprocess.Popen[Any]]]:
    zygote = Zygote("json")
    yield forking(zygote)
    zygote.close()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in {"telling": PROGRAM, "waiting_one": WAITING, "looping": LOOPING, "failing": FAILING}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return os.environ | {"PYTHONPATH": str(tmp_path), "OF_THE_TEST": "1"}


def test_a_forked_program_is_what_a_started_one_is(
    popen: type[subprocess.Popen[Any]], environment: dict[str, str], tmp_path: Path
) -> None:
    found = []
    for cls in (subprocess.Popen, popen):
        for session in (False, True):
            command = [sys.executable, "-m", "telling", "--option", "with spaces"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with cls(command, env=environment, cwd=tmp_path, text=True, start_new_session=session, **pipes) as process:
                out, errors = process.communicate("written", timeout=60)
            first, *rest = out.splitlines()
            told = json.loads(first)
            if session:
                assert told.pop("group") == process.pid
            if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # the tests run in the background
                del told["interrupted by"]
            found.append((process.returncode, told, sorted(rest), errors))
    started, forked = found[:2], found[2:]
    assert forked == started
    assert forked[0][0] == 3
    assert forked[0][1]["parent"] == os.getpid()


def test_it_is_found_by_its_command_and_ended_by_its_signals(
    popen: type[subprocess.Popen[Any]], environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "waiting_one"]
    for number, code, said in ((signal.SIGINT, 1, "interrupted\n"), (signal.SIGTERM, -signal.SIGTERM, "")):
        with popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "up\n"
            shown = Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0").split("\0")
            assert shown == command
            process.send_signal(number)
            assert (process.wait(60), process.stderr.read()) == (code, said)


def test_what_it_starts_by_multiprocessing_from_a_thread_knows_nothing_of_its_event_loop(
    environment: dict[str, str],
) -> None:
    zygote = Zygote("json")
    command = [sys.executable, "-m", "looping"]
    found = []
    for cls in (subprocess.Popen, forking(zygote, forks=True)):
        with cls(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            found.append((process.communicate(timeout=60)[0], process.returncode))
    zygote.close()
    started, forked = found
    assert forked == started
    assert json.loads(forked[0])[1] == -1


async def test_it_leads_the_terminal_that_it_is_given(
    popen: type[subprocess.Popen[Any]], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is the terminal's to send: it would end nothing, or the tests themselves."""
    monkeypatch.setattr(subprocess, "Popen", popen)
    terminal = Terminal("env", "--default-signal=INT", sys.executable, "-m", "waiting_one", environment=environment)
    try:
        await terminal.until("up")
        assert os.getsid(terminal.process.pid) == terminal.process.pid
        terminal.press("\x03")
        assert "interrupted" in await terminal.ended()
    finally:
        terminal.kill()


def test_a_defect_is_a_traceback_and_an_exit_code(
    popen: type[subprocess.Popen[Any]], environment: dict[str, str]
) -> None:
    with popen([sys.executable, "-m", "failing"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("Traceback")
    assert errors.endswith("ValueError: a defect\n")


def test_what_a_supervisor_has_tied_to_itself_ends_with_it(environment: dict[str, str], tmp_path: Path) -> None:
    paths = os.pathsep.join([environment["PYTHONPATH"], *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISING],
        env=environment | {"PYTHONPATH": paths},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as supervisor:
        pid = int(supervisor.stdout.readline())
        until(lambda: (tmp_path / "out").read_text() == "up\n")
        supervisor.kill()
    until(lambda: not is_running(pid))
