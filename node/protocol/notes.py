"""Signed notes: a text, and signature lines of any number of keys (c2sp.org/signed-note, c2sp.org/tlog-cosignature).

    note = text | "\\n" | lines        line = "— " | key name | " " | base64(u32 key id | signature) | "\\n"

The text ends in a newline. Two kinds of Ed25519 keys are read: a log's, which signs the text, and a witness's, which
signs it after the lines "cosignature/v1" and "time T" and puts T before its signature. Signatures of other keys are
ignored. Nothing else that this project signs begins as either message does, so a key may sign notes and envelopes.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shardcast.envelope import is_small_order
from shardcast.errors import BadSignature, Malformed

MAX_NOTE_BYTES: Final = 64 * 1024
MAX_SIGNATURES: Final = 64
MAX_VKEY_CHARACTERS: Final = 512
MAX_TIMESTAMP: Final = 2**63 - 1

_DASH: Final = "— "
_ID_BYTES: Final = 4
_CONTROL: Final = re.compile(rb"[\x00-\x09\x0b-\x1f]")
_VKEY: Final = re.compile(r"([^+\s]+)\+([0-9a-f]{8})\+([A-Za-z0-9+/]{44})")


class KeyKind(enum.IntEnum):
    """What a key's signature is of, by its byte in a verifier key."""

    LOG = 1
    WITNESS = 4


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """A public key, with the name that its signature lines carry; `str` is its C2SP form, a "vkey"."""

    name: str
    kind: KeyKind
    public_key: bytes

    @property
    def key_id(self) -> bytes:
        """The four bytes that tell the key's signatures apart from others of the name."""
        return hashlib.sha256(self.name.encode() + b"\n" + bytes([self.kind]) + self.public_key).digest()[:_ID_BYTES]

    def __str__(self) -> str:
        return f"{self.name}+{self.key_id.hex()}+{encode_base64(bytes([self.kind]) + self.public_key)}"

    def verify(self, text: bytes, signature: bytes) -> int:
        """Return the time of a cosignature on `text`, 0 of a log's signature; raises BadSignature."""
        at = 0
        try:
            if self.kind is KeyKind.WITNESS:
                (at,) = struct.unpack(">Q", signature[:8])
                signature, text = signature[8:], _cosigned(text, at)
            if 0 < at <= MAX_TIMESTAMP or self.kind is KeyKind.LOG:
                Ed25519PublicKey.from_public_bytes(self.public_key).verify(signature, text)
                return int(at)
        except (InvalidSignature, ValueError, struct.error):
            pass
        raise BadSignature(f"a signature of {self.name} is not of this text")


@dataclass(frozen=True, slots=True)
class NoteSignature:
    """A signature line: of which key it says it is, and the signature."""

    name: str
    key_id: bytes
    signature: bytes

    @property
    def line(self) -> bytes:
        """The line, with its newline."""
        return f"{_DASH}{self.name} {encode_base64(self.key_id + self.signature)}\n".encode()


@dataclass(frozen=True, slots=True)
class Note:
    """A note as it was read; nothing of it may be believed before `verify`."""

    text: bytes
    signatures: tuple[NoteSignature, ...]

    def verify(self, keys: Iterable[VerifierKey]) -> Mapping[VerifierKey, NoteSignature]:
        """Return the signature of each of `keys` that has one, and ignore those of other keys.

        Raises BadSignature if a signature of one of them is not of the text: nobody honest passes that on.
        """
        known = {(key.name, key.key_id): key for key in keys}
        found: dict[VerifierKey, NoteSignature] = {}
        for one in self.signatures:
            key = known.get((one.name, one.key_id))
            if key is not None:
                key.verify(self.text, one.signature)
                found.setdefault(key, one)
        return found

    def encode(self) -> bytes:
        """Return the note's bytes."""
        return join_note(self.text, self.signatures)


