"""Our nodes as processes of a swarm."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.broadcasting.processes import Node, NodeSwarm

_KEY = bytes(range(32))
_PUBLISHER = Ed25519PrivateKey.from_private_bytes(_KEY).public_key().public_bytes_raw()


def start_origin(swarm: NodeSwarm) -> Node:
    return _start(swarm, "origin", "--key", _KEY.hex())


def start_relay(swarm: NodeSwarm, upstreams: Sequence[str]) -> Node:
    return _start(swarm, "relay", *upstreams, "--publisher", _PUBLISHER.hex())


def follow(relay: Node, stripes: Sequence[Sequence[str]]) -> None:
    """Have a relay fetch each stripe from its candidates."""
    relay.send(stripes=stripes)
    relay.reply()


def start_striped_worker(swarm: NodeSwarm, stripes: Sequence[Sequence[str]]) -> Node:
    return _start(swarm, "worker", "--publisher", _PUBLISHER.hex(), "--stripes", json.dumps(stripes))


def start_worker(swarm: NodeSwarm, sources: Sequence[str], count: int = 1) -> Node:
    return _start(swarm, "worker", *sources, "--publisher", _PUBLISHER.hex(), "--count", str(count))


def _start(swarm: NodeSwarm, role: str, *arguments: str) -> Node:
    folder = swarm.folder / swarm.name(f"{role}-store")
    module = "benchmarks.broadcasting.node"
    return swarm.start(role, [sys.executable, "-m", module, role, *arguments, "--folder", str(folder)])


class Throttle:
    """The process that stands before nodes and gives their uplinks a speed."""

    def __init__(self, swarm: NodeSwarm) -> None:
        self._node = swarm.start("throttle", [sys.executable, "-m", "benchmarks.broadcasting.throttle"]).ready()

    def link(self, url: str, bytes_per_s: float | None) -> str:
        """Return the URL of the node at `url` behind an uplink of `bytes_per_s`; None counts only."""
        self._node.send(target=_port(url), bytes_per_s=bytes_per_s)
        return f"http://127.0.0.1:{self._node.reply()['port']}"

    def sent_bytes(self, link: str) -> int:
        """Return the bytes that left the node through `link`, headers included."""
        self._node.send(sent=_port(link))
        return int(self._node.reply()["bytes"])


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])
