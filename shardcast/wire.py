"""Canonical JSON for values that are signed or hashed.

One value has one encoding: msgspec's JSON of a frozen Struct, fields in declaration order, no white space,
every field present. A decoder re-encodes what it read and compares, so duplicate keys, reordered keys,
non-minimal numbers and unknown fields are all refused (docs/protocol.md, section 1).
"""

from __future__ import annotations

import re
import threading
from typing import Annotated, Any, TypeVar

import msgspec
from blake3 import blake3

from shardcast.errors import Malformed

MAX_INTEGER = 2**53 - 1  # what every JSON reader can hold exactly

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""A 32-byte BLAKE3 digest in lower-case hexadecimal."""

PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""A raw Ed25519 public key (RFC 8032) in lower-case hexadecimal."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
"""A non-negative integer: a size in bytes, a version, a time in whole seconds since 1970 (UTC)."""

T = TypeVar("T")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MAKING_DECODERS = threading.Lock()


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every wire value: immutable, refuses unknown fields."""


def encode(value: msgspec.Struct) -> bytes:
    """Encode `value` canonically."""
    return msgspec.json.encode(value)


def decode(cls: type[T], data: bytes, *, max_bytes: int) -> T:
    """Decode `data` as `cls`; raises Malformed for anything but the canonical encoding of a valid value."""
    if len(data) > max_bytes:
        raise Malformed(f"message of {len(data)} bytes exceeds the limit of {max_bytes}", code="oversized")
    try:
        value = _decoder_of(cls).decode(data)
        again = msgspec.json.encode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise Malformed(f"message is not a valid {_name(cls)}: {error}") from error
    if again != data:
        raise Malformed(f"message is not the canonical encoding of a {_name(cls)}", code="not_canonical")
    return value


def _decoder_of(cls: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of a type, which is made once, by one thread.

    Two threads that use a Struct for the first time together end the process: msgspec lets the second one read what the
    first has not finished to describe (a null pointer in 0.22).
    """
    found = _DECODERS.get(cls)
    if found is None:
        with _MAKING_DECODERS:
            found = _DECODERS.setdefault(cls, msgspec.json.Decoder(cls))
    return found


def digest(data: bytes | memoryview) -> str:
    """Compute the BLAKE3 digest of `data` in hexadecimal."""
    return blake3(data).hexdigest()


def derive(context: str, *parts: bytes) -> bytes:
    """Derive 32 bytes with BLAKE3's key derivation mode; each part is length-prefixed (u32, big-endian)."""
    hasher: Any = blake3(derive_key_context=context)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "big"))
        hasher.update(part)
    return bytes(hasher.digest())


def is_digest(text: str) -> bool:
    """Return whether `text` is a digest in canonical form, and so safe as a file name."""
    return _DIGEST.fullmatch(text) is not None


def _name(cls: Any) -> str:
    """Return a type's name for messages; a union has none of its own."""
    return str(getattr(cls, "__name__", cls))
