"""The services of deploy/images/compose.yaml as processes, from its own commands: each of them is killed with -9.

What an operator would lose: rollouts that were admitted, or the run itself, because a process does not come back as its
container would. PostgreSQL is a real one, with a password in a file; moto stands for the object store, and is not
killed, since it keeps nothing on disk.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from locations import ROOT
from notified import Manager
from object_store import ACCESS_KEY, SECRET_KEY, Store, object_store
from ports import free_port
from postgresql import binaries
from run_files import small_run_toml
from run_log import check_entries, read_leaves
from waiting import is_quiet, until

from coordinator.lab.processes.local_http import get, get_json
from node.keys.identity import create_key
from node.protocol.run import run_id_of
from node.runtime.service_manager import ALIVE, READY

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900), pytest.mark.usefixtures("forked_commands")]

IMAGES = ROOT / "deploy" / "images"
SERVICES = yaml.safe_load((IMAGES / "compose.yaml").read_text())["services"]
OURS = ("coordinator", "trainer", "verifier", "relay", "worker")
DEFAULT_URLS = {"coordinator": "http://127.0.0.1:8700/health", "relay": "http://127.0.0.1:8720/health"}
DEFAULT_URLS |= {"worker": "http://127.0.0.1:8743/metrics"}
"""The images' own, which test_images.py compares."""
STEPS, GROUPS_PER_STEP, PASSWORD = 12, 2, "a secret of the database"
START_SECONDS = FINISH_SECONDS = 300.0


def health_check() -> list[str]:
    """The images' command."""
    (found,) = re.findall(r"(?m)^HEALTHCHECK .*? CMD (.*)$", (IMAGES / "Containerfile").read_text())
    command: list[str] = json.loads(found)
    assert command[0] == "python3"
    return [sys.executable, *command[1:]]


