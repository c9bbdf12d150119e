"""Names and addresses of peers, and the string to join by (section 13)."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from .values import Refused, Scalar

ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
KEY_PREFIX = bytes.fromhex("002408011220")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*")


def peer_id(public_key: str) -> str:
    """Return the PeerId of a public key in hex (13.1)."""
    number = int.from_bytes(KEY_PREFIX + bytes.fromhex(public_key), "big")
    text = ""
    while number:
        number, digit = divmod(number, 58)
        text = ALPHABET[digit] + text
    return "1" + text  # the one leading zero byte


def key_of(name: str) -> str:
    """Return the public key that the PeerId `name` is of."""
    number = 0
    for char in name:
        if char not in ALPHABET:
            raise Refused("bad_peer_id")
        number = 58 * number + ALPHABET.index(char)
    key = (number % 2**256).to_bytes(32, "big").hex()
    if peer_id(key) != name:
        raise Refused("bad_peer_id")
    return key


@dataclass(frozen=True)
class Address:
    """A PeerAddress, read: how to connect, to whom, and through whom if not directly."""

    kind: str
    host: str
    port: int
    public_key: str
    relay_public_key: str | None


def _is_host(kind: str, host: str) -> bool:
    if kind.startswith("dns"):
        return len(host) <= 253 and HOST.fullmatch(host) is not None and not host.rpartition(".")[2].isdigit()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (
        address.version == int(kind[2])
        and str(address) == host
        and not (address.is_unspecified or address.is_multicast)
        and getattr(address, "ipv4_mapped", None) is None
    )


def read_address(text: str) -> Address:
    """Return what a PeerAddress says (13.2); raises Refused for any other form."""
    match = re.fullmatch(
        r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([1-9][0-9]{0,4})/p2p/([^/]+)(?:/p2p-circuit/p2p/([^/]+))?", text
    )
    if not 2 <= len(text) <= 300 or match is None or int(match[3]) > 65535 or not _is_host(match[1], match[2]):
        raise Refused("bad_address", text[:80])
    first = key_of(match[4])
    last = key_of(match[5]) if match[5] else first
    if match[5] and last == first:
        raise Refused("bad_address", "a circuit to the relay itself")
    return Address(match[1], match[2], int(match[3]), last, first if match[5] else None)


def _reads(value: object) -> bool:
    try:
        return isinstance(value, str) and read_address(value) is not None
    except Refused:
        return False


PEER_ADDRESS = Scalar(_reads)


def read_join(text: str) -> tuple[str, list[Address]]:
    """Return the run id and the addresses of a string to join by (13.3)."""
    match = re.fullmatch(r"swarmproof://([0-9a-f]{64})(/\S+)", text)
    addresses = match[2].split(",") if match else []
    if match is None or len(text) > 4096 or len(addresses) > 16:
        raise Refused("bad_join")
    return match[1], [read_address(address) for address in addresses]
