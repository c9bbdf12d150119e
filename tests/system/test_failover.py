"""Two coordinators over one data folder, and a worker that knows both: one of them is killed with -9 in mid-request.

What would break for whom: a worker whose coordinator's machine dies would stand still, lose the group that it had just
sent, or have it counted twice, once by each coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from swarm import publish, verifying
from waiting import eventually

from coordinator.lab.processes.layout import free_ports
from coordinator.run.definition import read_run_file
from coordinator.run.home import Home, create_home
from coordinator.storage.schema import LeaseState, SlotState, leases, slots, submissions
from node.client.http import Backoff
from node.engines.torch import TorchEngine
from node.joining.session import JoinSettings
from node.keys.identity import create_key, node_id
from node.protocol.admission import Outcome
from node.worker.daemon import WorkerSettings, run_worker
from node.worker.state import KeptReceipt, PendingDelivery
from shardcast import Origin, OriginServer
from shardcast.wire import decode

RUN_TOML = """
name = "failover"

[model]
initial = "random-tiny"

[[environments]]
name = "arithmetic"

[sampling]
group_size = 2
max_new_tokens = 12

[proofs]
scheme = "toploc/1"

[batch]
groups_per_step = 1000
lease_seconds = 15.0
rejection_backoff_seconds = 0.0

[limits]
exponent_mismatches = 8.0
mantissa_mean = 1.0
mantissa_median = 1.0
token_margin = 0.001
rollout_margin_mean = 0.001
logprob_error = 0.001
"""
pytestmark = pytest.mark.usefixtures("forked_commands")

GO_ON_SECONDS = 10.0
START_SECONDS = 90.0
SECONDS = 60.0
GROUPS = 3
HEAD = re.compile(rb"(?:GET|POST|PUT) (/\S+) HTTP/1\.1\r\n")


@dataclass(frozen=True)
class Moment:
    """When to kill: at a request whose path begins so, once the client or the coordinator has sent `sign`.

    Of the piece with the sign, the other side gets the first `passed` parts of two. `after_seconds` the kill comes.
    """

    path: str
    by_client: bool
    sign: bytes
    passed: int
    after_seconds: float = 0.0


LOST_LEASE = Moment("/v1/leases", by_client=False, sign=b'"lease_id"', passed=0)
"""Its slot is nobody's until the lease has lapsed, and then has to go on."""

MOMENTS = {
    "a lease is granted and its answer lost": LOST_LEASE,
    "half of an upload has arrived": Moment("/v1/submissions/", by_client=True, sign=b"\x28\xb5\x2f\xfd", passed=1),
    "a submission is stored and its answer lost": Moment(
        "/v1/submissions/", by_client=False, sign=b"HTTP/1.1 202", passed=0
    ),
    "a receipt is waited for": Moment("/v1/receipts/", by_client=True, sign=b"wait=", passed=2, after_seconds=0.2),
}


