"""RFC 6962 Merkle tree hashing and proofs (RFC 9162, section 2.1), with SHA-256, as pure functions.

Proof construction works over any store of complete-subtree hashes: `node(level, index)` is the hash of leaves
index * 2**level .. (index + 1) * 2**level - 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

MAX_PROOF_HASHES = 64
EMPTY_ROOT = hashlib.sha256(b"").digest()

NodeStore = Callable[[int, int], bytes]


class ProofInvalid(Exception):
    """A Merkle proof that does not prove what it should."""


def leaf_hash(leaf: bytes) -> bytes:
    """Return SHA-256(0x00 || leaf)."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return SHA-256(0x01 || left || right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def completed_nodes(index: int, leaf: bytes, node: NodeStore) -> list[tuple[int, int, bytes]]:
    """Return the (level, index, hash) entries that appending leaf hash `leaf` at `index` adds to the store."""
    added = [(0, index, leaf)]
    level = 0
    while index & 1:
        left = node(level, index - 1)
        level, index = level + 1, index >> 1
        added.append((level, index, node_hash(left, added[-1][2])))
    return added


def root(size: int, node: NodeStore) -> bytes:
    """Return the root of the first `size` leaves."""
    return _range_hash(0, size, node) if size else EMPTY_ROOT


def inclusion_proof(index: int, size: int, node: NodeStore) -> list[bytes]:
    """Return the audit path of leaf `index` in the tree of `size` leaves."""
    if not 0 <= index < size:
        raise ValueError(f"no leaf {index} in a tree of {size}")
    return _path(index, 0, size, node)


def consistency_proof(first: int, second: int, node: NodeStore) -> list[bytes]:
    """Return the proof that the tree of `first` leaves is a prefix of the tree of `second`."""
    if not 0 <= first <= second:
        raise ValueError(f"no consistency from {first} to {second}")
    if first in (0, second):
        return []
    return _subproof(first, 0, second, node, complete=True)


def verify_inclusion(leaf: bytes, *, index: int, size: int, proof: Sequence[bytes], root_hash: bytes) -> None:
    """Raise ProofInvalid unless leaf hash `leaf` is at `index` of the tree with `root_hash` (RFC 9162, 2.1.3.2)."""
    if not 0 <= index < size:
        raise ProofInvalid(f"no leaf {index} in a tree of {size}")
    where, last, current = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            raise ProofInvalid("an inclusion proof with too many hashes")
        if where & 1 or where == last:
            current = node_hash(sibling, current)
            while not where & 1 and where:
                where, last = where >> 1, last >> 1
        else:
            current = node_hash(current, sibling)
        where, last = where >> 1, last >> 1
    if last or current != root_hash:
        raise ProofInvalid("the inclusion proof leads to another root")


def verify_consistency(
    *, first: int, first_root: bytes, second: int, second_root: bytes, proof: Sequence[bytes]
) -> None:
    """Raise ProofInvalid unless the second tree extends the first (RFC 9162, 2.1.4.2)."""
    if not 0 <= first <= second:
        raise ProofInvalid("the log has shrunk")
    if first in (0, second):
        if proof or (first == second and first_root != second_root) or (first == 0 and first_root != EMPTY_ROOT):
            raise ProofInvalid("two roots for one size, or hashes where none belong")
        return
    path = list(proof)
    if first & (first - 1) == 0:
        path.insert(0, first_root)
    if not path:
        raise ProofInvalid("an empty consistency proof")
    where, last = first - 1, second - 1
    while where & 1:
        where, last = where >> 1, last >> 1
    old = new = path[0]
    for sibling in path[1:]:
        if last == 0:
            raise ProofInvalid("a consistency proof with too many hashes")
        if where & 1 or where == last:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
            while not where & 1 and where:
                where, last = where >> 1, last >> 1
        else:
            new = node_hash(new, sibling)
        where, last = where >> 1, last >> 1
    if last or old != first_root or new != second_root:
        raise ProofInvalid("the log's history has changed")


def _split(count: int) -> int:
    """Return the largest power of two below `count`."""
    return 1 << ((count - 1).bit_length() - 1)


def _range_hash(start: int, end: int, node: NodeStore) -> bytes:
    count = end - start
    if count & (count - 1) == 0:
        level = count.bit_length() - 1
        return node(level, start >> level)
    middle = start + _split(count)
    return node_hash(_range_hash(start, middle, node), _range_hash(middle, end, node))


def _path(index: int, start: int, end: int, node: NodeStore) -> list[bytes]:
    if end - start == 1:
        return []
    middle = start + _split(end - start)
    if index < middle:
        return [*_path(index, start, middle, node), _range_hash(middle, end, node)]
    return [*_path(index, middle, end, node), _range_hash(start, middle, node)]


def _subproof(first: int, start: int, end: int, node: NodeStore, *, complete: bool) -> list[bytes]:
    if first == end:
        return [] if complete else [_range_hash(start, end, node)]
    middle = start + _split(end - start)
    if first <= middle:
        return [*_subproof(first, start, middle, node, complete=complete), _range_hash(middle, end, node)]
    return [*_subproof(first, middle, end, node, complete=False), _range_hash(start, middle, node)]
