"""This machine's reachable addresses, and free ports."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Final

from node.errors import ConfigError

_FAR: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Documentation addresses (RFC 5737, RFC 3849), to look up the route; nothing is sent."""


def reachable_hosts(listening: str) -> tuple[str, ...]:
    """Return `listening`; for a wildcard address, this machine's source addresses for outbound traffic."""
    if listening not in {"0.0.0.0", "::"}:  # noqa: S104
        return (listening,)
    found = []
    for family, far in _FAR:
        if listening == "0.0.0.0" and family != socket.AF_INET:  # noqa: S104
            continue
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((far, 9))
            except OSError:
                continue
            found.append(str(probe.getsockname()[0]))
    return tuple(found) or ("127.0.0.1",)


def check_port(host: str, port: int) -> None:
    """Raise ConfigError unless `port` (0: any) is free at the IP address `host`.

    libp2p listens with SO_REUSEPORT: a second process at one port would get half of the other's connections.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "another process listens there" if taken else error.strerror
            raise ConfigError(f"Peers cannot be listened for on {host}:{port}: {why}.", code="cannot_bind") from error


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
