"""Who is attacked by way of the peer-to-peer network, and who must be served all the while.

The victim is a process of the real command, `swarmproof peer`. The newcomer is a real node, in a process of its own so
that an attacker that works hard does not slow it down.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
import trio  # noqa: TID251  (attacks run on its loop)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs
from prepared_replies import DESCRIPTOR, RUN_ID, sealed_descriptor
from waiting import until

from node.protocol.peers import Address, Invitation, PeerRecord, parse_join, sign_peer

QUIET_MIB = 100
"""By how much the victim's resident memory may have grown, over what it was before the first attack."""

SERVED_SECONDS = 10.0
"""In which a newcomer has the run's descriptor, whatever else the victim is busy with."""


def descriptor(version: int = 1, **changes: object) -> bytes:
    """The envelope of a descriptor of the run."""
    now = int(time.time())
    given = {"version": version, "issued_at": now, "expires_at": now + 3600} | changes
    return sealed_descriptor(structs.replace(DESCRIPTOR, **given))


def record(key: Ed25519PrivateKey, *hosts: tuple[str, int], run_id: str = RUN_ID, **changes: object) -> bytes:
    """The signed record of a peer that says it is reached at these hosts and ports."""
    now, node = int(time.time()), key.public_key().public_bytes_raw()
    addresses = tuple(str(Address("ip4", host, port, node)) for host, port in hosts)
    given = {"run_id": run_id, "addresses": addresses, "issued_at": now, "expires_at": now + 3600} | changes
    return sign_peer(PeerRecord(**given), key=key)


def framed(data: bytes) -> bytes:
    """As a link carries it."""
    return len(data).to_bytes(4) + data


class SmallCoordinator:
    """Gives the run's descriptor over HTTP, at once or when there is a newer one."""

    def __init__(self) -> None:
        self.envelope = b""
        self.version = 0
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.post(descriptor())

    def post(self, envelope: bytes, version: int = 1) -> None:
        """Say this from now on."""
        with self._changed:
            self.envelope, self.version = envelope, version
            self._changed.notify_all()

    def close(self) -> None:
        """End the server; who waits is let go."""
        self.post(self.envelope, 2**40)
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                after, wait = int(query.get("after", ["-1"])[0]), float(query.get("wait", ["0"])[0])
                with store._changed:
                    store._changed.wait_for(lambda: store.version > after, wait)
                    envelope = store.envelope
                with contextlib.suppress(OSError):  # who asked has gone
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(envelope)))
                    self.end_headers()
                    self.wfile.write(envelope)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class Process:
    """A `swarmproof peer` that listens on loopback, with what it says and how it is."""

    def __init__(self, folder: Path, *arguments: str, wait: bool = True) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / "log").open("wb")
        command = [sys.executable, "-m", "node.cli", "peer", "--state", str(folder), *arguments]
        if "--peer-listen" not in arguments:
            command += ["--peer-listen", "127.0.0.1:0"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)
        self.invitation: Invitation | None = None
        if wait:
            self.wait_up()

    @property
    def address(self) -> Address:
        assert self.invitation is not None
        return self.invitation.peers[0]

    @property
    def node(self) -> bytes:
        return self.address.node

    def wait_up(self) -> None:
        """Until it says how to join."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline().decode()
        assert line, f"it ended before it was up:\n{self.log()}"
        self.invitation = parse_join(line.strip())

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def status(self) -> dict:
        """What it wrote of itself last."""
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError, ValueError):
                return json.loads((self.folder / "status.json").read_text())
            assert time.monotonic() < deadline, "it wrote no status"
            time.sleep(0.05)

    def rss(self) -> float:
        """Resident memory, in MiB."""
        return psutil.Process(self.child.pid).memory_info().rss / 2**20

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        times = psutil.Process(self.child.pid).cpu_times()
        return times.user + times.system

    def sockets(self) -> int:
        """TCP connections that it holds."""
        found = psutil.Process(self.child.pid).net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED for each in found)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()
        self._log.close()


class Newcomer:
    """A process that joins as often as it is told to, each time as a new node with a new key and an empty folder."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("p2p_newcomer.py")
        self._child = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        assert self._child.stdout.readline().strip() == "ready"

    def joins(self, *addresses: Address, seconds: float = 20.0) -> tuple[float, int]:
        """Seconds until it had the run's descriptor (inf: it did not), and which version."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        asked = {"run_id": RUN_ID, "addresses": [str(address) for address in addresses], "seconds": seconds}
        self._child.stdin.write(json.dumps(asked) + "\n")
        self._child.stdin.flush()
        took, version = json.loads(self._child.stdout.readline())
        return (float("inf") if took is None else took), version

    def close(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(60)
        self._child.stdout.close()


@contextlib.contextmanager
def counting_listener() -> Iterator[tuple[int, list[float]]]:
    """A port, and when it was called: somebody's who has nothing to do with the run."""
    calls: list[float] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(512)
        server.settimeout(0.1)
        stop = threading.Event()

        def accept() -> None:
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    peer, _ = server.accept()
                    calls.append(time.monotonic())
                    peer.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1], calls
        finally:
            stop.set()
            thread.join()


