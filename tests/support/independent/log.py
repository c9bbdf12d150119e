"""The log's tree, its proofs, checkpoints and receipts (sections 8.2 and 8.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from .envelope import open_envelope
from .messages import RECEIPT
from .values import Refused, decode

MAX_PROOF = 64
MAX_ENTRY_BYTES = 2**20


def leaf_hash(leaf: bytes) -> bytes:
    """Return the hash of a leaf."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def root_of(hashes: Sequence[bytes]) -> bytes:
    """Return the root over leaf hashes."""
    if not hashes:
        return hashlib.sha256(b"").digest()
    if len(hashes) == 1:
        return hashes[0]
    split = 1 << (len(hashes) - 1).bit_length() - 1
    return node_hash(root_of(hashes[:split]), root_of(hashes[split:]))


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Check that the leaf hash `leaf` is entry `index` of the tree (RFC 9162, 2.1.3.2); raises Refused."""
    if not 0 <= index < size or len(proof) > MAX_PROOF:
        raise Refused("not_included", f"index {index} of {size}")
    fn, sn, computed = index, size - 1, leaf
    for step in proof:
        if sn == 0:
            raise Refused("not_included", "the proof is too long")
        if fn & 1 or fn == sn:
            computed = node_hash(step, computed)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            computed = node_hash(computed, step)
        fn, sn = fn >> 1, sn >> 1
    if sn or computed != root:
        raise Refused("not_included", f"entry {index} is not the one that was promised")


def verify_consistency(first: int, second: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Check that the tree of `second` leaves extends that of `first` (RFC 9162, 2.1.4.2); raises Refused."""
    if first > second or len(proof) > MAX_PROOF:
        raise Refused("inconsistent", f"a log of {second} entries is no extension of {first}")
    if first in (0, second):
        if proof or (first == second and old_root != new_root):
            raise Refused("inconsistent", "equal sizes have one root, and no proof")
        return
    path = list(proof) if first & (first - 1) else [old_root, *proof]
    if not path:
        raise Refused("inconsistent", "no proof")
    fn, sn = first - 1, second - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    old = new = path[0]
    for step in path[1:]:
        if sn == 0:
            raise Refused("inconsistent", "the proof is too long")
        if fn & 1 or fn == sn:
            old, new = node_hash(step, old), node_hash(step, new)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            new = node_hash(new, step)
        fn, sn = fn >> 1, sn >> 1
    if sn or old != old_root or new != new_root:
        raise Refused("inconsistent", "two histories")


def open_receipt(envelope: bytes, run_id: str, run_key: str) -> dict[str, Any]:
    """Return the Receipt in an envelope of the run's key, for this run."""
    opened = open_envelope(envelope, "swarmproof/receipt", max_payload_bytes=64 * 1024, signer=run_key)
    value = decode(RECEIPT, opened.payload, max_bytes=64 * 1024)
    if value["run_id"] != run_id:
        raise Refused("wrong_run")
    return value
