"""The peer-to-peer network under a run: who is there, and what the run's newest descriptor is.

The only place that imports libp2p and trio. Nothing that comes over it is believed for where it came from.
"""

from __future__ import annotations

from node.p2p.host import HostLimits
from node.p2p.links import LinkLimits
from node.p2p.network import PeerNetwork, PeerSettings
from node.p2p.relaying import RelayLimits

__all__ = ["HostLimits", "LinkLimits", "PeerNetwork", "PeerSettings", "RelayLimits"]
