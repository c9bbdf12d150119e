"""A host that runs deploy/images/compose.yaml: each service as a process, or in a container of its image.

PostgreSQL is a real one, a process in either case, with a password in a file; moto stands for the object store.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
import yaml
from built_images import Images
from locations import ROOT
from notified import Manager
from object_store import ACCESS_KEY, SECRET_KEY, Store
from ports import free_port
from postgresql import binaries
from waiting import until

from coordinator.lab.processes.local_http import get, get_json
from node.keys.identity import create_key
from node.protocol.run import run_id_of

IMAGES = ROOT / "deploy" / "images"
SERVICES = yaml.safe_load((IMAGES / "compose.yaml").read_text())["services"]
OURS = ("coordinator", "trainer", "verifier", "relay", "worker")
DEFAULT_URLS = {"coordinator": "http://127.0.0.1:8700/health", "relay": "http://127.0.0.1:8720/health"}
DEFAULT_URLS |= {"worker": "http://127.0.0.1:8743/metrics"}
"""The images' own, which test_images.py compares."""
PASSWORD = "a secret of the database"
USER = 10001


def health_check() -> list[str]:
    """The images' command."""
    (found,) = re.findall(r"(?m)^HEALTHCHECK .*? CMD (.*)$", (IMAGES / "Containerfile").read_text())
    command: list[str] = json.loads(found)
    assert command[0] == "python3"
    return [sys.executable, *command[1:]]


class Host:
    """A host that runs the services: ports and folders are its own, and all names are its loopback's."""

    def __init__(self, home: Path, store: Store, *, run_toml: str) -> None:
        self.home, self.store = home, store
        self.ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.managers = {name: Manager(str(home / f"{name}.notify")) for name in OURS}
        for name in ("secrets", "logs"):
            (home / name).mkdir()
        (home / "run.toml").write_text(run_toml)
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
        names = {"s3://swarmproof/run": self.store.url, "@postgresql/": f"@127.0.0.1:{self.port('5432')}/"}
        for there, place in {**names, **self.places(service)}.items():
            text = text.replace(there, str(place))
        text = re.sub(r"//(coordinator|trainer|store):", "//127.0.0.1:", text)
        text = text.replace("http://127.0.0.1:8333", self.store.endpoint)
        return re.sub(r"\b87[0-9]{2}$|\b87[0-9]{2}(?=/)", lambda found: str(self.port(found[0])), text)

    def places(self, service: str) -> Mapping[str, Path]:
        """The folders of a container, and what they are on this host."""
        shared = any(volume.startswith("data:") for volume in SERVICES[service].get("volumes", ()))
        return {
            "/var/lib/swarmproof/data": self.home / ("data" if shared else f"{service}-data"),
            "/var/lib/swarmproof/state": self.home / service,
            "/etc/swarmproof": self.home,
            "/run/secrets": self.home / "secrets",
        }

    def port(self, there: str) -> int:
        return self.ports.setdefault(there, free_port())

    def environment(self, service: str) -> dict[str, str]:
        said = SERVICES[service].get("environment", {})
        own = {"OMP_NUM_THREADS": "1", "SWARMPROOF_COORDINATOR_UNCALIBRATED": "1", "AWS_CONFIG_FILE": "/dev/null"}
        return own | {name: self.here(service, value) for name, value in said.items()}

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
            self._start_ours(service, [self.here(service, part) for part in SERVICES[service]["command"]])

    def start_outside(self, *arguments: str) -> None:
        """A worker of somebody else's, who was told nothing but how to join."""
        command = [sys.executable, "-m", "node.cli", "worker", "--state", str(self.home / "outside"), *arguments]
        self._open("outside", command, {"OMP_NUM_THREADS": "1"})

    def do(self, *arguments: str) -> str:
        """What the program prints beside the coordinator."""
        command = [sys.executable, "-m", "node.cli", *(self.here("coordinator", part) for part in arguments)]
        environment = {**os.environ, **self.environment("coordinator")}
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

    def is_healthy(self, service: str) -> bool:
        """What the images' health check says."""
        environment = {**os.environ, "HEALTH_URL": self.health_url(service), "http_proxy": "http://127.0.0.1:1"}
        return not subprocess.run(health_check(), env=environment, capture_output=True, check=False).returncode

    def takes_connections(self, user: str = "swarmproof") -> bool:
        try:
            self.connect(user).close()
        except psycopg.OperationalError:
            return False
        return True

    def connect(self, user: str = "swarmproof") -> psycopg.Connection[Any]:
        """To the database of the user's name."""
        port = self.port("5432")
        return psycopg.connect(host="127.0.0.1", port=port, user=user, password=PASSWORD, dbname=user, autocommit=True)

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
        folder, password = self.home / "postgresql", self.home / "secrets" / "postgres-password"
        folder.mkdir()
        password.write_text(PASSWORD)
        if os.geteuid() == 0:
            shutil.chown(folder, "pgserver")
            shutil.chown(password, "pgserver")
        command = [*self._as_its_user, binaries() / "initdb", "-U", "postgres", "--auth=scram-sha-256"]
        subprocess.run([*command, f"--pwfile={password}", "-D", folder], check=True, capture_output=True, cwd=folder)
        self.start("postgresql")
        until(lambda: self.takes_connections("postgres"), what=self.said)
        # As the image's entry point does.
        script = (IMAGES / "database.sql").read_text().replace("/run/secrets", str(password.parent))
        connection = {"PGHOST": "127.0.0.1", "PGPORT": self.port("5432"), "PGUSER": "postgres", "PGPASSWORD": PASSWORD}
        environment = os.environ | {name: str(value) for name, value in connection.items()}
        command = [binaries() / "psql", "-v", "ON_ERROR_STOP=1", "--no-psqlrc"]
        subprocess.run(command, input=script, env=environment, text=True, check=True, capture_output=True)

    def _start_ours(self, service: str, arguments: list[str]) -> None:
        watched = {"NOTIFY_SOCKET": str(self.home / f"{service}.notify"), "WATCHDOG_USEC": "600000000"}
        self._open(service, [sys.executable, "-m", "node.cli", *arguments], {**self.environment(service), **watched})

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


