"""Parsers of the peer protocol: records, addresses, strings to join by, and frames of a link."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.fuzzing.mutation import bytes_mutator, json_mutator, mixed
from benchmarks.fuzzing.target import Harness, Target
from benchmarks.fuzzing.targets.messages import NODE_KEY, NOW, RUN_ID, RUN_KEY, SPEC
from node.discovery.descriptor import DescriptorStore
from node.discovery.peer_book import MAX_PEERS, PeerBook
from node.protocol.peers import (
    PEER_DOMAIN,
    PEER_VERSION,
    Address,
    Invitation,
    PeerRecord,
    open_peer,
    parse_address,
    parse_join,
    sign_peer,
)
from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, Descriptor
from shardcast.envelope import seal
from shardcast.errors import PeerFault
from shardcast.wire import encode

NODE = NODE_KEY.public_key().public_bytes_raw()
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\3" * 32)
OTHER = OTHER_KEY.public_key().public_bytes_raw()
ADDRESSES = (
    Address("ip4", "192.0.2.1", 8701, NODE),
    Address("ip6", "2001:db8::1", 1, NODE),
    Address("dns", "gpu-7.example.org", 65535, NODE),
    Address("ip4", "198.51.100.7", 8701, NODE, relay=OTHER),
)
RECORD = PeerRecord(run_id=RUN_ID, addresses=tuple(map(str, ADDRESSES)), issued_at=NOW, expires_at=NOW + 3600)
DESCRIPTOR = Descriptor(
    run_id=RUN_ID,
    version=4,
    spec=SPEC,
    endpoints=("http://192.0.2.1:8700",),
    relays=(),
    peers=tuple(map(str, ADDRESSES)),
    head=None,
    revoked=(OTHER.hex(),),
    issued_at=NOW,
    expires_at=NOW + 3600,
)


def _record(_: ExitStack) -> Harness:
    """Feed records that are really signed, by a node that writes what it likes."""

    def run(data: bytes) -> None:
        envelope = seal(data, domain=PEER_DOMAIN, version=PEER_VERSION, key=NODE_KEY)
        peer = open_peer(envelope, run_id=RUN_ID, now=NOW)
        assert peer.node == NODE, "in another's name"
        assert all(address.node == NODE for address in peer.addresses), "another's address"
        assert peer.expires_at > NOW, "it has expired"

    return Harness([encode(RECORD)], run, (PeerFault,), json_mutator())


def _address(_: ExitStack) -> Harness:
    def run(data: bytes) -> str:
        address = parse_address(data.decode("latin-1"))
        assert str(address).encode("latin-1") == data, "it is written in another way"
        return address.kind

    tokens = (b"/p2p-circuit", b"/p2p/", b"/tcp/", b"::", b"%eth0", b"1", b"12D3KooW", b"\xb2", b"A" * 400)
    return Harness([str(address).encode() for address in ADDRESSES], run, (PeerFault,), bytes_mutator(*tokens))


def _join(_: ExitStack) -> Harness:
    def run(data: bytes) -> int:
        return len(parse_join(data.decode("latin-1")).peers)

    seeds = [str(Invitation(RUN_ID, ADDRESSES[:count])).encode() for count in (1, 4)]
    return Harness(seeds, run, (PeerFault,), bytes_mutator(b",", b"swarmproof://", b"/ip4/", *seeds))


class _Wire:
    """The stream of a link of which only frames are looked at."""

    def get_remote_address(self) -> tuple[str, int]:
        return "192.0.2.9", 4001


def _frame(_: ExitStack) -> Harness:
    """Feed a neighbour's frames, each on a new link; only this target imports libp2p."""
    from node.p2p.links import LinkLimits, Links, PeerLink  # noqa: PLC0415
    from node.p2p.transport import TrioTokenBucket  # noqa: PLC0415

    store, book = DescriptorStore(RUN_ID, clock=lambda: NOW), PeerBook(OTHER, clock=lambda: NOW)
    heard: list[Any] = []
    links = Links(
        store,
        book,
        own=OTHER,
        limits=LinkLimits(),
        own_record=lambda: None,
        on_record=lambda peer, _remote: heard.append(peer),
        clock=lambda: NOW,
    )
    descriptor = seal(encode(DESCRIPTOR), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=RUN_KEY)

    def run(data: bytes) -> int:
        heard.clear()
        pace = TrioTokenBucket(rate=1.0, burst=1, clock=time.monotonic)
        link = PeerLink(NODE, _Wire(), None, own_records=pace)  # type: ignore[arg-type]
        links._process_frame(link, data)  # noqa: SLF001
        assert store.last is None or store.last.envelope == descriptor, "a descriptor that the run did not sign"
        assert len(book) <= MAX_PEERS
        return len(heard)

    seeds = [descriptor, sign_peer(RECORD, key=NODE_KEY), b""]
    return Harness(seeds, run, (PeerFault,), mixed((9, bytes_mutator(b"VSW1", *seeds)), (1, bytes_mutator(b"\0"))))


TARGETS = (
    Target("peers.record", "any key, to every peer", 40, _record),
    Target("peers.address", "any key, to every peer", 40, _address),
    Target("peers.join", "whoever invites somebody", 20, _join),
    Target("peers.frame", "any key, to every peer", 60, _frame),
)
