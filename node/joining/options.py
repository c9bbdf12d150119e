"""Command-line values of how to join a run: run id, coordinators, peers, and this node's public addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.joining.session import JoinSettings
from node.protocol.peers import Address, parse_address
from shardcast.errors import Malformed

_HOST_AND_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Parsed options of joining; `reached` are this node's public hosts and ports."""

    run_id: str
    coordinators: tuple[str, ...]
    peers: tuple[Address, ...]
    listen: tuple[str, int]
    reached: tuple[tuple[str, int], ...]

    def settings(self, key: Ed25519PrivateKey) -> JoinSettings:
        """Return the join settings of the node with this key; raises BadParameter."""
        node = key.public_key().public_bytes_raw()
        return JoinSettings(
            run_id=self.run_id,
            coordinators=self.coordinators,
            peers=self.peers,
            host=self.listen[0],
            port=self.listen[1],
            addresses=tuple(address_at(host, port, node) for host, port in self.reached),
        )


def host_and_port(text: str, *, hint: str) -> tuple[str, int]:
    """Split HOST:PORT, with brackets around an IPv6 address; raises BadParameter."""
    found = _HOST_AND_PORT.fullmatch(text)
    if found is None or int(found[3]) >= 2**16:
        raise click.BadParameter("give HOST:PORT, such as 192.0.2.7:8701 or [2001:db8::7]:8701.", param_hint=hint)
    return found[1] or found[2], int(found[3])


def address_at(host: str, port: int, node: bytes) -> Address:
    """Return the address of the peer with this public key (32 bytes) at a host; raises BadParameter."""
    numeric = re.fullmatch(r"[0-9.]+", host) is not None
    address = Address("ip6" if ":" in host else "ip4" if numeric else "dns", host, port, node)
    try:
        return parse_address(str(address))
    except Malformed as error:
        raise click.BadParameter(f"{host}:{port} cannot be called: {error}.", param_hint="--peer-address") from error
