"""shardcast 0.3.2 in an environment of its own, and its nodes as processes of a swarm.

It comes from the package index that pip is configured for, once, and is kept and used again. It shares a temporary
file between all processes of one installation, so that each gets a copy of the package; and one at a fixed path
between all that are starting, so that they start one after the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.broadcasting.processes import Node, NodeSwarm
from benchmarks.peers import FOLDER, PeerUnavailable, environment

VERSION = "0.3.2"
WORKER = Path(__file__).with_name("peer_node.py")

# The relay's own default, and what its users' workers do (PRIME-RL's shardcast downloader).
RELAY_INTERVAL_S, WORKER_INTERVAL_S = 30, 5


def installed(folder: Path = FOLDER) -> Path:
    """Return the environment within `folder` that has the peer, made on first use. Raise PeerUnavailable."""
    # Where this command finds no wget, the peer installs one on the machine.
    if subprocess.run(["which", "wget"], env={}, capture_output=True, check=False).returncode:
        raise PeerUnavailable(f"shardcast {VERSION} needs wget")
    return environment(f"shardcast-{VERSION}", [[f"shardcast=={VERSION}"]], folder=folder)


@dataclass(frozen=True, slots=True)
class ShardcastPeer:
    """Starts nodes of the peer, each from a copy of the package, and each when the one before it is ready."""

    environment: Path
    relay_interval_s: int = RELAY_INTERVAL_S
    worker_interval_s: int = WORKER_INTERVAL_S

    def start_origin(self, swarm: NodeSwarm) -> Node:
        return self._start(swarm, "origin")

    def start_relay(self, swarm: NodeSwarm, upstreams: Sequence[str]) -> Node:
        return self._start(swarm, "relay", *upstreams, "--interval", str(self.relay_interval_s))

    def start_worker(self, swarm: NodeSwarm, sources: Sequence[str]) -> Node:
        return self._start(swarm, "worker", *sources, "--interval", str(self.worker_interval_s))

    def _start(self, swarm: NodeSwarm, role: str, *arguments: str) -> Node:
        package = swarm.folder / swarm.name(f"{role}-package")
        (installed_at,) = self.environment.glob("lib/python*/site-packages/shardcast")
        shutil.copytree(installed_at, package / "shardcast")
        folder = swarm.folder / swarm.name(f"{role}-store")
        command = [str(self.environment / "bin" / "python"), "-I", str(WORKER), role, *arguments]
        # wget would ask a proxy, and the package reads settings from the environment.
        kept = {name: value for name, value in os.environ.items() if not _steers(name)}
        return swarm.start(role, [*command, "--package", str(package), "--folder", str(folder)], kept).ready()


def _steers(variable: str) -> bool:
    return variable.lower().endswith("_proxy") or variable.startswith("SHARDCAST_")