def parse_key(text: str, kind: KeyKind) -> VerifierKey:
    """Read a verifier key of this kind; raises Malformed, with code `bad_vkey`."""
    match = _VKEY.fullmatch(text) if len(text) <= MAX_VKEY_CHARACTERS else None
    raw = b"" if match is None else base64.b64decode(match[3])
    if match is None or raw[:1] != bytes([kind]):
        whose = "log" if kind is KeyKind.LOG else "witness"
        raise Malformed(f"{text[:80]!r} is no Ed25519 verifier key of a {whose}: NAME+ID+KEY", code="bad_vkey")
    key = VerifierKey(match[1], kind, raw[1:])
    if key.key_id.hex() != match[2]:
        raise Malformed(f"the id {match[2]} is not that of the name and key beside it", code="bad_vkey")
    if is_small_order(key.public_key):
        raise Malformed("under this key any message verifies", code="bad_vkey")
    return key


def parse_note(data: bytes) -> Note:
    """Split a note of at most MAX_NOTE_BYTES and MAX_SIGNATURES; raises Malformed. No signature is looked at."""
    if len(data) > MAX_NOTE_BYTES:
        raise Malformed(f"a note of {len(data)} bytes, more than {MAX_NOTE_BYTES}", code="oversized")
    end = data.rfind(b"\n\n")
    if end < 0:
        raise Malformed("a note without an empty line before its signatures")
    text = data[: end + 1]
    if _CONTROL.search(data):
        raise Malformed("a note with control characters")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise Malformed("a note that is not UTF-8") from error
    return Note(text, parse_signatures(data[end + 2 :]))


def parse_signatures(data: bytes) -> tuple[NoteSignature, ...]:
    """Read one signature line or more, at most MAX_SIGNATURES; raises Malformed."""
    if data.count(b"\n") > MAX_SIGNATURES:
        raise Malformed(f"more than {MAX_SIGNATURES} signatures", code="oversized")
    try:
        *lines, rest = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise Malformed("signatures that are not UTF-8") from error
    if rest or not lines:
        raise Malformed("a note whose signatures do not end in a newline")
    return tuple(map(_signature, lines))


def _signature(line: str) -> NoteSignature:
    name, _, value = line.removeprefix(_DASH).partition(" ")
    if not line.startswith(_DASH) or not is_key_name(name):
        raise Malformed("a signature line that is not: — NAME BASE64")
    raw = decode_base64(value)
    if len(raw) <= _ID_BYTES:
        raise Malformed("a signature that is shorter than its key's id")
    return NoteSignature(name, raw[:_ID_BYTES], raw[_ID_BYTES:])


def is_key_name(text: str) -> bool:
    """Return whether a signature line can carry this name."""
    return bool(text) and "+" not in text and not any(map(str.isspace, text))


def join_note(text: bytes, signatures: Iterable[NoteSignature]) -> bytes:
    """Return the note of `text`, which ends in a newline, and its signatures."""
    return text + b"\n" + b"".join(one.line for one in signatures)


def sign_text(text: bytes, *, name: str, key: Ed25519PrivateKey) -> NoteSignature:
    """Sign `text` as a log does."""
    verifier = VerifierKey(name, KeyKind.LOG, key.public_key().public_bytes_raw())
    return NoteSignature(name, verifier.key_id, key.sign(text))


def cosign_text(text: bytes, *, name: str, key: Ed25519PrivateKey, at: int) -> NoteSignature:
    """Sign `text` as a witness does, at `at` in Unix seconds."""
    verifier = VerifierKey(name, KeyKind.WITNESS, key.public_key().public_bytes_raw())
    return NoteSignature(name, verifier.key_id, struct.pack(">Q", at) + key.sign(_cosigned(text, at)))


def _cosigned(text: bytes, at: int) -> bytes:
    return b"cosignature/v1\ntime %d\n" % at + text


def encode_base64(data: bytes) -> str:
    """Return the standard base64 of `data`, with padding."""
    return base64.b64encode(data).decode()


def decode_base64(text: str) -> bytes:
    """Return the bytes of standard base64 in its one spelling; raises Malformed."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Malformed("what should be base64 is not") from error
    if encode_base64(data) != text:
        raise Malformed("base64 in another than its one spelling")
    return data
