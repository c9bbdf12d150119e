"""The signed envelope: exact bytes, a domain, a version, a key and an Ed25519 signature (RFC 8032).

    envelope = "VSW1" | u8 n | domain (n ASCII bytes) | u16 version | key (32) | u32 m | payload (m) | sig (64)

Integers are big-endian. The signature covers every byte before it. What was received is what is verified:
the payload is never re-serialised. The domain keeps a signature made for one purpose from being worth
anything for another; a domain or version that the caller did not name is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shardcast.errors import BadSignature, Malformed

MAGIC = b"VSW1"
KEY_BYTES = 32
SIGNATURE_BYTES = 64
# Points whose order divides the cofactor (RFC 8032, 5.1.7 leaves them to the caller), with the sign bit cleared:
# under such a key one constant signature is valid for every message, so it would sign for everybody.
_SMALL_ORDER = frozenset(
    bytes.fromhex(point)
    for point in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)
_OVERHEAD_BYTES = len(MAGIC) + 1 + 255 + 2 + KEY_BYTES + 4 + SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class Opened:
    """An envelope whose signature held: who signed, for what, and the exact payload."""

    signer: bytes
    domain: str
    version: int
    payload: bytes


def seal(payload: bytes, *, domain: str, version: int, key: Ed25519PrivateKey) -> bytes:
    """Sign `payload` for `domain` and return the envelope."""
    tag = domain.encode("ascii")
    body = b"".join(
        (
            MAGIC,
            struct.pack(">B", len(tag)),
            tag,
            struct.pack(">H", version),
            key.public_key().public_bytes_raw(),
            struct.pack(">I", len(payload)),
            payload,
        )
    )
    return body + key.sign(body)


def open_envelope(
    data: bytes, *, domain: str, versions: Collection[int], max_payload_bytes: int, signer: bytes | None = None
) -> Opened:
    """Verify the envelope `data` and return its contents.

    `signer` is the raw public key required; with None any key is accepted and the caller must check `Opened.signer`.
    Raises Malformed or BadSignature.
    """
    if len(data) > max_payload_bytes + _OVERHEAD_BYTES:
        raise Malformed(f"envelope of {len(data)} bytes exceeds the limit", code="oversized")
    opened, signed_bytes = _split(data)
    if opened.domain != domain or opened.version not in versions:
        raise Malformed(
            f"envelope is signed for {opened.domain!r} version {opened.version}, expected {domain!r}",
            code="wrong_domain",
        )
    if len(opened.payload) > max_payload_bytes:
        raise Malformed(f"payload of {len(opened.payload)} bytes exceeds the limit", code="oversized")
    if signer is not None and opened.signer != signer:
        raise BadSignature(
            f"envelope is signed by {opened.signer.hex()[:16]}…, expected {signer.hex()[:16]}…", code="wrong_signer"
        )
    if is_small_order(opened.signer):
        raise BadSignature("envelope is signed by a small-order key, under which any message verifies", code="weak_key")
    try:
        Ed25519PublicKey.from_public_bytes(opened.signer).verify(data[signed_bytes:], data[:signed_bytes])
    except (InvalidSignature, ValueError) as error:
        raise BadSignature("signature does not match the signed bytes") from error
    return opened


def is_small_order(public_key: bytes) -> bool:
    """Return whether some signature under this raw Ed25519 key is valid for every message: nobody's key."""
    return public_key[:-1] + bytes([public_key[-1] & 0x7F]) in _SMALL_ORDER


def _split(data: bytes) -> tuple[Opened, int]:
    """Split an envelope without checking its signature; return it and the number of signed bytes."""
    if data[: len(MAGIC)] != MAGIC:
        raise Malformed("envelope does not begin with VSW1")
    try:
        at = len(MAGIC)
        (tag_bytes,) = struct.unpack_from(">B", data, at)
        domain = data[at + 1 : at + 1 + tag_bytes].decode("ascii")
        at += 1 + tag_bytes
        (version,) = struct.unpack_from(">H", data, at)
        key = data[at + 2 : at + 2 + KEY_BYTES]
        at += 2 + KEY_BYTES
        (payload_bytes,) = struct.unpack_from(">I", data, at)
        at += 4
    except (struct.error, UnicodeDecodeError) as error:
        raise Malformed("envelope ends inside its header") from error
    end = at + payload_bytes
    if len(data) != end + SIGNATURE_BYTES:
        raise Malformed("envelope length differs from its header")
    return Opened(signer=key, domain=domain, version=version, payload=data[at:end]), end
