"""How a worker joins a run: one line for the pages, the coordinator's terminal and `swarmproof join-string`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from coordinator.storage.database import Connection
from coordinator.storage.descriptors import newest_descriptor
from node.client.ssrf import Reach, reach_of
from node.protocol.peers import MAX_JOIN_PEERS, Invitation, parse_address
from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, MAX_DESCRIPTOR_BYTES, Descriptor
from shardcast.envelope import open_envelope
from shardcast.wire import decode


@dataclass(frozen=True, slots=True)
class Joining:
    """The options with which a worker joins; `is_loopback` says that they work on the coordinator's machine alone."""

    options: str
    is_loopback: bool

    @property
    def command(self) -> str:
        """What a contributor types."""
        return f"swarmproof worker {self.options}"


def joining_of(run_id: str, *, endpoints: Sequence[str], peers: Sequence[str]) -> Joining | None:
    """Return how to join by the run's peers, or else by its first coordinator; None where there is neither."""
    if peers:
        addresses = tuple(map(parse_address, peers[:MAX_JOIN_PEERS]))
        hosts = [address.host for address in addresses]
        options = f"--join {Invitation(run_id, addresses)}"
    elif endpoints:
        hosts = [urlsplit(endpoints[0]).hostname or ""]
        options = f"--coordinator {endpoints[0]} --run-id {run_id}"
    else:
        return None
    return Joining(options, all(host == "localhost" or reach_of(host) is Reach.THIS_MACHINE for host in hosts))


def logged_joining(connection: Connection, run_id: str) -> Joining | None:
    """Return how to join by the newest descriptor that a coordinator has signed; None before the first."""
    stored = newest_descriptor(connection)
    if stored is None:
        return None
    opened = open_envelope(
        stored.envelope,
        domain=DESCRIPTOR_DOMAIN,
        versions=(DESCRIPTOR_VERSION,),
        max_payload_bytes=MAX_DESCRIPTOR_BYTES,
    )
    described = decode(Descriptor, opened.payload, max_bytes=MAX_DESCRIPTOR_BYTES)
    return joining_of(run_id, endpoints=described.endpoints, peers=described.peers)
