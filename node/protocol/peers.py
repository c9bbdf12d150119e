"""Peers: ids, addresses, join strings and signed records (docs/protocol.md, section 13).

Pure and without libp2p, so that a coordinator can print a join string without loading it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Annotated, Final, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from node.protocol.run import PeerAddress
from shardcast.envelope import open_envelope, seal
from shardcast.errors import Malformed, Stale
from shardcast.wire import Count, Digest, Wire, decode, encode

PEER_DOMAIN: Final = "swarmproof/peer"
PEER_VERSION: Final = 1
MAX_PEER_BYTES: Final = 4096
MAX_ADDRESSES: Final = 8
MAX_VALID_SECONDS: Final = 3600
MAX_SKEW_SECONDS: Final = 300
JOIN_SCHEME: Final = "swarmproof://"
MAX_JOIN_BYTES: Final = 4096
MAX_JOIN_PEERS: Final = 16

_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_IDENTITY: Final = bytes.fromhex("002408011220")
"""A PeerId of an Ed25519 key: the identity multihash (0x00, 36 bytes) of protobuf {type: Ed25519, data: 32 bytes}."""

_ID_CHARACTERS: Final = 52
_RUN_ID = re.compile(r"[0-9a-f]{64}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# One that ends in a number is an address in disguise to some resolvers: 127.1, 0x7f000001.
_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?:{_LABEL}\.)*(?!(?:[0-9]+|0[xX][0-9A-Fa-f]*)\Z){_LABEL}")


def peer_id_of(public_key: bytes) -> str:
    """Return the libp2p PeerId of a raw Ed25519 public key (32 bytes), in base58 (libp2p specs, peer-ids)."""
    number = int.from_bytes(_IDENTITY + public_key)
    text = ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return "1" + text  # one for the leading zero byte


def public_key_of(peer_id: str) -> bytes:
    """Return the raw Ed25519 public key (32 bytes) in a PeerId; raises Malformed for every other kind of PeerId."""
    if len(peer_id) != _ID_CHARACTERS or peer_id[0] != "1" or not set(peer_id) <= set(_BASE58):
        raise Malformed("not the PeerId of an Ed25519 key", code="bad_peer_id")
    number = 0
    for character in peer_id:
        number = number * 58 + _BASE58.index(character)
    if number.bit_length() > 8 * (len(_IDENTITY) + 32):
        raise Malformed("not the PeerId of an Ed25519 key", code="bad_peer_id")
    data = number.to_bytes(len(_IDENTITY) + 32)
    if data[: len(_IDENTITY)] != _IDENTITY or peer_id_of(data[len(_IDENTITY) :]) != peer_id:
        raise Malformed("not the PeerId of an Ed25519 key", code="bad_peer_id")
    return data[len(_IDENTITY) :]


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a peer: TCP at `host`, or a circuit through the peer `relay` at `host`.

    `kind` is the multiaddr protocol of the host: "ip4", "ip6" or "dns", "dns4", "dns6".
    """

    kind: Literal["ip4", "ip6", "dns", "dns4", "dns6"]
    host: str
    port: int
    node: bytes
    relay: bytes | None = None

    def __str__(self) -> str:
        """Return the multiaddr."""
        at = f"/{self.kind}/{self.host}/tcp/{self.port}/p2p/"
        if self.relay is None:
            return at + peer_id_of(self.node)
        return f"{at}{peer_id_of(self.relay)}/p2p-circuit/p2p/{peer_id_of(self.node)}"


def parse_address(text: str) -> Address:
    """Read a multiaddr such as /ip4/192.0.2.1/tcp/8701/p2p/12D3Koo…; raises Malformed for every other form."""
    parts = text.split("/")
    if len(text) > 300 or len(parts) not in {7, 10} or parts[0] != "" or (parts[3], parts[5]) != ("tcp", "p2p"):
        raise Malformed("no address of a peer: /ip4/ADDRESS/tcp/PORT/p2p/PEER-ID is one", code="bad_address")
    kind, host, port = parts[1], parts[2], parts[4]
    if not _is_host(kind, host) or _PORT.fullmatch(port) is None or int(port) > 65535:
        raise Malformed("no host and port that can be called", code="bad_address")
    first = public_key_of(parts[6])
    if len(parts) == 7:
        return Address(kind, host, int(port), first)  # type: ignore[arg-type]
    if (parts[7], parts[8]) != ("p2p-circuit", "p2p"):
        raise Malformed("only /p2p-circuit may follow a peer", code="bad_address")
    last = public_key_of(parts[9])
    if last == first:
        raise Malformed("no peer is reached through itself", code="bad_address")
    return Address(kind, host, int(port), last, relay=first)  # type: ignore[arg-type]


