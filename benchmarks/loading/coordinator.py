"""Coordinators in processes of their own over one database, and one that stands in for their verifiers."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.request import urlopen

import psutil

from coordinator.run.home import Home, open_home
from coordinator.storage import training, verdicts
from coordinator.storage.training import PolicyRecord
from node.keys.identity import create_key
from node.protocol.admission import Outcome, Verdict

GROUP_SIZE = 8
START_SECONDS = 60.0
JUDGED_AT_ONCE = 16
"""In one transaction, as a verifier records them: writers of SQLite take turns, whatever each writes in one."""

IDLE_SECONDS = 0.05
RUN_TOML = f"""
name = "load"

[model]
initial = "random-tiny"

[[environments]]
name = "arithmetic"

[sampling]
group_size = {GROUP_SIZE}

[batch]
groups_per_step = 1000000
max_leases_per_node = 64

[limits]
exponent_mismatches = 4.0
token_margin = 0.001
rollout_margin_mean = 0.0001
logprob_error = 0.001
"""
"""Enough slots for whoever asks: what is measured is the coordinator, not how work is rationed."""


@dataclass(frozen=True)
class Served:
    """A run whose coordinators answer at `ports`; `server` is PostgreSQL's first process."""

    ports: Sequence[int]
    home: Home
    processes: Sequence[psutil.Process]
    server: psutil.Process | None = None

    @property
    def port(self) -> int:
        return self.ports[0]

    def cpu_seconds(self) -> float:
        """Return the processor time of the coordinators so far."""
        times = [process.cpu_times() for process in self.processes]
        return sum(one.user + one.system for one in times)

    def server_cpu_seconds(self) -> float:
        """Return the processor time of PostgreSQL so far, ended processes included; 0 without it."""
        if self.server is None:
            return 0.0
        times = [one.cpu_times() for one in (self.server, *self.server.children())]
        ended = self.server.cpu_times()
        return sum(one.user + one.system for one in times) + ended.children_user + ended.children_system


@contextlib.contextmanager
def serving(folder: Path, *flags: str, apis: int = 1, database_url: str | None = None) -> Iterator[Served]:
    """Run an operator's commands on a new run with one policy: one for all, or several APIs and a leader."""
    (folder / "run.toml").write_text(RUN_TOML, encoding="utf-8")
    create_key(folder / "run.key")
    shared = ["--data", "data", *(["--database-url", database_url] if database_url else [])]
    run = ["--run", "run.toml", "--key", "run.key", "--uncalibrated"]
    command = ["coordinator", "--no-peer", *run, "--port", "0", *shared, *flags]
    commands = [command] if apis == 1 else [[*command, "--role", "api"]] * apis
    with contextlib.ExitStack() as running:
        started = [running.enter_context(running_command(folder, f"api-{n}", each)) for n, each in enumerate(commands)]
        ports = [wait_for_port(output, process) for output, process in started]
        if apis > 1:
            running.enter_context(running_command(folder, "leader", ["coordinator", "--role", "leader", *shared]))
        home = open_home(folder / "data", database_url=database_url)
        running.callback(home.database.close)
        policy = PolicyRecord(
            version=0, manifest_digest=secrets.token_hex(32), result_digest=secrets.token_hex(32), manifest=b"load"
        )
        with home.database.write() as connection:
            training.record_policy(connection, policy, now=time.time())
        processes = [psutil.Process(process.pid) for _, process in started]
        yield Served(ports=ports, home=home, processes=processes)


@contextlib.contextmanager
def running_command(folder: Path, name: str, command: Sequence[str]) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Run a command of `swarmproof` in `folder`; yield the file with its output, and the process."""
    output = folder / f"{name}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "node.cli", *command], cwd=folder, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield output, process
    finally:
        process.terminate()
        process.wait(30)


def wait_for_port(output: Path, process: subprocess.Popen[bytes]) -> int:
    """Return the port that a coordinator listens on, once it answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"serving at http://127\.0\.0\.1:(\d+)", output.read_text(encoding="utf-8"))
        if found:
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{found[1]}/health", timeout=5):
                return int(found[1])
        time.sleep(0.1)
    raise SystemExit(f"the coordinator did not start:\n{output.read_text(encoding='utf-8')}")


@contextlib.contextmanager
def judging(data: Path, database_url: str | None = None) -> Iterator[int]:
    """Run a process that admits all submissions by the verifier's own transactions, without a prefill; yield its id."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=_judge, args=(data, database_url, stop), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        stop.set()
        process.join(30)


def _judge(data: Path, database_url: str | None, stop: Event) -> None:
    home = open_home(data, database_url=database_url, wait_seconds=START_SECONDS)
    group = home.blobs.put(b"load")
    verdict = Verdict(outcome=Outcome.ADMITTED, tokens=GROUP_SIZE, rewards=(0.5,) * GROUP_SIZE)
    while not stop.is_set():
        with home.database.write() as connection:
            claimed = verdicts.claim(
                connection, verifier="load", spec=home.spec, now=time.time(), seconds=60.0, most=JUDGED_AT_ONCE
            )
        if claimed:
            with home.database.write() as connection:
                for one in claimed:
                    verdicts.record(connection, one, verdict, spec=home.spec, now=time.time(), group=group)
        stop.wait(0.0 if claimed else IDLE_SECONDS)
    home.database.close()
