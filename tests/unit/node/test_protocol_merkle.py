"""The log's Merkle tree: an auditor and a worker rely on these proofs and on nothing else."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.protocol.merkle import (
    EMPTY_ROOT,
    ProofInvalid,
    completed_nodes,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    node_hash,
    root,
    verify_consistency,
    verify_inclusion,
)

SIZES = 70

# Published by Certificate Transparency's reference implementation.
CT_LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
CT_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
CT_CONSISTENCY = {
    (1, 1): [],
    (1, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): [
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}
CT_INCLUSION = {
    (0, 8): CT_CONSISTENCY[1, 8],
    (5, 8): [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
}


class Tree:
    """A store of complete-subtree hashes, filled leaf by leaf as the coordinator fills its own."""

    def __init__(self, leaves: list[bytes]) -> None:
        self.leaves = [leaf_hash(leaf) for leaf in leaves]
        self._nodes: dict[tuple[int, int], bytes] = {}
        for index, leaf in enumerate(self.leaves):
            for level, at, value in completed_nodes(index, leaf, self.node):
                assert (level, at) not in self._nodes, "a stored hash was made twice"
                self._nodes[level, at] = value

    def node(self, level: int, index: int) -> bytes:
        return self._nodes[level, index]

    def root(self, size: int) -> bytes:
        return root(size, self.node)

    def inclusion(self, index: int, size: int) -> list[bytes]:
        return inclusion_proof(index, size, self.node)

    def consistency(self, first: int, second: int) -> list[bytes]:
        return consistency_proof(first, second, self.node)


def by_definition(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962, 2.1, word for word."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + by_definition(leaves[:k]) + by_definition(leaves[k:])).digest()


LEAVES = [index.to_bytes(2, "big") * (index % 5) for index in range(SIZES)]
TREE = Tree(LEAVES)
CT = Tree([bytes.fromhex(leaf) for leaf in CT_LEAVES])


def test_the_roots_are_those_of_certificate_transparency() -> None:
    assert [CT.root(size).hex() for size in range(9)] == CT_ROOTS


@pytest.mark.parametrize(("index", "size"), CT_INCLUSION)
def test_the_audit_paths_are_those_of_certificate_transparency(index: int, size: int) -> None:
    assert [h.hex() for h in CT.inclusion(index, size)] == CT_INCLUSION[index, size]


@pytest.mark.parametrize(("first", "second"), CT_CONSISTENCY)
def test_the_consistency_proofs_are_those_of_certificate_transparency(first: int, second: int) -> None:
    assert [h.hex() for h in CT.consistency(first, second)] == CT_CONSISTENCY[first, second]


def test_every_root_is_the_one_the_rfc_defines() -> None:
    assert [TREE.root(size) for size in range(SIZES + 1)] == [by_definition(LEAVES[:n]) for n in range(SIZES + 1)]


def test_every_leaf_of_every_tree_can_be_proved() -> None:
    for size in range(1, SIZES + 1):
        expected = TREE.root(size)
        for index in range(size):
            proof = TREE.inclusion(index, size)
            assert len(proof) <= (size - 1).bit_length()
            verify_inclusion(TREE.leaves[index], index=index, size=size, proof=proof, root_hash=expected)


def test_every_two_sizes_can_be_proved_consistent() -> None:
    for second in range(SIZES + 1):
        for first in range(second + 1):
            verify_consistency(
                first=first,
                first_root=TREE.root(first),
                second=second,
                second_root=TREE.root(second),
                proof=TREE.consistency(first, second),
            )


def refused_inclusion(leaf: bytes, *, index: int, size: int, proof: list[bytes], root_hash: bytes) -> None:
    with pytest.raises(ProofInvalid):
        verify_inclusion(leaf, index=index, size=size, proof=proof, root_hash=root_hash)


def test_a_leaf_cannot_be_shown_at_another_place() -> None:
    for size in range(2, 24):
        for index in range(size):
            proof = TREE.inclusion(index, size)
            for other in range(size):
                if other != index:
                    refused_inclusion(
                        TREE.leaves[index], index=other, size=size, proof=proof, root_hash=TREE.root(size)
                    )


def test_an_edited_verdict_cannot_be_shown() -> None:
    for size in (1, 2, 3, 7, 8, 33, SIZES):
        refused_inclusion(
            leaf_hash(b"edited"),
            index=size // 2,
            size=size,
            proof=TREE.inclusion(size // 2, size),
            root_hash=TREE.root(size),
        )


def test_no_flipped_truncated_padded_or_reordered_audit_path_passes() -> None:
    for index, size in ((0, 1), (0, 2), (4, 7), (6, 7), (5, 8), (32, 33), (0, SIZES), (SIZES - 1, SIZES)):
        proof, leaf, whole = TREE.inclusion(index, size), TREE.leaves[index], TREE.root(size)
        for at, sibling in enumerate(proof):
            flipped = [*proof[:at], bytes([sibling[0] ^ 1]) + sibling[1:], *proof[at + 1 :]]
            refused_inclusion(leaf, index=index, size=size, proof=flipped, root_hash=whole)
            refused_inclusion(leaf, index=index, size=size, proof=proof[:at] + proof[at + 1 :], root_hash=whole)
        for extra in (bytes(32), whole, leaf):
            refused_inclusion(leaf, index=index, size=size, proof=[*proof, extra], root_hash=whole)
            refused_inclusion(leaf, index=index, size=size, proof=[extra, *proof], root_hash=whole)
        if len(proof) > 1:
            refused_inclusion(leaf, index=index, size=size, proof=proof[::-1], root_hash=whole)


def test_an_inner_node_cannot_be_passed_off_as_a_leaf() -> None:
    """Second preimage: without the 0x00 and 0x01 prefixes an inner node's bytes would be a valid leaf."""
    inner = TREE.leaves[0] + TREE.leaves[1]
    assert leaf_hash(inner) != node_hash(TREE.leaves[0], TREE.leaves[1])
    refused_inclusion(leaf_hash(inner), index=0, size=4, proof=TREE.inclusion(0, 8)[1:], root_hash=TREE.root(8))


