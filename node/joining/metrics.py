"""Prometheus metrics of a peer, read from its own account of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from node.runtime.metrics import Figure, value_at

PEER: Final = (
    Figure("swarmproof_peer_up", "gauge", "1 while it takes part in the network.", value_at("network", "up")),
    Figure(
        "swarmproof_peer_descriptor_version",
        "gauge",
        "Version of the run's newest descriptor that it knows.",
        value_at("descriptor_version"),
    ),
    Figure("swarmproof_peer_neighbours", "gauge", "Peers that it has a link to.", value_at("network", "neighbours")),
    Figure("swarmproof_peer_known", "gauge", "Peers that it could tell others of.", value_at("network", "known")),
    Figure(
        "swarmproof_peer_network_restarts",
        "counter",
        "Starts after its network failed.",
        value_at("network", "restarts"),
    ),
    Figure("swarmproof_peer_frames", "counter", "Frames on its links.", value_at("network", "frames"), label="fate"),
    Figure(
        "swarmproof_peer_reservations",
        "gauge",
        "Nodes that it relays for.",
        value_at("network", "relay", "reservations"),
    ),
    Figure(
        "swarmproof_peer_circuits", "gauge", "Conversations that it relays.", value_at("network", "relay", "circuits")
    ),
)


class Latest:
    """The newest account of itself that a process has given; safe to read from another thread."""

    def __init__(self) -> None:
        self._status: Mapping[str, Any] | None = None

    def note(self, status: Mapping[str, Any]) -> None:
        """Keep `status`, which nobody may change afterwards."""
        self._status = status

    def __call__(self) -> Mapping[str, Any] | None:
        return self._status
