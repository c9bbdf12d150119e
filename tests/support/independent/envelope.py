"""Signed envelopes (section 1.5)."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .values import Refused

GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493
SMALL_ORDER = {
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    *(bytes([first]) + b"\xff" * 30 + b"\x7f" for first in (0xEC, 0xED, 0xEE)),
}

VERSIONS = {
    "swarmproof/run": 2,
    "swarmproof/peer": 1,
    "swarmproof/authority": 1,
    "swarmproof/control": 1,
    "swarmproof/control-reply": 1,
    "swarmproof/request": 1,
    "swarmproof/receipt": 1,
    "shardcast/head": 1,
    "shardcast/manifest": 2,
}
"""The one version of each domain."""


@dataclass(frozen=True)
class Opened:
    """A payload whose signature holds, and who signed it (a raw public key in hex)."""

    payload: bytes
    signer: str


def seal(key: Ed25519PrivateKey, domain: str, payload: bytes, *, version: int | None = None) -> bytes:
    """Return the envelope of `payload` under `domain`, signed with `key`."""
    name = domain.encode("ascii")
    version = VERSIONS[domain] if version is None else version
    signed = (
        b"VSW1"
        + bytes([len(name)])
        + name
        + version.to_bytes(2, "big")
        + key.public_key().public_bytes_raw()
        + len(payload).to_bytes(4, "big")
        + payload
    )
    return signed + key.sign(signed)


def open_envelope(
    data: bytes, domain: str, *, max_payload_bytes: int, signer: str | None = None, version: int | None = None
) -> Opened:
    """Return the payload of an envelope of `domain`, signed by `signer` if one is named.

    Raises Refused: `bad_envelope` for its form, domain, version or signer, `bad_signature` for the rest.
    """
    name = domain.encode("ascii")
    start = 5 + len(name)
    fixed = start + 2 + 32 + 4
    if len(data) > fixed + max_payload_bytes + 64:
        raise Refused("oversized", f"{len(data)} bytes")
    if data[:5] != b"VSW1" + bytes([len(name)]) or data[5:start] != name:
        raise Refused("bad_envelope", f"not of {domain}")
    version = VERSIONS[domain] if version is None else version
    if data[start : start + 2] != version.to_bytes(2, "big"):
        raise Refused("bad_envelope", "unknown version")
    key = data[start + 2 : start + 34]
    length = int.from_bytes(data[start + 34 : fixed], "big")
    if len(data) != fixed + length + 64:
        raise Refused("bad_envelope", "another length")
    if signer is not None and key.hex() != signer:
        raise Refused("bad_envelope", "another signer")
    signature = data[-64:]
    if int.from_bytes(signature[32:], "little") >= GROUP_ORDER:
        raise Refused("bad_signature", "S is not below the group order")
    if key[:31] + bytes([key[31] & 0x7F]) in SMALL_ORDER:
        raise Refused("bad_signature", "a key of small order")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data[:-64])
    except (InvalidSignature, ValueError):
        raise Refused("bad_signature") from None
    return Opened(data[fixed:-64], key.hex())
