"""deploy/one-host/supervisord.conf as an operator starts it, with an API and a verifier killed in the middle.

What is at stake is the promise that an operator scales out for: that no process matters. Bodies are in an object store,
as where there are several machines.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from locations import ROOT
from object_store import Store, object_store
from ports import free_port
from postgresql import binaries
from run_files import small_run_toml
from run_log import check_entries, read_leaves
from waiting import until

from coordinator.lab.processes.layout import free_ports
from coordinator.lab.processes.local_http import get, get_json

pytestmark = [pytest.mark.timeout(1200)]

HERE = ROOT / "deploy" / "one-host"
BIN = Path(sys.executable).parent
STEPS, GROUPS_PER_STEP = 8, 4
RUN_TOML = small_run_toml("many processes", steps=STEPS, groups_per_step=GROUPS_PER_STEP)


def free_tens() -> int:
    """A tenth of a port number, such that it is free with a 0 and with a 1 behind it."""
    for tens in (free_port() // 10 for _ in range(1000)):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", 10 * tens))
                second.bind(("127.0.0.1", 10 * tens + 1))
            except OSError:
                continue
            return tens
    raise AssertionError("no free ports")


class Host:
    """The processes of one host, and what they say."""

    def __init__(self, home: Path, store: Store) -> None:
        self.home, self.ports = home, free_tens()
        origin, relay = [port for port in free_ports(4) if port // 10 != self.ports][:2]
        names = pwd.getpwuid(os.getuid()).pw_name, "pgserver"
        self.postgres_user = names[os.geteuid() == 0]  # it refuses to run as root
        (home / "log").mkdir()
        (home / "run.toml").write_text(RUN_TOML)
        self.environment = os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RUN_HOME": str(home),
            "API_PORTS": str(self.ports),
            "ORIGIN_PORT": str(origin),
            "RELAY_PORT": str(relay),
            "POSTGRES_BIN": str(binaries()),
            "POSTGRES_USER": self.postgres_user,
            "OMP_NUM_THREADS": "1",
            "SWARMPROOF_COORDINATOR_BLOBS": store.url,
            "SWARMPROOF_COORDINATOR_UNCALIBRATED": "1",
            **store.environment,
        }
        self.do("swarmproof", "keys", "new", str(home / "run.key"))
        self.run_id = self.do("swarmproof", "keys", "run-id", str(home / "run.key")).strip()
        folder = home / "postgresql"
        folder.mkdir()
        user = {"user": self.postgres_user} if os.geteuid() == 0 else {}
        shutil.chown(folder, self.postgres_user)
        initdb = [binaries() / "initdb", "-U", "postgres", "--auth=trust", "-D", folder]
        subprocess.run(initdb, check=True, capture_output=True, cwd=folder, **user)

    @property
    def urls(self) -> tuple[str, str]:
        return f"http://127.0.0.1:{self.ports}0", f"http://127.0.0.1:{self.ports}1"

    def shell(self, command: str) -> list[str]:
        """As the page has it: run.env, then the command."""
        return ["bash", "-c", f'set -a; . "{HERE}/run.env"; set +a; exec {command}']

    def do(self, *command: str) -> str:
        ran = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, cwd=self.home)
        assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    def worker(self, index: int, url: str) -> subprocess.Popen[bytes]:
        command = f"swarmproof worker --coordinator {url} --run-id {self.run_id} --state {self.home}/worker-{index}"
        with (self.home / "log" / f"worker-{index}.log").open("wb") as output:
            return subprocess.Popen(self.shell(command), env=self.environment, stdout=output, stderr=output)

    def processes(self, name: str) -> list[psutil.Process]:
        """Those of supervisord's children whose command line has `name`."""
        return [
            process for process in psutil.Process(self.supervisor.pid).children() if name in " ".join(process.cmdline())
        ]

    def until(self, condition: Callable[[], bool], *, seconds: float) -> None:
        def is_supervised() -> None:
            assert self.supervisor.poll() is None, "supervisord ended"

        until(condition, seconds=seconds, meanwhile=is_supervised, what=self.logs)

    def logs(self) -> str:
        return "\n".join(f"-- {path.name}\n{path.read_text()[-1500:]}" for path in (self.home / "log").glob("*.log"))

    def steps(self) -> int:
        status = get_json(f"{self.urls[1]}/v1/status", seconds=60.0) or {}
        return sum(step["finished_at"] is not None for step in status.get("steps", []))

    def answers(self, url: str) -> bool:
        try:
            with urlopen(f"{url}/health", timeout=2):
                return True
        except OSError:
            return False


@pytest.fixture
def host() -> Iterator[Host]:
    with object_store() as store, tempfile.TemporaryDirectory(prefix="host-") as folder:
        Path(folder).chmod(0o755)
        host = Host(Path(folder), store)
        with (Path(folder) / "log" / "supervisord.txt").open("wb") as output:
            command = host.shell(f'supervisord -c "{HERE}/supervisord.conf"')
            host.supervisor = subprocess.Popen(command, env=host.environment, stdout=output, stderr=output)
        try:
            yield host
        finally:
            children = psutil.Process(host.supervisor.pid).children(recursive=True)
            host.supervisor.terminate()
            host.supervisor.wait(120)
            _, left = psutil.wait_procs(children, timeout=60)
            for process in left:
                process.kill()
            assert not left, f"supervisord left {left}"


def test_an_api_and_a_verifier_that_are_killed_cost_nothing(host: Host) -> None:
    host.until(lambda: all(map(host.answers, host.urls)), seconds=240)
    workers = [host.worker(index, url) for index, url in enumerate(host.urls)]
    try:
        host.until(lambda: host.steps() >= 2, seconds=240)
        (api,) = host.processes(f"--port {host.ports}0")
        (verifier,) = host.processes("--name verifier-1")
        for victim in (api, verifier):
            victim.send_signal(signal.SIGKILL)
        # The first worker knows the second API by the run's descriptor alone.
        host.until(lambda: host.steps() == STEPS, seconds=240)
        host.until(lambda: host.answers(host.urls[0]), seconds=60)
        assert host.processes(f"--port {host.ports}0")[0].pid != api.pid
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)
    check_the_log(host)
    audit = ["swarmproof", "audit", host.urls[0], "--run-id", host.run_id, "--sample", "8", "--json"]
    audit += ["--state", str(host.home / "audit"), "--source", f"http://127.0.0.1:{host.environment['ORIGIN_PORT']}"]
    report = json.loads(host.do(*audit))
    assert (report["problems"], report["error"]) == ([], None)
    assert not (host.home / "data" / "blobs").exists()


def check_the_log(host: Host) -> None:
    """Each API serves the same, each submission was judged once, and each step has its batch."""
    leaves = read_leaves(host.urls[0])
    assert leaves == get(f"{host.urls[1]}/v1/log/entries?start=0&end=1000", seconds=60.0).splitlines()[: len(leaves)]
    check_entries(leaves, steps=STEPS)
