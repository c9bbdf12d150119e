"""Peer-to-peer network of a run: finds peers and the run's newest descriptor.

The only package that imports libp2p and trio. Nothing is trusted for where it came from.
"""

from __future__ import annotations

from node.p2p import resolver  # noqa: F401  (before libp2p)
from node.p2p.host import HostLimits
from node.p2p.links import LinkLimits
from node.p2p.network import PeerNetwork, PeerSettings
from node.p2p.relaying import RelayLimits

__all__ = ["HostLimits", "LinkLimits", "PeerNetwork", "PeerSettings", "RelayLimits"]
