"""Ports for servers that a test starts, or on which it wants nobody to listen."""

from __future__ import annotations

import pytest

from coordinator.lab.processes import layout


def pytest_configure(config: pytest.Config) -> None:
    """Give each of the processes that share the tests a range of its own.

    A port is chosen seconds before its server listens: meanwhile another process must not draw the same one.
    """
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        share = len(layout._PORTS) // worker["workercount"]
        # A process that has died is replaced under a new number.
        first = int(worker["workerid"].removeprefix("gw")) % worker["workercount"] * share
        layout._PORTS = layout._PORTS[first : first + share]


def free_port() -> int:
    """Return a port on which nobody listens, and which no outgoing connection takes meanwhile."""
    (port,) = layout.free_ports(1)
    return port
