"""Checkpoints as signed notes, and the cosignatures of witnesses (section 8.3)."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .values import Refused

MAX_BYTES = 64 * 1024
DASH = "— "


def key_id(name: str, kind: int, public_key: str) -> bytes:
    """Return the four bytes that a signature of this key begins with."""
    return hashlib.sha256(f"{name}\n".encode() + bytes([kind]) + bytes.fromhex(public_key)).digest()[:4]


def vkey(name: str, kind: int, public_key: str) -> str:
    """Return a verifier key as it is written."""
    value = b64encode(bytes([kind]) + bytes.fromhex(public_key)).decode()
    return f"{name}+{key_id(name, kind, public_key).hex()}+{value}"


def open_checkpoint(note: bytes, run_id: str, run_key: str, witnesses: Sequence[str] = ()) -> dict[str, Any]:
    """Return size, root and the times of `witnesses` (verifier keys) of a checkpoint that the run signed."""
    if len(note) > MAX_BYTES:
        raise Refused("oversized", f"{len(note)} bytes")
    body, separator, lines = note.rpartition(b"\n\n")
    text = body + b"\n"
    try:
        origin, size, root, end = text.decode().split("\n")
        if not separator or not lines.endswith(b"\n") or end or not size.isascii() or str(int(size)) != size:
            raise Refused("bad_note")
        signatures = [_signature(line) for line in lines.decode().split("\n")[:-1]]
        value = b64decode(root, validate=True)
    except ValueError:
        raise Refused("bad_note") from None
    name = f"swarmproof/{run_id}"
    if origin != name or len(value) != 32:
        raise Refused("bad_note", "of another log")
    if (name, key_id(name, 1, run_key)) not in [(said, raw[:4]) for said, raw in signatures]:
        raise Refused("bad_signature", "not the run's")
    times: dict[str, int] = {}
    for said, raw in signatures:
        if (said, raw[:4]) == (name, key_id(name, 1, run_key)):
            _verify(run_key, raw[4:], text)
        for one in witnesses:
            its_name, its_id, its_key = one.split("+", 2)
            if (said, raw[:4].hex()) == (its_name, its_id):
                at = int.from_bytes(raw[4:12], "big")
                _verify(b64decode(its_key)[1:].hex(), raw[12:], f"cosignature/v1\ntime {at}\n".encode() + text)
                times[one] = at
    return {"size": int(size), "root": value.hex(), "witnesses": times}


def seal_checkpoint(key: Ed25519PrivateKey, run_id: str, size: int, root: bytes) -> bytes:
    """Return the note of a checkpoint, signed by the run."""
    name = f"swarmproof/{run_id}"
    text = f"{name}\n{size}\n{b64encode(root).decode()}\n"
    raw = key_id(name, 1, key.public_key().public_bytes_raw().hex()) + key.sign(text.encode())
    return f"{text}\n{DASH}{name} {b64encode(raw).decode()}\n".encode()


def _signature(line: str) -> tuple[str, bytes]:
    name, _, value = line.removeprefix(DASH).partition(" ")
    if not line.startswith(DASH) or not name or "+" in name:
        raise Refused("bad_note", "no signature line")
    return name, b64decode(value, validate=True)


def _verify(public_key: str, signature: bytes, message: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise Refused("bad_signature") from None