class Gate:
    """A proxy before one coordinator's process. It notes requests, and once armed kills the process at a moment."""

    def __init__(self, process: subprocess.Popen[bytes], upstream: int) -> None:
        self.requests: list[tuple[float, str]] = []
        self.killed_at: float | None = None
        self.killed_in = ""
        self._mute = False
        self._armed: Moment | None = None
        self._process, self._upstream = process, upstream
        self._listener: socket.socket | None = None
        self._open: list[list[asyncio.StreamWriter]] = []
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def open(self, port: int) -> AsyncIterator[Gate]:
        # Not asyncio's server: one that is closed in the turn in which it accepts a connection loses its socket.
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)
        try:
            yield self
        finally:
            self._shut()
            await asyncio.sleep(0.05)  # what was accepted last begins in the loop's next turns
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0.05)  # what is aborted is closed in the loop's next turns

    def arm(self, moment: Moment) -> None:
        self._armed = moment

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            self._tasks.append(asyncio.create_task(self._serve(connection)))

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        ends = [writer]
        self._open.append(ends)
        try:
            if self._listener is None:
                return
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._upstream)
            ends.append(to_server)
            asked = [""]
            both = (self._pass(reader, to_server, asked, by_client=True), self._pass(from_server, writer, asked))
            await asyncio.gather(*both)
        except OSError:
            pass  # one of them has gone
        finally:
            _abort(ends)

    async def _pass(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, asked: list[str], *, by_client: bool = False
    ) -> None:
        while piece := await source.read(2**20):
            if by_client and (head := HEAD.search(piece)):
                asked[0] = head[1].decode()
                self.requests.append((time.monotonic(), asked[0]))
            if self._is_the_moment(piece, asked[0], by_client=by_client):
                self.killed_in = asked[0]
                await self._kill(piece, to)
                return
            if not self._mute:
                to.write(piece)
                await to.drain()
        to.close()

    def _is_the_moment(self, piece: bytes, path: str, *, by_client: bool) -> bool:
        moment = self._armed
        return (
            moment is not None
            and moment.by_client == by_client
            and path.startswith(moment.path)
            and moment.sign in piece
        )

    async def _kill(self, piece: bytes, to: asyncio.StreamWriter) -> None:
        assert self._armed is not None
        moment, self._armed, self._mute = self._armed, None, True
        to.write(piece[: len(piece) * moment.passed // 2])
        await to.drain()
        await asyncio.sleep(moment.after_seconds)
        os.kill(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        self.killed_at = time.monotonic()
        self._shut()

    def _shut(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for ends in self._open:
            _abort(ends)


def _abort(ends: list[asyncio.StreamWriter]) -> None:
    for each in ends:
        each.transport.abort()


@dataclass(frozen=True)
class Run:
    """A run on disk that is served by two coordinators, at ports which stay the same."""

    folder: Path
    home: Home
    relay: str
    ports: tuple[int, int]
    standby: subprocess.Popen[bytes]
    standby_port: int

    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports)


def start(folder: Path, relay: str, ports: tuple[int, int], name: str) -> tuple[subprocess.Popen[bytes], Path]:
    command = [
        sys.executable,
        "-m",
        "node.cli",
        "coordinator",
        "--uncalibrated",
        "--run",
        "run.toml",
        "--key",
        "run.key",
        "--data",
        "data",
    ]
    for port in ports:
        command += ["--endpoint", f"http://127.0.0.1:{port}"]
    output = folder / f"{name}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", "0", "--no-peer", "--relay", relay],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    return process, output


def port_of(process: subprocess.Popen[bytes], output: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"serving at http://127\.0\.0\.1:(\d+)", output.read_text()):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(found[1])), timeout=1):
                return int(found[1])
        time.sleep(0.1)
    raise AssertionError(f"the coordinator did not start:\n{output.read_text()}")


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def run(forked_commands: None, tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("failover")
    (folder / "run.toml").write_text(RUN_TOML)
    key = create_key(folder / "run.key")
    _, spec = read_run_file(folder / "run.toml")
    home = create_home(folder / "data", public_key=key.public_key().public_bytes_raw(), spec=spec)
    origin = Origin(folder / "origin", key, home.run_id)
    server = OriginServer(origin)
    relay = f"http://127.0.0.1:{server.start()}"
    publish(home, origin, server, tiny_policy_path, version=0)
    first, second = free_ports(2)
    ports = (first, second)
    process, output = start(folder, relay, ports, "standby")
    try:
        with ended(process), verifying(home, source=relay, state=folder / "verifier"):
            yield Run(folder, home, relay, ports, process, port_of(process, output))
    finally:
        server.stop()
        origin.close()
        home.database.close()


@asynccontextmanager
async def working(run: Run, state: Path, key: Ed25519PrivateKey) -> AsyncIterator[None]:
    """A worker that is told of both coordinators, and stopped as by Ctrl-C."""
    stop = asyncio.Event()
    settings = WorkerSettings(
        join=JoinSettings(run_id=run.home.run_id, coordinators=run.urls()),
        state=state,
        slots=2,
        backoff=Backoff(first_seconds=0.05, max_seconds=0.5),
    )
    task = asyncio.create_task(run_worker(settings, key=key, make_engine=TorchEngine, stop=stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, SECONDS)


def submitted(run: Run, node: str) -> dict[str, tuple[str, int, str | None]]:
    """Of each submission of a node: its lease, its slot, and its outcome if there is one."""
    columns = (submissions.c.submission, submissions.c.lease, submissions.c.slot_id, submissions.c.outcome)
    with run.home.database.read() as connection:
        rows = connection.execute(select(*columns).where(submissions.c.node == node)).all()
    return {row.submission: (row.lease, row.slot_id, row.outcome) for row in rows}


def admitted(run: Run, node: str) -> int:
    return sum(outcome == Outcome.ADMITTED for _, _, outcome in submitted(run, node).values())


def lapsed(run: Run, node: str) -> list[str]:
    """The states of the slots whose leases a node let lapse."""
    query = select(slots.c.state).join(leases, leases.c.slot_id == slots.c.id)
    with run.home.database.read() as connection:
        found = connection.execute(query.where(leases.c.node == node, leases.c.state == LeaseState.EXPIRED))
        return list(found.scalars())


def check_nothing_was_lost_or_counted_twice(run: Run, node: str, state: Path) -> None:
    """The coordinators' book and the worker's own name the same submissions, each once."""
    book = submitted(run, node)
    lines = (state / "receipts.ndjson").read_bytes().splitlines()
    receipts = [decode(KeptReceipt, line, max_bytes=2**20).receipt for line in lines]
    pending = [
        decode(PendingDelivery, path.read_bytes(), max_bytes=2**20) for path in (state / "pending").glob("*.json")
    ]
    assert {outcome for _, _, outcome in book.values()} == {Outcome.ADMITTED}
    assert max(Counter(lease for lease, _, _ in book.values()).values()) == 1, "a lease was used twice"
    assert max(Counter(slot for _, slot, _ in book.values()).values()) == 1, "a slot was counted twice"
    assert max(Counter(receipt.submission for receipt in receipts).values()) == 1, "a receipt was counted twice"
    assert {receipt.submission for receipt in receipts} | {one.submission for one in pending} == set(book)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
async def test_a_coordinator_that_is_killed_costs_a_worker_nothing(
    run: Run, tmp_path: Path, moment: Moment, caplog: pytest.LogCaptureFixture
) -> None:
    process, output = start(run.folder, run.relay, run.ports, tmp_path.name)
    key, state = create_key(tmp_path / "key"), tmp_path / "worker"
    node, (first, second) = node_id(key), run.urls()
    with ended(process):
        gate = Gate(process, await asyncio.to_thread(port_of, process, output))
        standby = Gate(run.standby, run.standby_port)
        async with gate.open(run.ports[0]), standby.open(run.ports[1]), working(run, state, key):
            await eventually(lambda: admitted(run, node) >= GROUPS)
            assert standby.requests == [], "the first is asked as long as it answers"
            gate.arm(moment)
            await eventually(lambda: gate.killed_at is not None)
            before = admitted(run, node)
            await eventually(lambda: admitted(run, node) >= before + GROUPS)
            if moment is LOST_LEASE:
                await eventually(lambda: set(lapsed(run, node)) == {SlotState.ADMITTED})
        assert gate.killed_at is not None
        again = next(at for at, path in standby.requests if path == gate.killed_in)
        await eventually(lambda: all(outcome is not None for _, _, outcome in submitted(run, node).values()))
    assert again - gate.killed_at < GO_ON_SECONDS, "the very request that was cut short goes on"
    check_nothing_was_lost_or_counted_twice(run, node, state)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("node.")]
    assert len([line for line in said if f"coordinator {first} is away" in line and line.endswith(second)]) == 1, said
    assert not [line for line in said if "is dropped" in line]
