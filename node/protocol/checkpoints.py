"""Checkpoints of logs, this run's and others, as notes (c2sp.org/tlog-checkpoint; docs/protocol.md, section 8.3)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.protocol.merkle import MAX_PROOF_HASHES
from node.protocol.notes import (
    MAX_NOTE_BYTES,
    KeyKind,
    Note,
    VerifierKey,
    decode_base64,
    encode_base64,
    join_note,
    parse_note,
    sign_text,
)
from shardcast.errors import BadSignature, Malformed, PeerFault

MAX_SIZE: Final = 2**63 - 1
ROOT_BYTES: Final = 32
MAX_SUBMITTED_HASHES: Final = 63
"""Hashes of a proof that a witness reads."""
MAX_ADD_BYTES: Final = MAX_NOTE_BYTES + 64 + 48 * MAX_PROOF_HASHES

_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Size and root (32 bytes) of the log `origin`."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> bytes:
        """The text of its note."""
        return f"{self.origin}\n{self.size}\n{encode_base64(self.root)}\n".encode()


@dataclass(frozen=True, slots=True)
class WitnessedCheckpoint:
    """A checkpoint that its log signed, the note it came in, and when which of the witnesses asked for signed it."""

    checkpoint: Checkpoint
    note: Note
    witnesses: Mapping[VerifierKey, int]


def origin_of(run_id: str) -> str:
    """Return the origin of a run's log, which is its key's name, too."""
    return f"swarmproof/{run_id}"


def origin_hash(origin: str) -> str:
    """Return how witnesses name a log in addresses and files: SHA-256 of its origin, in hexadecimal."""
    return hashlib.sha256(origin.encode()).hexdigest()


def log_key(run_id: str, public_key: bytes) -> VerifierKey:
    """Return the verifier key of a run's log."""
    return VerifierKey(origin_of(run_id), KeyKind.LOG, public_key)


def parse_size(text: str) -> int:
    """Read a tree's size in its one decimal spelling; raises Malformed."""
    if _DECIMAL.fullmatch(text) is None or int(text) > MAX_SIZE:
        raise Malformed("a tree's size that is no decimal number in its shortest spelling")
    return int(text)


def parse_hash(text: str) -> bytes:
    """Read a SHA-256 hash in base64; raises Malformed."""
    value = decode_base64(text)
    if len(value) != ROOT_BYTES:
        raise Malformed(f"a hash of {len(value)} bytes")
    return value


def parse_checkpoint(text: bytes) -> Checkpoint:
    """Read a note's text as a checkpoint; extension lines are left to others. Raises Malformed."""
    try:
        origin, size, root, *extensions, rest = text.decode().split("\n")
    except ValueError as error:
        raise Malformed("a checkpoint has an origin, a size and a root, each in a line") from error
    if rest or not origin or not all(extensions):
        raise Malformed("a checkpoint with an empty line, or without a newline at its end")
    return Checkpoint(origin, parse_size(size), parse_hash(root))


def seal_checkpoint(checkpoint: Checkpoint, *, key: Ed25519PrivateKey) -> bytes:
    """Return the note of a checkpoint that its log signed, under the origin's name."""
    text = checkpoint.text
    return join_note(text, [sign_text(text, name=checkpoint.origin, key=key)])


def open_checkpoint(data: bytes, *, run_id: str, signer: bytes) -> Checkpoint:
    """Return the checkpoint in a note; raises PeerFault unless the run's key `signer` signed it for this run."""
    return open_witnessed(data, log=log_key(run_id, signer)).checkpoint


def open_witnessed(data: bytes, *, log: VerifierKey, witnesses: Iterable[VerifierKey] = ()) -> WitnessedCheckpoint:
    """Return the checkpoint in a note, and which of `witnesses` signed it; raises PeerFault unless `log` did.

    Signatures of other keys are ignored; one of these keys that is not of this text spoils the note.
    """
    note = parse_note(data)
    found = note.verify([log, *witnesses])
    if log not in found:
        raise BadSignature(f"not signed by the key {log.name}", code="wrong_signer")
    checkpoint = parse_checkpoint(note.text)
    if checkpoint.origin != log.name:
        raise PeerFault("it names another log", code="wrong_run")
    times = {key: key.verify(note.text, one.signature) for key, one in found.items() if key != log}
    return WitnessedCheckpoint(checkpoint, note, times)


@dataclass(frozen=True, slots=True)
class AddCheckpoint:
    """A log's request to a witness: sign `note`, which extends the size `old` by `proof` (c2sp.org/tlog-witness)."""

    old: int
    proof: tuple[bytes, ...]
    note: bytes

    def encode(self) -> bytes:
        """Return the request's body."""
        hashes = "".join(f"{encode_base64(one)}\n" for one in self.proof)
        return f"old {self.old}\n{hashes}\n".encode() + self.note


def parse_add_checkpoint(data: bytes) -> AddCheckpoint:
    """Read a request of at most MAX_ADD_BYTES and MAX_SUBMITTED_HASHES; raises Malformed. The note is not opened."""
    if len(data) > MAX_ADD_BYTES:
        raise Malformed(f"a request of {len(data)} bytes, more than {MAX_ADD_BYTES}", code="oversized")
    head, separator, note = data.partition(b"\n\n")
    if not separator or head.count(b"\n") > MAX_SUBMITTED_HASHES:
        raise Malformed(f"a request without a note, or with more than {MAX_SUBMITTED_HASHES} hashes")
    try:
        old, *hashes = head.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise Malformed("a request whose proof is not ASCII") from error
    if not old.startswith("old "):
        raise Malformed("a request that does not begin with: old SIZE")
    return AddCheckpoint(parse_size(old.removeprefix("old ")), tuple(map(parse_hash, hashes)), note)