class Host:
    """A host that runs the services: ports and folders are its own, and all names are its loopback's."""

    def __init__(self, home: Path, store: Store) -> None:
        self.home, self.store = home, store
        self.ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.managers = {name: Manager(str(home / f"{name}.notify")) for name in OURS}
        for name in ("secrets", "logs"):
            (home / name).mkdir()
        (home / "run.toml").write_text(small_run_toml("compose", steps=STEPS, groups_per_step=GROUPS_PER_STEP))
        key = create_key(home / "secrets" / "run.key")
        self.run_id = run_id_of(key.public_key().public_bytes_raw())
        profile = f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        (home / "secrets" / "s3-credentials").write_text(profile)
        pgpass = home / "secrets" / "pgpass"
        pgpass.write_text(f"*:*:*:swarmproof:{PASSWORD}\n")
        pgpass.chmod(0o400)
        self._create_database()

    def here(self, service: str, text: str) -> str:
        """What a service is told, as it is on this host."""
        given = {"RUN_NAME": "127.0.0.1", "RUN_ID": self.run_id}
        text = re.sub(r"\$\{(\w+):\?\}", lambda found: given[found[1]], text)
        shared = any(volume.startswith("data:") for volume in SERVICES[service].get("volumes", ()))
        places = {
            "/var/lib/swarmproof/data": self.home / ("data" if shared else f"{service}-data"),
            "/var/lib/swarmproof/state": self.home / service,
            "/etc/swarmproof": self.home,
            "/run/secrets": self.home / "secrets",
            "s3://swarmproof/run": self.store.url,
            "@postgresql/": f"@127.0.0.1:{self.port('5432')}/",
        }
        for there, place in places.items():
            text = text.replace(there, str(place))
        text = re.sub(r"//(coordinator|trainer|store):", "//127.0.0.1:", text)
        text = text.replace("http://127.0.0.1:8333", self.store.endpoint)
        return re.sub(r"\b87[0-9]{2}$|\b87[0-9]{2}(?=/)", lambda found: str(self.port(found[0])), text)

    def port(self, there: str) -> int:
        return self.ports.setdefault(there, free_port())

    def environment(self, service: str) -> dict[str, str]:
        said = SERVICES[service].get("environment", {})
        own = {"OMP_NUM_THREADS": "1", "SWARMPROOF_COORDINATOR_UNCALIBRATED": "1", "AWS_CONFIG_FILE": "/dev/null"}
        watched = {"NOTIFY_SOCKET": str(self.home / f"{service}.notify"), "WATCHDOG_USEC": "600000000"}
        return {**os.environ, **own, **watched, **{name: self.here(service, value) for name, value in said.items()}}

    def health_url(self, service: str) -> str:
        return self.environment(service).get("HEALTH_URL") or self.here(service, DEFAULT_URLS[service])

    def start(self, service: str) -> None:
        if service == "postgresql":
            command = [
                *self._as_its_user,
                binaries() / "postgres",
                "-D",
                self.home / service,
                "-k",
                self.home / service,
            ]
            command += ["-c", "listen_addresses=127.0.0.1", "-p", str(self.port("5432"))]
            self._open(service, command, {})
        else:
            arguments = [self.here(service, part) for part in SERVICES[service]["command"]]
            self._open(service, [sys.executable, "-m", "node.cli", *arguments], self.environment(service))

    def start_outside(self, *arguments: str) -> None:
        """A worker of somebody else's, who was told nothing but how to join."""
        command = [sys.executable, "-m", "node.cli", "worker", "--state", str(self.home / "outside"), *arguments]
        self._open("outside", command, {"OMP_NUM_THREADS": "1"})

    def do(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "node.cli", *(self.here("coordinator", part) for part in arguments)]
        environment = self.environment("coordinator")
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout

    def kill(self, service: str) -> None:
        """With -9, and all that it started, as the end of a container does."""
        os.killpg(self.processes[service].pid, signal.SIGKILL)
        self.processes.pop(service).wait(60)

    def end(self) -> None:
        for service in sorted(self.processes, key="postgresql".__eq__):  # the database last
            process = self.processes.pop(service)
            process.send_signal(signal.SIGINT if service == "postgresql" else signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)
        for manager in self.managers.values():
            manager.close()

    def keep_running(self) -> None:
        """Start again what has ended, as `restart: unless-stopped` does."""
        for service, process in list(self.processes.items()):
            if process.poll() is not None:
                assert service != "outside", self.said()
                self.start(service)

    def answers(self, service: str) -> bool:
        try:
            return get(self.health_url(service), seconds=10.0) is not None
        except OSError:
            return False

    def check(self, service: str) -> int:
        """The exit code of the images' health check."""
        environment = {**os.environ, "HEALTH_URL": self.health_url(service), "http_proxy": "http://127.0.0.1:1"}
        return subprocess.run(health_check(), env=environment, capture_output=True, check=False, timeout=60).returncode

    def takes_connections(self) -> bool:
        try:
            self.connect("postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def connect(self, database: str) -> psycopg.Connection[Any]:
        port = self.port("5432")
        return psycopg.connect(
            host="127.0.0.1", port=port, user="swarmproof", password=PASSWORD, dbname=database, autocommit=True
        )

    def status(self) -> dict[str, Any]:
        return get_json(self.health_url("coordinator").replace("/health", "/v1/status"), seconds=60.0) or {}

    def steps(self) -> int:
        return int(self.status().get("finished_steps", 0))

    def said(self) -> str:
        logs = sorted((self.home / "logs").glob("*.log"))
        return "\n".join(f"-- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)

    @property
    def _as_its_user(self) -> list[str]:
        """PostgreSQL refuses to run as root."""
        if os.geteuid() != 0:
            return []
        user = pwd.getpwnam("pgserver")
        return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]

    def _create_database(self) -> None:
        folder, password = self.home / "postgresql", self.home / "postgres-password"
        folder.mkdir()
        password.write_text(PASSWORD)
        if os.geteuid() == 0:
            shutil.chown(folder, "pgserver")
            shutil.chown(password, "pgserver")
        command = [*self._as_its_user, binaries() / "initdb", "-U", "swarmproof", "--auth=scram-sha-256"]
        subprocess.run([*command, f"--pwfile={password}", "-D", folder], check=True, capture_output=True, cwd=folder)
        self.start("postgresql")
        until(self.takes_connections, what=self.said)
        with self.connect("postgres") as connection:
            connection.execute("CREATE DATABASE swarmproof")

    def _open(self, service: str, command: list[Any], environment: Mapping[str, str]) -> None:
        with (self.home / "logs" / f"{service}.log").open("ab") as log:
            self.processes[service] = subprocess.Popen(
                [str(part) for part in command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
            )


@pytest.fixture
def host() -> Iterator[Host]:
    with object_store() as store, tempfile.TemporaryDirectory(prefix="compose-") as folder:
        Path(folder).chmod(0o755)
        host = Host(Path(folder), store)
        try:
            yield host
        finally:
            host.end()


def test_the_services_come_up_a_worker_outside_joins_and_none_that_is_killed_loses_anything(host: Host) -> None:
    def wait_for(service: str) -> None:
        until(lambda: host.answers(service), seconds=START_SECONDS, meanwhile=host.keep_running, what=host.said)

    assert host.check("coordinator") != 0, "nobody listens there yet"
    for service in OURS:
        host.start(service)
        wait_for(service)
        assert host.check(service) == 0
    for service, manager in host.managers.items():
        heard: list[str] = []
        until(lambda: (heard.extend(manager.heard()), ALIVE in heard)[1], what=host.said)  # noqa: B023
        assert heard[0] == READY, f"{service} is not ready, and watched"

    database = ["--data", "/var/lib/swarmproof/data", "--database-url", "postgresql://swarmproof@postgresql/swarmproof"]
    joining = re.search(r"swarmproof://\S+", host.do("join-string", *database))
    assert joining is not None
    host.start_outside("--join", joining[0])
    url = host.health_url("coordinator").removesuffix("/health")
    leaves: list[bytes] = []
    for number, service in enumerate(("coordinator", "trainer", "verifier", "relay", "worker", "postgresql"), start=1):
        until(lambda: host.steps() >= number, seconds=START_SECONDS, meanwhile=host.keep_running, what=host.said)  # noqa: B023
        before, leaves = leaves, read_leaves(url)
        assert leaves[: len(before)] == before, "the log was rewritten"
        host.kill(service)
        host.start(service)
        if service == "postgresql":
            until(host.takes_connections, meanwhile=host.keep_running, what=host.said)
        else:
            wait_for(service)
    until(
        lambda: bool(host.status().get("finished")), seconds=FINISH_SECONDS, meanwhile=host.keep_running, what=host.said
    )
    until(lambda: is_quiet(host.status()), meanwhile=host.keep_running, what=host.said)

    before, leaves = leaves, read_leaves(url)
    assert leaves[: len(before)] == before, "the log was rewritten"
    check_entries(leaves, steps=STEPS)
    assert len(host.status()["nodes"]) == 2, "the worker outside, and the one beside"
    assert not (host.home / "data" / "blobs").exists()
