"""How nodes reach a coordinator: the contacts in its descriptor, and its own peer."""

from __future__ import annotations

import contextlib
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec

from coordinator.run.descriptors import Contacts
from coordinator.run.peer_child import PEER_FOLDER, PeerChild, PeerPlan, bracketed, has_libp2p
from node.client.http import checked_url
from node.discovery.addresses import reachable_hosts
from node.joining.options import host_and_port
from node.protocol.peers import Address, parse_address
from node.protocol.run import Descriptor
from shardcast.errors import Malformed

_OPTIONS: Final = {"endpoints": "--endpoint", "peers": "--introduce", "revoked": "--revoke"}


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """The descriptor's contacts, and the peer as a context manager."""

    contacts: Contacts
    peer: AbstractContextManager[object]


def open_to_peers(
    host: str,
    port: int,
    *,
    run_id: str,
    data: Path,
    endpoints: tuple[str, ...],
    with_peer: bool | None,
    peer_port: int,
    peer_state: Path | None,
    peer_addresses: tuple[str, ...],
    introduced: tuple[str, ...],
    revoked: tuple[str, ...],
) -> PeerSetup:
    """Return contacts and peer of the coordinator listening on `host` and `port`; raises ConfigError, BadParameter."""
    urls = tuple(map(checked_url, endpoints)) or tuple(f"http://{bracketed(h)}:{port}" for h in reachable_hosts(host))
    peers = tuple(map(_peer_address, introduced))
    child: AbstractContextManager[object] = contextlib.nullcontext()
    if with_peer if with_peer is not None else has_libp2p():
        reached = tuple(host_and_port(each, hint="--peer-address") for each in peer_addresses)
        plan = PeerPlan(state=peer_state or data / PEER_FOLDER, host=_numeric(host), port=peer_port, reached=reached)
        # A wildcard address is reached on loopback.
        near = "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host  # noqa: S104
        child = PeerChild(plan.command(coordinator=f"http://{bracketed(near)}:{port}", run_id=run_id))
        peers = (*plan.addresses(), *peers)
    peers = tuple(dict.fromkeys(peers))
    return PeerSetup(_checked(Contacts(endpoints=urls, peers=tuple(map(str, peers)), revoked=revoked)), child)


def _peer_address(text: str) -> Address:
    try:
        return parse_address(text)
    except Malformed as error:
        raise click.BadParameter(f"{error}.", param_hint="--introduce") from error


def _numeric(host: str) -> str:
    """Return the first IP address of `host`, on which the coordinator listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return str(socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0][4][0])


def _checked(contacts: Contacts) -> Contacts:
    """Return `contacts`; raises BadParameter for what nodes would not accept, as it would end the run if signed."""
    for field in msgspec.structs.fields(Descriptor):
        if field.name in _OPTIONS:
            try:
                msgspec.convert(getattr(contacts, field.name), field.type)
            except msgspec.ValidationError as error:
                message = f"nodes would not accept it: {error}."
                raise click.BadParameter(message, param_hint=_OPTIONS[field.name]) from error
    return contacts
