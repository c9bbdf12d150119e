"""Real workers: how long `swarmproof worker --join` takes from its start to its first lease, in a real swarm.

Coordinator, verifier, trainer, and two relays are up and have the first policy. A worker then imports torch, finds the
run, fetches the policy from a relay, loads it, registers, and asks for work; so most of its time is not the network's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Final

from sqlalchemy import func, select

from coordinator.lab.processes.layout import demo_run_toml, lay_out
from coordinator.lab.processes.local_http import get
from coordinator.lab.processes.supervisor import Command, Supervisor
from coordinator.run.home import Home, open_home
from coordinator.storage.schema import leases, policies

START_SECONDS: Final = 120.0
LOOK_SECONDS: Final = 0.02


def join_seconds(folder: Path, *, count: int) -> list[float]:
    """Time the start of each of `count` workers, one after the other. Raise TimeoutError."""
    swarm = lay_out(folder / "swarm", demo_run_toml(initial='"random-tiny"'), honest=count, hostile=(), leaves=1)
    names = {place.name for place in swarm.workers}
    commands = [command for command in swarm.commands if command.name not in names]
    with Supervisor(folder / "logs") as supervisor:
        supervisor.start(commands)
        _wait_healthy([swarm.coordinator_url, swarm.origin_url, *swarm.relays.values()], supervisor)
        home = open_home(swarm.folder / "data", wait_seconds=START_SECONDS)
        _wait(home, select(func.count()).select_from(policies), supervisor)
        workers = [(place.node, _command(swarm.commands, place.name)) for place in swarm.workers]
        seconds = [_join(home, node, command, supervisor) for node, command in workers]
        home.database.close()
    return seconds


def _command(commands: Sequence[Command], name: str) -> Command:
    return next(command for command in commands if command.name == name)


def _join(home: Home, node: str, command: Command, supervisor: Supervisor) -> float:
    began = time.monotonic()
    supervisor.start([command])
    return _wait(home, select(func.count()).select_from(leases).where(leases.c.node == node), supervisor) - began


def _wait_healthy(urls: Sequence[str], supervisor: Supervisor) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not all(_is_healthy(url) for url in urls):
        if time.monotonic() >= deadline:
            raise TimeoutError("the swarm did not start")
        supervisor.poll()
        time.sleep(LOOK_SECONDS)


def _is_healthy(url: str) -> bool:
    try:
        return get(f"{url}/health", seconds=2.0) is not None
    except (OSError, HTTPException):
        return False


def _wait(home: Home, counting: object, supervisor: Supervisor) -> float:
    """Wait until there is one, and return when."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with home.database.read() as connection:
            if connection.execute(counting).scalar():  # type: ignore[call-overload]
                return time.monotonic()
        supervisor.poll()
        time.sleep(LOOK_SECONDS)
    raise TimeoutError("no first lease")