def _is_host(kind: str, host: str) -> bool:
    """Return whether the host is canonical and dialable: not unspecified, multicast, mapped or scoped."""
    if kind in {"dns", "dns4", "dns6"}:
        return _NAME.fullmatch(host) is not None
    try:
        if kind == "ip4":
            ip: IPv4Address | IPv6Address = IPv4Address(host)
        elif kind == "ip6":
            ip = IPv6Address(host)
        else:
            return False
    except AddressValueError:
        return False
    elsewhere = isinstance(ip, IPv6Address) and (ip.ipv4_mapped is not None or ip.scope_id is not None)
    return str(ip) == host and not (ip.is_unspecified or ip.is_multicast or elsewhere)


@dataclass(frozen=True, slots=True)
class Invitation:
    """A join string: the run id and bootstrap peers."""

    run_id: str
    peers: tuple[Address, ...]

    def __str__(self) -> str:
        """Return the string that `parse_join` reads."""
        return f"{JOIN_SCHEME}{self.run_id}{','.join(map(str, self.peers))}"


def parse_join(text: str) -> Invitation:
    """Read swarmproof://RUN-ID/ip4/…[,/ip4/…]; raises Malformed."""
    if len(text) > MAX_JOIN_BYTES or not text.startswith(JOIN_SCHEME):
        raise Malformed(f"a string to join a run begins with {JOIN_SCHEME}", code="bad_join")
    run_id, peers = text[len(JOIN_SCHEME) :][:64], text[len(JOIN_SCHEME) + 64 :]
    if _RUN_ID.fullmatch(run_id) is None:
        raise Malformed(f"the run's id, 64 hexadecimal digits, has to follow {JOIN_SCHEME}", code="bad_join")
    listed = peers.split(",")
    if len(listed) > MAX_JOIN_PEERS:
        raise Malformed(f"more than {MAX_JOIN_PEERS} peers", code="bad_join")
    return Invitation(run_id, tuple(dict.fromkeys(map(parse_address, listed))))


class PeerRecord(Wire, frozen=True):
    """A peer's self-signed, expiring record of its addresses."""

    run_id: Digest
    addresses: Annotated[tuple[PeerAddress, ...], Meta(max_length=MAX_ADDRESSES)]
    issued_at: Count
    expires_at: Count


@dataclass(frozen=True, slots=True)
class Peer:
    """A verified record: `node` is the raw public key that signed it, `envelope` the exact bytes to pass on."""

    node: bytes
    addresses: tuple[Address, ...]
    issued_at: int
    expires_at: int
    envelope: bytes


def sign_peer(record: PeerRecord, *, key: Ed25519PrivateKey) -> bytes:
    """Seal a record with the node's key."""
    return seal(encode(record), domain=PEER_DOMAIN, version=PEER_VERSION, key=key)


def open_peer(data: bytes, *, run_id: str, now: float, expired_too: bool = False) -> Peer:
    """Verify and return the peer record in `data`, of this run and not expired; raises PeerFault.

    `expired_too` accepts expired records of this node's own storage, which are still worth a dial.
    """
    opened = open_envelope(data, domain=PEER_DOMAIN, versions=(PEER_VERSION,), max_payload_bytes=MAX_PEER_BYTES)
    record = decode(PeerRecord, opened.payload, max_bytes=MAX_PEER_BYTES)
    if record.run_id != run_id:
        raise Malformed("a peer of another run", code="wrong_run")
    if record.expires_at > record.issued_at + MAX_VALID_SECONDS or (now >= record.expires_at and not expired_too):
        raise Stale("this record of a peer has expired, or says that it lasts too long", code="expired")
    if record.issued_at > now + MAX_SKEW_SECONDS:
        raise Stale("this record of a peer is of a time to come", code="clock_skew")
    addresses = tuple(map(parse_address, record.addresses))
    if any(address.node != opened.signer for address in addresses):
        raise Malformed("names an address of another peer", code="foreign_address")
    return Peer(opened.signer, addresses, record.issued_at, record.expires_at, bytes(data))
