"""Which processes a swarm on one machine has, where each listens, and which folder each keeps.

coordinator, verifier, trainer (with the origin)  <-  root relay  <-  leaf relays  <-  workers

Relays and honest workers are told one string, and find the coordinator by the peer that it runs.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import SystemRandom

from coordinator.lab.processes.errors import DemoError
from coordinator.lab.processes.journal import read_nodes
from coordinator.lab.processes.supervisor import Command
from coordinator.run.peer_child import PEER_FOLDER, PeerPlan, has_libp2p
from node.keys.identity import create_key, load_or_create_key, node_id
from node.protocol.peers import Invitation
from node.protocol.run import RunSpec, parse_run_toml, run_id_of

HOST = "127.0.0.1"
HONEST = "honest"
BAD_RELAY = "relay-hostile"
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
class Hostile:
    """A hostile process to be: its attacks (`coordinator.lab.redteam.attacks`), and further options of it."""

    kind: str
    attacks: tuple[str, ...]
    options: tuple[str, ...] = ()


_NOW_AND_THEN = ("--share", "0.06")
STRATEGIES = (
    Hostile("other-model", ("other-model",), _NOW_AND_THEN),
    Hostile("colluder", ("colluder",), _NOW_AND_THEN),
)
"""Those of the demonstration: one who saves the cost of the real weights, and one who would teach its own answer."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker: `kind` is "honest" or the kind of a hostile one, `node` its id, or its first."""

    name: str
    kind: str
    node: str
    state: Path

    @property
    def honest(self) -> bool:
        """Whether this worker runs the released daemon."""
        return self.kind == HONEST

    @property
    def nodes(self) -> frozenset[str]:
        """All the identities that it has used so far: a hostile one that is thrown out takes another."""
        return frozenset((self.node,)) if self.honest else read_nodes(self.state) | {self.node}


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


FAMILY_RULES: Mapping[str, Mapping[str, str | float]] = {"frame-action": {"max_new_tokens": 24}}
"""What the demonstration's run.toml says otherwise for some families, as `demo_run_toml` takes it."""
FAMILY_ENVIRONMENTS: Mapping[str, str] = {"frame-action": "terminal"}
"""Of families that do other tasks."""


def family_run_toml(family: str, **changes: str | float) -> str:
    """Return `demo_run_toml` for a policy of `family`."""
    text = demo_run_toml(**{"initial": f'"{family}"', **FAMILY_RULES.get(family, {}), **changes})
    if family in FAMILY_ENVIRONMENTS:
        entry = f'[[environments]]\nname = "{FAMILY_ENVIRONMENTS[family]}"\n\n'
        text = re.sub(r"(?ms)^\[\[environments\]\].*?(?=^\[[a-z])", entry, text)
    return text


def demo_run_toml(**changes: str | float) -> str:
    """Return the demo's run.toml, the first key of each given name set to that TOML value."""
    text = resources.files("coordinator.lab.demo").joinpath("run.toml").read_text(encoding="utf-8")
    for key, value in changes.items():
        text, found = re.subn(rf"(?m)^{key} = [^ #\n]+", f"{key} = {value}", text, count=1)
        if found != 1:
            raise ValueError(f"run.toml has no key {key}")
    return text


def lay_out(
    folder: Path,
    run_toml: str,
    *,
    honest: int = 3,
    hostile: tuple[Hostile, ...] = STRATEGIES,
    leaves: int = 2,
    engine: str = "torch",
    worker_options: tuple[str, ...] = (),
    bad_relay: bool = False,
) -> Swarm:
    """Make the folder of a new run with its keys, and plan its processes; raises FileExistsError, Malformed.

    `engine` and `worker_options` are the honest workers'; the hostile ones cheat with torch. With `bad_relay`, one
    more relay announces itself, and is an upstream of the last leaf: whatever it sends of a policy is wrong.
    """
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(run_toml, encoding="utf-8")
    run_id = run_id_of(create_key(folder / "run.key").public_key().public_bytes_raw())
    relay_names = ("relay-root", *(f"relay-leaf-{index}" for index in range(1, leaves + 1)))
    coordinator, origin, bad, peer, *relay_ports = free_ports(4 + len(relay_names))
    coordinator_url, origin_url = _url(coordinator), _url(origin)
    relays = {name: _url(port) for name, port in zip(relay_names, relay_ports, strict=True)}
    released = [_place(folder, f"{HONEST}-{index}", HONEST) for index in range(1, honest + 1)]
    raiders = [_place(folder, f"hostile-{one.kind}", one.kind) for one in hostile]
    url = ("--coordinator", coordinator_url, "--run-id", run_id)
    join = _join(folder, run_id, peer) if has_libp2p() else url
    upstreams: dict[str, tuple[str, ...]] = dict.fromkeys(relay_names, (relays["relay-root"],))
    upstreams["relay-root"] = (origin_url,)
    if bad_relay:
        upstreams[relay_names[-1]] += (_url(bad),)
    commands = [
        *_operator_commands(folder, coordinator=coordinator, origin=origin, peer=peer),
        *(_relay(name, url, upstreams[name], join, folder=folder) for name, url in relays.items()),
        *([_bad_relay(_url(bad), origin_url, url, folder=folder)] if bad_relay else []),
        *(_worker(place, join, (*_ENGINE_OPTIONS[engine], *worker_options), engine=engine) for place in released),
        *(_raider(place, one, url) for place, one in zip(raiders, hostile, strict=True)),
    ]
    return Swarm(
        folder=folder,
        run_id=run_id,
        spec=parse_run_toml(run_toml),
        coordinator_url=coordinator_url,
        origin_url=origin_url,
        relays=relays,
        workers=(*released, *raiders),
        commands=tuple(commands),
    )


