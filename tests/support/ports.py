"""A port for a server that a test starts, or on which it wants nobody to listen."""

from __future__ import annotations

from coordinator.lab.processes.layout import free_ports


def free_port() -> int:
    """Return a port on which nobody listens, and which no outgoing connection takes meanwhile."""
    (port,) = free_ports(1)
    return port