@pytest.mark.parametrize(("index", "size"), [(0, 0), (1, 1), (8, 8), (-1, 8), (2**70, 8)])
def test_a_place_outside_the_tree_is_refused(index: int, size: int) -> None:
    refused_inclusion(TREE.leaves[0], index=index, size=size, proof=[], root_hash=TREE.root(8))
    with pytest.raises(ValueError, match="no leaf"):
        TREE.inclusion(index, size)


def refused_consistency(*, first: int, first_root: bytes, second: int, second_root: bytes, proof: list[bytes]) -> None:
    with pytest.raises(ProofInvalid):
        verify_consistency(first=first, first_root=first_root, second=second, second_root=second_root, proof=proof)


def test_history_cannot_be_rewritten_anywhere() -> None:
    """The operator swaps one old entry and presents the new tree's own, well-formed proof."""
    size = 20
    for changed in range(size):
        leaves = list(LEAVES[:size])
        leaves[changed] = b"rewritten"
        forged = Tree(leaves)
        for first in range(changed + 1, size + 1):
            refused_consistency(
                first=first,
                first_root=TREE.root(first),
                second=size,
                second_root=forged.root(size),
                proof=forged.consistency(first, size),
            )


def test_a_log_that_shrank_is_refused() -> None:
    refused_consistency(first=8, first_root=TREE.root(8), second=7, second_root=TREE.root(7), proof=[])
    refused_consistency(first=1, first_root=TREE.root(1), second=0, second_root=EMPTY_ROOT, proof=[])
    with pytest.raises(ValueError, match="no consistency"):
        TREE.consistency(8, 7)


def test_two_roots_for_one_size_are_refused() -> None:
    refused_consistency(first=8, first_root=TREE.root(8), second=8, second_root=TREE.root(7), proof=[])


def test_an_empty_log_has_one_root_only() -> None:
    verify_consistency(first=0, first_root=EMPTY_ROOT, second=5, second_root=TREE.root(5), proof=[])
    refused_consistency(first=0, first_root=TREE.root(1), second=5, second_root=TREE.root(5), proof=[])
    refused_consistency(first=0, first_root=EMPTY_ROOT, second=5, second_root=TREE.root(5), proof=[bytes(32)])


def test_no_flipped_truncated_padded_or_missing_consistency_proof_passes() -> None:
    for first, second in ((1, 2), (1, 8), (2, 5), (6, 8), (7, 8), (8, 64), (33, SIZES), (64, SIZES)):
        proof = TREE.consistency(first, second)
        roots = {"first": first, "first_root": TREE.root(first), "second": second, "second_root": TREE.root(second)}
        for at, sibling in enumerate(proof):
            refused_consistency(
                **roots, proof=[*proof[:at], sibling[:-1] + bytes([sibling[-1] ^ 128]), *proof[at + 1 :]]
            )
            refused_consistency(**roots, proof=proof[:at] + proof[at + 1 :])
        refused_consistency(**roots, proof=[])
        refused_consistency(**roots, proof=[*proof, bytes(32)])
        refused_consistency(**roots, proof=[TREE.root(first), *proof])
        refused_consistency(**{**roots, "first_root": bytes(32)}, proof=proof)
        refused_consistency(**{**roots, "second_root": bytes(32)}, proof=proof)


@given(
    first=st.integers(0, SIZES),
    second=st.integers(0, SIZES),
    proof=st.lists(st.sampled_from([*TREE.leaves[:4], TREE.root(8), bytes(32)]), max_size=9),
)
@settings(max_examples=300, deadline=None)
def test_a_made_up_proof_passes_only_where_it_is_the_true_one(first: int, second: int, proof: list[bytes]) -> None:
    try:
        verify_consistency(
            first=first,
            first_root=TREE.root(first),
            second=second,
            second_root=TREE.root(second),
            proof=proof,
        )
    except ProofInvalid:
        return
    assert first <= second
    assert proof == TREE.consistency(first, second)
