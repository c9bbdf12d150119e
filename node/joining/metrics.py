"""Prometheus metrics of a peer, read from its status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from node.runtime.metrics import counter, gauge

PEER: Final = (
    gauge("swarmproof_peer_up", "1 while it takes part in the network.", "network", "up"),
    gauge(
        "swarmproof_peer_descriptor_version",
        "Version of the run's newest descriptor that it knows.",
        "descriptor_version",
    ),
    gauge("swarmproof_peer_neighbours", "Peers that it has a link to.", "network", "neighbours"),
    gauge("swarmproof_peer_known", "Peers that it could tell others of.", "network", "known"),
    counter("swarmproof_peer_network_restarts", "Starts after its network failed.", "network", "restarts"),
    counter("swarmproof_peer_frames", "Frames on its links.", "network", "frames", label="fate"),
    gauge("swarmproof_peer_reservations", "Nodes that it relays for.", "network", "relay", "reservations"),
    gauge("swarmproof_peer_circuits", "Conversations that it relays.", "network", "relay", "circuits"),
)


class LatestStatus:
    """The newest status of a process; safe to read from another thread."""

    def __init__(self) -> None:
        self._status: Mapping[str, Any] | None = None

    def note(self, status: Mapping[str, Any]) -> None:
        """Keep `status`, which must not be modified afterwards."""
        self._status = status

    def __call__(self) -> Mapping[str, Any] | None:
        return self._status
