"""A contributor at home: behind a router that lets nobody in, knowing one string, it works and is reached all the same.

The namespaces and the router are real (`namespaces`); so are all processes, each in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from namespaces import HOME, OPERATOR, ROUTER, STREET, Internet, internet, needs_namespaces
from run_files import small_run_toml
from waiting import until

from coordinator.run.peer_child import PEER_FOLDER, PeerPlan
from node.keys.identity import create_key, load_key
from node.protocol.admission import Outcome
from node.protocol.messages import KeptReceipt, Receipt
from node.protocol.peers import Address, Invitation
from node.protocol.receipts import open_receipt
from node.protocol.run import run_id_of
from shardcast.wire import decode

pytest.importorskip("libp2p", reason="libp2p is not installed: pip install -e '.[p2p]'")

RUN_TOML = small_run_toml("behind a router", steps=50, groups_per_step=8, lease_seconds=20.0)
COORDINATOR, PEER, ORIGIN, RELAY, LISTEN = 8700, 8701, 8710, 8720, 8702
WORK_SECONDS = 240.0


@dataclass
class Scene:
    """A run whose only contributor is at home."""

    net: Internet
    folder: Path
    run_id: str
    peer: Address

    @property
    def join(self) -> str:
        """The one string that the home knows."""
        return str(Invitation(self.run_id, (self.peer,)))

    @property
    def home(self) -> bytes:
        """The public key of the contributor."""
        return load_key(self.folder / "home" / "key").public_key().public_bytes_raw()

    def receipts(self) -> list[Receipt]:
        """What the home has to show, each signed by the run."""
        kept = (self.folder / "home" / "receipts.ndjson").read_bytes().splitlines()
        envelopes = [decode(KeptReceipt, line, max_bytes=len(line)).envelope for line in kept]
        signer = load_key(self.folder / "run.key").public_key().public_bytes_raw()
        return [open_receipt(each, signer=signer) for each in envelopes]

    def worker(self) -> dict[str, Any]:
        """What the worker says of itself."""
        path = self.folder / "home" / "status.json"
        return json.loads(path.read_bytes()) if path.exists() else {}

    def until(self, condition: Callable[[], object], *, seconds: float) -> None:
        """Wait until it holds."""

        def said() -> str:
            return "\n".join(f"-- {name}\n{self.net.log(name)}" for name in self.net.processes)

        until(condition, seconds=seconds, what=lambda: f"{self.worker()}\n{said()}")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """The operator's processes, a relay in the street, and a worker at home that knows neither."""
    with internet(tmp_path / "logs") as net:
        (tmp_path / "run.toml").write_text(RUN_TOML)
        run_id = run_id_of(create_key(tmp_path / "run.key").public_key().public_bytes_raw())
        (peer,) = PeerPlan(state=tmp_path / "data" / PEER_FOLDER, host=OPERATOR, port=PEER).addresses()
        scene = Scene(net, tmp_path, run_id, peer)
        # So that the policy goes from the origin to the street, and from there to the home.
        net.forbid(ROUTER, OPERATOR, ORIGIN)
        data, key = ("--data", str(tmp_path / "data")), ("--key", str(tmp_path / "run.key"))
        at = ("--host", OPERATOR, "--port")
        origin = f"http://{OPERATOR}:{ORIGIN}"
        run = ("--run", str(tmp_path / "run.toml"))
        net.start("coordinator", "operator", "coordinator", "--uncalibrated", *run, *key, *data, *at, str(COORDINATOR))
        net.start("trainer", "operator", "trainer", *data, *key, "--state", str(tmp_path / "trainer"), *at, str(ORIGIN))
        verifier = ("--state", str(tmp_path / "verifier"), "--name", "one", "--source", origin)
        net.start("verifier", "operator", "verifier", *data, *verifier)
        relay = ("--upstream", origin, "--state", str(tmp_path / "relay"), "--host", STREET, "--port", str(RELAY))
        net.start("relay", "street", "relay", "--join", scene.join, *relay)
        listen = ("--peer-listen", f"0.0.0.0:{LISTEN}")
        net.start("worker", "home", "worker", "--join", scene.join, "--state", str(tmp_path / "home"), *listen)
        yield scene


@needs_namespaces
@pytest.mark.timeout(500)
def test_a_worker_behind_a_router_joins_works_and_is_reached(scene: Scene) -> None:
    """What a contributor at home has: no port that is open, no name, and the string that somebody gave them."""
    net = scene.net
    scene.until(lambda: scene.worker().get("admitted"), seconds=WORK_SECONDS)
    node = scene.home.hex()
    receipt = scene.receipts()[0]
    assert (receipt.outcome, receipt.node) == (Outcome.ADMITTED, node), "the run has signed for its work"

    for place, host in (("street", ROUTER), ("operator", ROUTER), ("net", ROUTER), ("net", HOME)):
        assert not net.can_connect(place, host, LISTEN), f"the home is open to {place} at {host}"
    assert net.can_connect("router", HOME, LISTEN), "it does listen: the router is what keeps others out"

    assert not net.can_connect("home", OPERATOR, ORIGIN), "the policy came from elsewhere"
    fetched = scene.worker()["broadcast_bytes"]["fetched"]
    assert 0 < fetched <= json.loads(net.get("street", f"http://{STREET}:{RELAY}/v1/status"))["bytes_out"]

    through = Address("ip4", OPERATOR, PEER, scene.home, relay=scene.peer.node)
    assert str(through) in scene.worker()["network"]["addresses"]
    asking = ("--join", scene.join, "--key", str(scene.folder / "run.key"), "--state", str(scene.folder / "asker"))
    said = net.ask("street", "control", "status", node, *asking, "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["admitted"] >= 1, "what only the home knows"
