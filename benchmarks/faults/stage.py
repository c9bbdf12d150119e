"""A real swarm on loopback, as an operator starts it, on a disk, a line and clocks that can be spoilt.

    coordinator, verifier, trainer (with the origin), root relay, leaf relay, two workers

Each runs under its supervisor, which starts again what ends, as a service manager does. All their folders are on one
file system, and the run's --data on another (`faults.disk`); nodes reach the coordinator through a line that can be
cut (`faults.proxy`); the operator's processes have one clock, the first worker another (`faults.clocked`). Logs lie on
the machine's own disk, as those of a service manager do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.faults.clocked import compile_library, has_compiler, set_clock
from benchmarks.faults.disk import Disk
from benchmarks.faults.proxy import CoordinatorProxy
from benchmarks.faults.witness import Witness
from coordinator.lab.processes.layout import Swarm, free_ports, lay_out
from coordinator.lab.processes.supervisor import Command, RestartPolicy, Supervisor
from coordinator.storage.database import sqlite_url

OPERATOR: Final = ("coordinator", "verifier", "trainer")
RELAYS: Final = ("relay-root", "relay-leaf-1")
WORKERS: Final = ("honest-1", "honest-2")
CLOCKED: Final = ("operator", "honest-1")
"""Whose clocks can be moved."""

HOME_BYTES: Final = 3 * 1024**3
DATA_BYTES: Final = 1024**3
RESTART: Final = RestartPolicy(first_seconds=0.25, max_seconds=1.0, settled_seconds=5.0, attempts=10_000)
TICK_S: Final = 0.05

RUN_TOML: Final = """
name = "chaos"

[model]
initial = "random-tiny"

[[environments]]
name = "reverse"

[sampling]
group_size = 4
max_new_tokens = 24

[batch]
groups_per_step = 24
lease_seconds = 10.0
rejection_backoff_seconds = 0.1
rejection_backoff_max_seconds = 1.0

[limits]
exponent_mismatches = 4.0
token_margin = 0.001
rollout_margin_mean = 0.0001
logprob_error = 0.001

[training]
steps = 100_000

[broadcast]
keep_versions = 8
"""


@dataclass(frozen=True, slots=True)
class Disks:
    """All folders of the swarm, and the run's data alone."""

    home: Disk
    data: Disk


class Stage:
    """A swarm that runs; what happens to it is asked for by `faults.kinds`, from the main thread."""

    def __init__(
        self,
        swarm: Swarm,
        supervisor: Supervisor,
        *,
        proxy: CoordinatorProxy,
        witness: Witness,
        disks: Disks | None,
        clocks: Path,
    ) -> None:
        self.swarm = swarm
        self.supervisor = supervisor
        self.proxy = proxy
        self.witness = witness
        self.disks = disks
        self.nodes = {place.name: place.node for place in swarm.workers}
        self.on_tick: Callable[[], None] = lambda: None
        self._clocks = clocks

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of every process."""
        return tuple(self.supervisor.pids)

    @property
    def database(self) -> Path:
        return Path(sqlite_url(self.swarm.folder / "data").removeprefix("sqlite:///"))

    def wait(self, seconds: float) -> None:
        """Let time pass, and look after the processes."""
        until = time.monotonic() + seconds
        while True:
            self.supervisor.poll()
            self.on_tick()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(TICK_S, left))

    def until(self, condition: Callable[[], bool], *, seconds: float) -> bool:
        """Wait for `condition`, at most for so long; whether it came."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= deadline:
                return False
            self.wait(TICK_S)
        return True

    def signal(self, names: Sequence[str], number: signal.Signals, *, group: bool = True) -> None:
        """Signal each of these processes that lives, and with `group` what it started."""
        for name in names:
            pid = self.supervisor.pid(name)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if group else os.kill)(pid, number)

    def kill(self, names: Sequence[str]) -> None:
        """Kill these processes alone, as `kill -9` does."""
        self.signal(names, signal.SIGKILL, group=False)

    @contextlib.contextmanager
    def stopped(self, names: Sequence[str]) -> Iterator[None]:
        """Stop these processes within the block."""
        self.signal(names, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(names, signal.SIGCONT)

    def set_clock(self, whose: str, offset_s: int) -> None:
        """Move one of the CLOCKED."""
        set_clock(self._clocks / whose, offset_s)

    def is_up(self, name: str, *, since: float) -> bool:
        """Whether a worker has written its status since then (Unix seconds); of others the log tells."""
        if name not in WORKERS:
            return True
        try:
            return (self.swarm.folder / name / "status.json").stat().st_mtime > since
        except FileNotFoundError:
            return False


@contextlib.contextmanager
def staged(folder: Path, *, logs: Path, mounts: bool) -> Iterator[Stage]:
    """Start a swarm in `folder`; `mounts` says that file systems may be mounted."""
    home = folder / "home"
    with contextlib.ExitStack() as mounted:
        home_disk = mounted.enter_context(Disk(home, size_bytes=HOME_BYTES)) if mounts else None
        swarm = lay_out(home / "run", RUN_TOML, honest=len(WORKERS), hostile=(), leaves=1)
        disks = None
        if home_disk is not None:
            data_disk = mounted.enter_context(Disk(swarm.folder / "data", size_bytes=DATA_BYTES))
            disks = Disks(home=home_disk, data=data_disk)
        clocks = folder / "clocks"
        clocks.mkdir()
        for whose in CLOCKED:
            set_clock(clocks / whose, 0)
        library = compile_library(clocks) if has_compiler() else None
        (port,) = free_ports(1)
        commands = [
            _with_clock(_through_proxy(command, swarm, port), library, clocks=clocks) for command in swarm.commands
        ]
        target = int(swarm.coordinator_url.rpartition(":")[2])
        with (
            CoordinatorProxy(port, target=target) as proxy,
            Supervisor(logs, restart=RESTART, grace_seconds=4.0) as supervisor,
            Witness(swarm.coordinator_url, run_id=swarm.run_id) as witness,
        ):
            supervisor.start(commands)
            yield Stage(swarm, supervisor, proxy=proxy, witness=witness, disks=disks, clocks=clocks)


def _through_proxy(command: Command, swarm: Swarm, port: int) -> Command:
    """Route a node's command to the coordinator through the proxy that can be cut."""
    if command.name in OPERATOR:
        return command
    through = f"http://127.0.0.1:{port}"
    arguments = tuple(through if one == swarm.coordinator_url else one for one in command.arguments)
    return replace(command, arguments=arguments)


def _with_clock(command: Command, library: Path | None, *, clocks: Path) -> Command:
    """Run the command under the clock that can be moved, if it has one."""
    whose = "operator" if command.name in OPERATOR else command.name
    if library is None or whose not in CLOCKED:
        return command
    launcher = str(Path(__file__).with_name("clocked.py"))
    return replace(command, arguments=(launcher, str(library), str(clocks / whose), *command.arguments))
