"""Which processes a swarm on one machine has, where each listens, and which folder each keeps.

coordinator, verifier, trainer (with the origin)  <-  root relay  <-  leaf relays  <-  workers
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import SystemRandom

from coordinator.demo.errors import DemoError
from coordinator.demo.supervisor import Command
from node.identity import create_key, load_or_create_key, node_id
from node.protocol.run import RunSpec, parse_run_toml, run_id_of

HOST = "127.0.0.1"
HONEST = "honest"
STRATEGIES = ("other-model", "colluder")
WORKER_KEY = "key"
_ENGINE_OPTIONS = {
    "torch": (),
    # One thread, as every process here has, and a cache that holds the slots of one worker.
    "vllm": ("--threads", "1", "--slots", "8", "--max-num-seqs", "64", "--kv-cache-gib", "0.25"),
}
_PORTS = range(15_000, 32_000)
"""Below the range of which Linux takes ports for outgoing connections: those must not land on a server's port
while the server is being started again."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker: `kind` is "honest" or the strategy of a hostile one, `node` its id."""

    name: str
    kind: str
    node: str
    state: Path

    @property
    def honest(self) -> bool:
        """Whether this worker runs the released daemon."""
        return self.kind == HONEST


@dataclass(frozen=True, slots=True)
class Swarm:
    """All that is needed to start a swarm and to watch it."""

    folder: Path
    run_id: str
    spec: RunSpec
    coordinator_url: str
    origin_url: str
    relays: dict[str, str]
    workers: tuple[WorkerPlace, ...]
    commands: tuple[Command, ...]

    @property
    def trainer_state(self) -> Path:
        """The trainer's folder, with its progress file."""
        return self.folder / "trainer"


def demo_run_toml(*, steps: int, seed: int) -> str:
    """The demonstration's run.toml with this many steps and this seed."""
    text = resources.files("coordinator.demo").joinpath("run.toml").read_text(encoding="utf-8")
    text = re.sub(r"(?m)^steps = \d+", f"steps = {steps}", text)
    return re.sub(r"(?m)^seed = \d+", f"seed = {seed}", text)


def lay_out(
    folder: Path,
    run_toml: str,
    *,
    honest: int = 3,
    hostile: tuple[str, ...] = STRATEGIES,
    leaves: int = 2,
    engine: str = "torch",
) -> Swarm:
    """Make the folder of a new run with its keys, and plan its processes; raises FileExistsError, Malformed.

    `engine` is the honest workers'; the hostile ones cheat with torch.
    """
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(run_toml, encoding="utf-8")
    run_id = run_id_of(create_key(folder / "run.key").public_key().public_bytes_raw())
    relay_names = ("relay-root", *(f"relay-leaf-{index}" for index in range(1, leaves + 1)))
    coordinator, origin, *relay_ports = free_ports(2 + len(relay_names))
    coordinator_url, origin_url = _url(coordinator), _url(origin)
    relays = {name: _url(port) for name, port in zip(relay_names, relay_ports, strict=True)}
    kinds = [(f"{HONEST}-{index}", HONEST) for index in range(1, honest + 1)]
    workers = [_place(folder, name, kind) for name, kind in (*kinds, *((f"hostile-{kind}", kind) for kind in hostile))]
    join = ("--coordinator", coordinator_url, "--run-id", run_id)
    commands = [
        *_operator_commands(folder, coordinator=coordinator, origin=origin),
        *(_relay(name, url, relays, join, origin=origin_url, folder=folder) for name, url in relays.items()),
        *(_worker(worker, join, engine=engine) for worker in workers),
    ]
    return Swarm(
        folder=folder,
        run_id=run_id,
        spec=parse_run_toml(run_toml),
        coordinator_url=coordinator_url,
        origin_url=origin_url,
        relays=relays,
        workers=tuple(workers),
        commands=tuple(commands),
    )


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nobody listens on, held open together while they are chosen."""
    held: list[socket.socket] = []
    try:
        for port in SystemRandom().sample(_PORTS, k=1000):
            candidate = socket.socket()
            held.append(candidate)
            # What a server does too: an earlier run's closed connections are no obstacle.
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind((HOST, port))
                candidate.listen()
            except OSError:
                held.pop().close()
            if len(held) == count:
                return [int(each.getsockname()[1]) for each in held]
    finally:
        for each in held:
            each.close()
    raise DemoError(f"there are no {count} free ports from {_PORTS.start} to {_PORTS.stop}")


def _url(port: int) -> str:
    return f"http://{HOST}:{port}"


def _place(folder: Path, name: str, kind: str) -> WorkerPlace:
    state = folder / name
    return WorkerPlace(name=name, kind=kind, node=node_id(load_or_create_key(state / WORKER_KEY)), state=state)


def _cli(name: str, *arguments: str, wave: int, health: str | None = None) -> Command:
    return Command(name, ("-m", "node.cli", *arguments), health_url=health, wave=wave)


def _operator_commands(folder: Path, *, coordinator: int, origin: int) -> list[Command]:
    data, key = ("--data", str(folder / "data")), ("--key", str(folder / "run.key"))
    run = ("--run", str(folder / "run.toml"))
    return [
        _cli(
            "coordinator",
            *("coordinator", *run, *key, *data, "--host", HOST, "--port", str(coordinator)),
            wave=0,
            health=f"{_url(coordinator)}/health",
        ),
        _cli(
            "trainer",
            *("trainer", *data, *key, "--state", str(folder / "trainer"), "--host", HOST, "--port", str(origin)),
            wave=1,
            health=f"{_url(origin)}/health",
        ),
        _cli(
            "verifier",
            *("verifier", *data, "--state", str(folder / "verifier"), "--name", "verifier-1", "--source", _url(origin)),
            wave=1,
        ),
    ]


def _relay(name: str, url: str, relays: dict[str, str], join: tuple[str, ...], *, origin: str, folder: Path) -> Command:
    upstream = origin if name == "relay-root" else relays["relay-root"]
    state = ("--state", str(folder / name), "--host", HOST, "--port", url.rpartition(":")[2])
    return _cli(name, "relay", *join, "--upstream", upstream, *state, wave=2, health=f"{url}/health")


def _worker(worker: WorkerPlace, join: tuple[str, ...], *, engine: str) -> Command:
    options = (*join, "--state", str(worker.state))
    if worker.honest:
        return _cli(worker.name, "worker", *options, "--engine", engine, *_ENGINE_OPTIONS[engine], wave=3)
    return Command(worker.name, ("-m", "coordinator.demo.hostile", "--kind", worker.kind, *options), wave=3)