def free_ports(count: int) -> list[int]:
    """Return `count` distinct free ports of this machine, all bound while they are chosen."""
    held: list[socket.socket] = []
    try:
        for port in SystemRandom().sample(_PORTS, k=min(1000, len(_PORTS))):
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


def _cli(name: str, *arguments: str, wave: int) -> Command:
    return Command(name, ("-m", "node.cli", *arguments), wave=wave)


def _join(folder: Path, run_id: str, port: int) -> tuple[str, ...]:
    """Return the options of a contributor who knows the invitation only."""
    addresses = PeerPlan(state=_peer_state(folder), host=HOST, port=port).addresses()
    return "--join", str(Invitation(run_id, addresses)), "--peer-listen", f"{HOST}:0"


def _peer_options(folder: Path, port: int) -> tuple[str, ...]:
    return "--peer-port", str(port), "--peer-state", str(_peer_state(folder))


def _peer_state(folder: Path) -> Path:
    """Return the peer's folder: beside the data, which may be a disk that is mounted later."""
    return folder / PEER_FOLDER


def _operator_commands(folder: Path, *, coordinator: int, origin: int, peer: int) -> list[Command]:
    data, key = ("--data", str(folder / "data")), ("--key", str(folder / "run.key"))
    run = ("--run", str(folder / "run.toml"))
    return [
        _cli(
            "coordinator",
            *("coordinator", "--uncalibrated", *run, *key, *data, "--host", HOST, "--port", str(coordinator)),
            *_peer_options(folder, peer),
            wave=0,
        ),
        _cli(
            "trainer",
            *("trainer", *data, *key, "--state", str(folder / "trainer"), "--host", HOST, "--port", str(origin)),
            wave=1,
        ),
        _cli(
            "verifier",
            *("verifier", *data, "--state", str(folder / "verifier"), "--name", "verifier-1", "--source", _url(origin)),
            *("--device", "cpu"),
            wave=1,
        ),
    ]


def _relay(name: str, url: str, upstreams: tuple[str, ...], join: tuple[str, ...], *, folder: Path) -> Command:
    state = ("--state", str(folder / name), "--host", HOST, "--port", url.rpartition(":")[2])
    asked = [option for upstream in upstreams for option in ("--upstream", upstream)]
    return _cli(name, "relay", *join, *asked, *state, wave=2)


def _bad_relay(url: str, upstream: str, join: tuple[str, ...], *, folder: Path) -> Command:
    where = ("--state", str(folder / BAD_RELAY), "--host", HOST, "--port", url.rpartition(":")[2])
    arguments = ("-m", "coordinator.lab.redteam.relay", *join, "--upstream", upstream, *where)
    return Command(BAD_RELAY, arguments, wave=2)


def _worker(place: WorkerPlace, join: tuple[str, ...], options: tuple[str, ...], *, engine: str) -> Command:
    # Many processes of small policies: contexts on a GPU would take more than they bring.
    own = ("--state", str(place.state), "--engine", engine, *(("--device", "cpu") if engine == "torch" else ()))
    return _cli(place.name, "worker", *join, *own, *options, wave=3)


def _raider(place: WorkerPlace, hostile: Hostile, join: tuple[str, ...]) -> Command:
    attacks = [option for attack in hostile.attacks for option in ("--attack", attack)]
    options = (*attacks, *join, "--state", str(place.state), *hostile.options)
    return Command(place.name, ("-m", "coordinator.lab.redteam.process", *options), wave=3)
