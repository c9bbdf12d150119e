"""One key on two machines: a folder that was copied, a backup that was restored while the old machine still runs.

Real worker processes, and a real coordinator over HTTP. Without this they would spend each other's leases, and a fault
of one machine would ban the other, with nothing in either log that says why.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from locations import ROOT
from sqlalchemy import func, select, update
from swarm import REGISTRATION, Peer, Swarm, running
from waiting import until

from coordinator.storage.instances import INSTANCE_SECONDS
from coordinator.storage.schema import LeaseState, leases, nodes, submissions
from node.engines.torch import TorchEngine
from node.errors import Refused
from node.joining.session import JoinSettings
from node.keys.identity import load_key, node_id
from node.protocol.reasons import Reason
from node.worker import registration as worker_registration
from node.worker.daemon import WorkerSettings, run_worker

SECONDS = 120.0

pytestmark = pytest.mark.usefixtures("forked_commands")


@pytest.fixture
def swarm(tmp_path: Path, tiny_policy_path: Path) -> Iterator[Swarm]:
    with running(tmp_path / "run", tiny_policy_path) as swarm:
        yield swarm


class Machine:
    """A worker's process on a machine of its own name."""

    def __init__(self, name: str, swarm: Swarm, state: Path) -> None:
        command = [sys.executable, "-m", "on_machine", name, "worker", "--coordinator", swarm.url]
        self.errors = state.parent / f"{name}-{time.monotonic_ns()}.log"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--run-id", swarm.home.run_id, "--state", str(state), "--grace", "30"],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stderr=errors,
            )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> tuple[int, str]:
        """Its exit code, and what it said last, before the hint."""
        return self.process.wait(SECONDS), self.errors.read_text().splitlines()[-2]

    @property
    def runs(self) -> bool:
        return self.process.poll() is None


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    started: list[Machine] = []
    yield started
    for machine in started:
        machine.process.kill()
        machine.process.wait()


def known(swarm: Swarm, node: str) -> Any:
    with swarm.home.database.read() as connection:
        return connection.execute(select(nodes).where(nodes.c.node == node)).first()


def count(swarm: Swarm, table: Any, *conditions: Any) -> int:
    with swarm.home.database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(table).where(*conditions)).scalar_one())


def let_it_seem_silent(swarm: Swarm, node: str) -> None:
    """As if nothing had been heard of the node's instance for long enough."""
    with swarm.home.database.write() as connection:
        seen_at = nodes.c.instance_seen_at - INSTANCE_SECONDS
        connection.execute(update(nodes).where(nodes.c.node == node).values(instance_seen_at=seen_at))


@pytest.mark.timeout(300)
def test_a_copied_folder_on_another_machine_is_refused_and_the_first_one_works_on(
    tmp_path: Path, swarm: Swarm, machines: list[Machine]
) -> None:
    machines.append(Machine("alpha", swarm, tmp_path / "alpha"))
    until(lambda: count(swarm, submissions))
    node = node_id(load_key(tmp_path / "alpha" / "key"))
    machines[0].signal(signal.SIGSTOP)  # a folder at rest: what is being written now would vanish under the copy
    shutil.copytree(tmp_path / "alpha", tmp_path / "beta")
    machines[0].signal(signal.SIGCONT)

    machines.append(Machine("beta", swarm, tmp_path / "beta"))
    code, said = machines[1].ended()

    assert code == 1
    assert said.startswith("Error: key_in_use: This key is at work on alpha, heard ")
    for advice in ("stop the other", "`swarmproof keys new`", "if that machine is gone, try again in 2 minutes"):
        assert advice in said
    assert "Traceback" not in machines[1].errors.read_text()
    assert known(swarm, node).instance_name == "alpha"
    assert machines[0].runs

    # kill -9 and a start at once is the same machine: nobody waits two minutes after a crash.
    machines[0].signal(signal.SIGKILL)
    machines[0].ended()
    restarted_at = time.time()
    machines.append(Machine("alpha", swarm, tmp_path / "alpha"))
    until(lambda: known(swarm, node).instance_seen_at > restarted_at)
    assert machines[2].runs


@pytest.mark.timeout(300)
def test_a_machine_that_comes_back_after_another_took_its_key_ends_and_leaves_nothing_behind(
    tmp_path: Path, swarm: Swarm, machines: list[Machine]
) -> None:
    machines.append(Machine("alpha", swarm, tmp_path / "alpha"))
    until(lambda: count(swarm, submissions))
    node = node_id(load_key(tmp_path / "alpha" / "key"))
    machines[0].signal(signal.SIGSTOP)  # the lid is closed
    shutil.copytree(tmp_path / "alpha", tmp_path / "beta")
    time.sleep(2)  # what it has just asked for is answered
    let_it_seem_silent(swarm, node)
    machines.append(Machine("beta", swarm, tmp_path / "beta"))
    until(lambda: known(swarm, node).instance_name == "beta")

    machines[0].signal(signal.SIGCONT)
    code, said = machines[0].ended()

    assert code == 1
    assert said.startswith("Error: key_in_use: This key is at work on beta, heard ")
    assert machines[1].runs, "the one that works must not pay for the other's return"
    machines[1].signal(signal.SIGTERM)
    assert machines[1].ended()[0] == 0
    assert count(swarm, leases, leases.c.state == LeaseState.ACTIVE) == 0, "a slot waits for nobody"
    assert known(swarm, node).rejected == 0


class Endless(TorchEngine):
    """One whose slots take for ever."""

    async def generate(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()


def test_a_machine_whose_slots_take_long_is_heard_and_hears_that_another_took_its_key(
    tmp_path: Path, swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for no leases for minutes: its key would be free for a copy, and it would work on for nothing."""
    monkeypatch.setattr(worker_registration, "HEARD_SECONDS", 0.2)
    key = Ed25519PrivateKey.generate()
    entry = JoinSettings(run_id=swarm.home.run_id, coordinators=(swarm.url,))
    settings = WorkerSettings(join=entry, state=tmp_path / "slow", grace_seconds=0.2)

    async def take_over() -> None:
        copy = Peer(swarm.url, swarm.home.run_id, key)
        work = asyncio.create_task(run_worker(settings, key=key, make_engine=Endless, stop=asyncio.Event()))
        await asyncio.to_thread(until, lambda: count(swarm, leases))
        asked_at = time.time()
        await asyncio.to_thread(until, lambda: known(swarm, copy.node).instance_seen_at > asked_at)
        assert copy.register().code == "key_in_use"
        while True:  # it may be heard in between
            let_it_seem_silent(swarm, copy.node)
            reply = await asyncio.to_thread(copy.register)
            if reply.status == 200:
                break
        await asyncio.wait_for(work, 60)

    with pytest.raises(Refused, match=f"at work on {REGISTRATION.name}") as caught:
        asyncio.run(take_over())
    assert caught.value.code == Reason.KEY_IN_USE
    assert count(swarm, leases, leases.c.state == LeaseState.RETURNED) == count(swarm, leases) > 0