@dataclass
class Scene:
    """A victim, its coordinator, and what it was before the first attack."""

    victim: Process
    newcomer: Newcomer
    coordinator: SmallCoordinator
    rss: float
    version: int = 1

    @property
    def address(self) -> Address:
        return self.victim.address

    def post_newer(self) -> None:
        """The run moves on, and the victim hears of it."""
        self.version += 1
        self.coordinator.post(descriptor(self.version), self.version)
        until(lambda: self.victim.status()["descriptor_version"] == self.version)

    def served(self) -> tuple[float, int]:
        """The seconds that a newcomer took, and what it learned; another may try after a pause of the machine."""
        for _ in range(2):
            took, got = self.newcomer.joins(self.address)
            if took < SERVED_SECONDS:
                break
        return took, got

    async def assert_served(self) -> None:
        """A newcomer is served now, in time, while the attack goes on."""
        took, _ = await trio.to_thread.run_sync(self.served)
        assert took < SERVED_SECONDS

    def neighbours(self) -> list[str]:
        return self.victim.status()["network"]["neighbours"]

    def assert_unharmed(self) -> None:
        """The victim is up, as small as it was, and serves who comes now what holds now."""
        victim = self.victim
        assert victim.child.poll() is None, f"the victim is dead:\n{victim.log()[-4000:]}"
        took, got = self.served()
        assert took < SERVED_SECONDS, f"a newcomer was served after {took:.1f} s:\n{victim.log()[-4000:]}"
        assert got == self.version
        assert victim.rss() - self.rss < QUIET_MIB
        assert victim.status()["network"]["restarts"] == 0, victim.log()[-4000:]
        assert "Traceback" not in victim.log()


@contextlib.contextmanager
def set_up(folder: Path) -> Iterator[Scene]:
    """A victim that runs in `folder`, has the run's descriptor and has been joined once."""
    coordinator, newcomer = SmallCoordinator(), Newcomer()
    victim = Process(folder, "--coordinator", coordinator.url, "--run-id", RUN_ID)
    try:
        took, _ = newcomer.joins(victim.address)
        assert took < SERVED_SECONDS
        yield Scene(victim, newcomer, coordinator, victim.rss())
    finally:
        victim.close()
        newcomer.close()
        coordinator.close()


@pytest.fixture(scope="module", name="standing")
def standing_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The victim of one module's tests."""
    with set_up(tmp_path_factory.mktemp("victim")) as scene:
        yield scene


@pytest.fixture(name="scene")
def scene_fixture(standing: Scene) -> Iterator[Scene]:
    """The victim, which every test leaves as it was."""
    yield standing
    standing.assert_unharmed()