class ContainerHost(Host):
    """One that runs ours in containers, as compose.yaml has them, but in the host's network."""

    def __init__(self, home: Path, store: Store, *, run_toml: str, images: Images) -> None:
        self._podman, self._prefix = images.podman, home.name
        for target in ("operator", "relay", "worker"):
            images.build(target)
        super().__init__(home, store, run_toml=run_toml)
        for path in (home / "secrets").iterdir():
            os.chown(path, USER, USER)

    def places(self, service: str) -> Mapping[str, Path]:
        return {}

    def do(self, *arguments: str) -> str:
        inside = [self.here("coordinator", part) for part in arguments]
        return self._podman("exec", self._name("coordinator"), "swarmproof", *inside)

    def is_healthy(self, service: str) -> bool:
        try:
            self._podman("healthcheck", "run", self._name(service))
        except subprocess.CalledProcessError:
            return False
        return True

    def kill(self, service: str) -> None:
        if service in OURS:
            self._podman("kill", "--signal", "KILL", self._name(service))
            self.processes.pop(service).wait(60)
        else:
            super().kill(service)

    def end(self) -> None:
        super().end()  # podman hands signals on
        self._podman("rm", "--all", "--force")
        self._podman("volume", "rm", "--all", "--force")

    def _name(self, service: str) -> str:
        return f"{self._prefix}-{service}"

    def _start_ours(self, service: str, arguments: list[str]) -> None:
        one, secrets = SERVICES[service], self.home / "secrets"
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        options = ["--rm", "--replace", "--name", self._name(service), "--network", "host", "--read-only"]
        options += ["--cap-drop", "all", "--security-opt", "no-new-privileges", "--sdnotify", "ignore"]
        options += [f"--ulimit=nofile={files}:{files}", "--ulimit=nproc=4096:4096"]
        for volume in one.get("volumes", ()):
            options += ["--volume", f"{self._prefix}-{volume}"]
        for place in one["tmpfs"]:
            options += ["--tmpfs", place]
        for secret in one.get("secrets", ()):
            options += ["--volume", f"{secrets / secret}:/run/secrets/{secret}:ro"]
        for config in one.get("configs", ()):
            options += ["--volume", f"{self.home / config['source']}:{config['target']}:ro"]
        for name, value in (self.environment(service) | {"HEALTH_URL": self.health_url(service)}).items():
            options += ["--env", f"{name}={value}"]
        command = [*self._podman.command, "run", *options, f"localhost/{one['image']}", *arguments]
        self._open(service, command, self._podman.environment)
