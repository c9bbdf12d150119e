"""Proofs are data from an adversary: each is measured or refused by name, and none stops a verifier."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import toploc
from toploc import ProofPoly, VerificationResult
from toploc.errors import BadArgument, BadModulus, BadProof, MalformedProof, WrongProofCount

P = 65497
K = 16


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


CHUNKS = [gaussian(4, 64, seed=i) for i in range(3)]
HONEST = toploc.build_chunk_proofs(CHUNKS, K)
# The indices of this chunk go past 65497, so an honest modulus may be smaller.
WIDE = gaussian(32, 4096)


def verify(proofs: list[bytes]) -> list[VerificationResult]:
    return toploc.verify_chunk_proofs(CHUNKS, proofs, K)


def replaced(proof: bytes, index: int = 1) -> list[bytes]:
    return [*HONEST[:index], proof, *HONEST[index + 1 :]]


def constant(bits: int, modulus: int = P, length: int = K) -> bytes:
    return ProofPoly([bits] + [0] * (length - 1), modulus).to_bytes()


class TestModulus:
    def test_null_proof_that_crashes_the_reference_is_refused(self) -> None:
        with pytest.raises(BadModulus) as caught:
            verify(replaced(ProofPoly.null(K).to_bytes()))
        assert caught.value.index == 1
        assert caught.value.code == "bad_modulus"

    @pytest.mark.parametrize("modulus", [1, 2, 32769, P - 1])
    def test_modulus_that_folds_indices_which_need_no_folding(self, modulus: int) -> None:
        with pytest.raises(BadModulus):
            verify(replaced(modulus.to_bytes(2, "big") + HONEST[1][2:]))

    @pytest.mark.parametrize("modulus", [1, 128, 32768])
    def test_modulus_that_folds_a_wide_chunk_onto_few_points(self, modulus: int) -> None:
        with pytest.raises(BadModulus):
            toploc.verify_chunk_proofs([WIDE], [constant(0x405B, modulus, 128)], 128)

    def test_modulus_above_the_field(self) -> None:
        with pytest.raises(BadModulus):
            verify(replaced((P + 1).to_bytes(2, "big") + HONEST[1][2:]))
        with pytest.raises(BadModulus):
            ProofPoly.from_bytes(b"\xff\xff\0\0")


class TestCounts:
    @pytest.mark.parametrize("proofs", [[], HONEST[:2], [*HONEST, HONEST[0]], HONEST * 1000])
    def test_missing_or_extra_proofs_are_refused(self, proofs: list[bytes]) -> None:
        with pytest.raises(WrongProofCount):
            verify(proofs)

    def test_counts_hold_in_every_encoding(self) -> None:
        rows = gaussian(40, 64)
        proofs = toploc.build_proofs(rows, 32, K, skip_prefill=True)
        calls: list[Callable[[], object]] = [
            lambda: toploc.verify_proofs(rows, proofs[:1], 32, K, skip_prefill=True),
            lambda: toploc.verify_proofs_bytes(rows, [proofs[0].to_bytes()], 32, K, skip_prefill=True),
            lambda: toploc.verify_proofs_base64(rows, [proofs[0].to_base64()], 32, K, skip_prefill=True),
        ]
        for call in calls:
            with pytest.raises(WrongProofCount):
                call()


class TestLengths:
    def test_four_byte_constant_that_passes_published_limits_is_refused(self) -> None:
        with pytest.raises(MalformedProof):
            toploc.verify_chunk_proofs([WIDE], [bytes.fromhex("ffd9405b")], 128)

    @pytest.mark.parametrize("proof", [b"", b"\xff", b"\xff\xd9", HONEST[1][:-1], HONEST[1][:-2]])
    def test_short_proofs(self, proof: bytes) -> None:
        with pytest.raises(MalformedProof) as caught:
            verify(replaced(proof))
        assert caught.value.index == 1

    @pytest.mark.parametrize("extra", [1, 2, 2**20])
    def test_long_proofs(self, extra: int) -> None:
        with pytest.raises(MalformedProof):
            verify(replaced(HONEST[1] + bytes(extra)))

    def test_a_long_and_a_short_proof_do_not_make_two(self) -> None:
        with pytest.raises(MalformedProof):
            verify([HONEST[0] + HONEST[1][:2], HONEST[1][2:], HONEST[2]])

    @pytest.mark.parametrize("proof", [None, "ffd9", 7, bytearray(HONEST[1]), [1, 2]])
    def test_proofs_that_are_not_bytes(self, proof: object) -> None:
        with pytest.raises(MalformedProof):
            verify(replaced(proof))
        with pytest.raises(MalformedProof):
            ProofPoly.from_bytes(proof)

    @pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 257, 2 + 2 * 4097])
    def test_lengths_that_no_proof_has(self, size: int) -> None:
        with pytest.raises(MalformedProof):
            ProofPoly.from_bytes(b"\x80" * size)


def test_a_second_encoding_of_the_same_polynomial_is_refused() -> None:
    """65497 and 0 are one residue; two encodings would give one proof two digests."""
    zero = ProofPoly([0] * K, P).to_bytes()
    assert verify(replaced(zero))[1].exp_mismatches > 0
    with pytest.raises(MalformedProof):
        verify(replaced(zero[:-2] + P.to_bytes(2, "big")))


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xFF80, 0xFFC0])
def test_proof_of_nan_or_infinity_matches_nothing(bits: int) -> None:
    results = verify(replaced(constant(bits % P)))
    assert results[1] == VerificationResult(K, 2.0**64, 2.0**64)
    assert [results[0], results[2]] == [VerificationResult(0, 0.0, 0.0)] * 2


def test_proof_of_another_chunk_is_far() -> None:
    results = verify([HONEST[1], HONEST[0], HONEST[2]])
    assert results[0].exp_mismatches > K // 2
    assert results[1].exp_mismatches > K // 2


def test_form_is_checked_before_activations_are_looked_into() -> None:
    """A garbage proof costs the verifier no pass over the activations."""
    broken = [torch.full((4, 64), float("nan")).bfloat16()]
    with pytest.raises(MalformedProof):
        toploc.verify_chunk_proofs(broken, [b"garbage"], K)


SIZES = [chunk.numel() for chunk in CHUNKS]


class TestFormAlone:
    """A verifier that has proofs and not yet activations, which cost it a forward pass."""

    def test_honest_proofs_pass(self) -> None:
        toploc.check_form(HONEST, SIZES, K)
        toploc.check_form([], [], K)

    def test_a_modulus_below_the_field_is_honest_of_a_chunk_whose_indices_go_past_it(self) -> None:
        for size, honest in ((P, False), (P + 1, True)):
            for modulus in (P - 1, 32769):
                if honest:
                    toploc.check_form([constant(0, modulus)], [size], K)
                    continue
                with pytest.raises(BadModulus):
                    toploc.check_form([constant(0, modulus)], [size], K)
        with pytest.raises(BadModulus):
            toploc.check_form([constant(0, 32768)], [P + 1], K)

    @pytest.mark.parametrize(
        ("proof", "error"),
        [
            (b"garbage", MalformedProof),
            (HONEST[1] + bytes(2), MalformedProof),
            (HONEST[1][:-2] + P.to_bytes(2, "big"), MalformedProof),
            (None, MalformedProof),
            (ProofPoly.null(K).to_bytes(), BadModulus),
            ((P + 1).to_bytes(2, "big") + HONEST[1][2:], BadModulus),
            ((P - 1).to_bytes(2, "big") + HONEST[1][2:], BadModulus),
        ],
    )
    def test_what_is_refused_is_what_measuring_refuses(self, proof: bytes, error: type[BadProof]) -> None:
        calls: list[Callable[[], object]] = [
            lambda: toploc.check_form(replaced(proof), SIZES, K),
            lambda: verify(replaced(proof)),
        ]
        for call in calls:
            with pytest.raises(error) as caught:
                call()
            assert (type(caught.value), caught.value.index) == (error, 1)

    @pytest.mark.parametrize("proofs", [[], HONEST[:2], [*HONEST, HONEST[0]]])
    def test_missing_or_extra_proofs(self, proofs: list[bytes]) -> None:
        with pytest.raises(WrongProofCount):
            toploc.check_form(proofs, SIZES, K)

    @pytest.mark.parametrize("topk", [-1, 0, 4097])
    def test_a_number_of_points_that_no_proof_has_is_the_callers_fault(self, topk: int) -> None:
        with pytest.raises(BadArgument):
            toploc.check_form(HONEST, SIZES, topk)


class TestBase64:
    GOOD = base64.b64encode(HONEST[0]).decode()

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "====",
            GOOD[:-1],
            GOOD + "=",
            GOOD + "\n",
            " " + GOOD,
            GOOD[:10] + "!" + GOOD[11:],
            GOOD[:10] + "é" + GOOD[11:],
            GOOD[:10] + "\ud800" + GOOD[11:],
            GOOD.replace("/", "_"),
            GOOD * 2,
            "A" * 10**6,
            None,
            HONEST[0],
        ],
    )
    def test_bad_base64_is_refused(self, text: object) -> None:
        with pytest.raises(MalformedProof) as caught:
            toploc.verify_proofs_base64(list(CHUNKS[0]), [text], 32, K, skip_prefill=True)
        assert caught.value.index == 0

    def test_unused_bits_of_the_last_character_are_zero(self) -> None:
        """Decoders ignore these bits, so one proof would have four spellings."""
        assert base64.b64decode("/9kAAQ==", validate=True) == base64.b64decode("/9kAAR==", validate=True)
        assert ProofPoly.from_base64("/9kAAQ==") == ProofPoly([1], P)
        with pytest.raises(MalformedProof):
            ProofPoly.from_base64("/9kAAR==")


def in_range(result: VerificationResult) -> bool:
    if result.exp_mismatches == K:
        return result == VerificationResult(K, 2.0**64, 2.0**64)
    return 0 <= result.exp_mismatches < K and 0 <= result.mant_err_mean <= 127 and 0 <= result.mant_err_median <= 127


class TestFuzz:
    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.binary(max_size=2 * K + 6) | st.sampled_from(HONEST), max_size=5))
    def test_any_bytes(self, proofs: list[bytes]) -> None:
        try:
            results = verify(proofs)
        except BadProof:
            return
        assert len(results) == len(CHUNKS)
        assert all(map(in_range, results))

    @settings(max_examples=300, deadline=None)
    @given(
        st.lists(st.integers(0, P - 1) | st.integers(P - 2, 2**16 - 1), min_size=K, max_size=K),
        st.sampled_from([P, P, P, P - 1, P + 1, 0]),
    )
    def test_any_polynomial(self, words: list[int], modulus: int) -> None:
        honest_form = modulus == P and max(words) < P
        try:
            results = verify(replaced(ProofPoly(words, modulus).to_bytes()))
        except BadProof:
            assert not honest_form
        else:
            assert honest_form
            assert all(map(in_range, results))

    @settings(max_examples=300, deadline=None)
    @given(st.text(max_size=60))
    def test_any_text(self, text: str) -> None:
        try:
            proof = ProofPoly.from_base64(text)
        except BadProof:
            return
        assert proof.to_base64() == text

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=80))
    def test_bytes_that_parse_have_no_other_encoding(self, data: bytes) -> None:
        try:
            proof = ProofPoly.from_bytes(data)
        except BadProof:
            return
        assert proof.to_bytes() == data

    def test_mutations_of_honest_proofs(self) -> None:
        draw = random.Random(0)
        refused = measured = 0
        for _ in range(1000):
            proof = bytearray(HONEST[1])
            for _ in range(draw.randint(1, 3)):
                mutate(draw, proof)
            try:
                results = verify(replaced(bytes(proof)))
            except BadProof:
                refused += 1
                continue
            measured += 1
            assert results[1] != VerificationResult(0, 0.0, 0.0) or bytes(proof) == HONEST[1]
        assert refused > 100
        assert measured > 100


def mutate(draw: random.Random, proof: bytearray) -> None:
    kind, at = draw.choice(["flip", "flip", "flip", "byte", "drop", "grow"]), draw.randrange(len(proof) or 1)
    if kind == "flip":
        proof[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        proof[at] = draw.choice([0, 0xFF, draw.randrange(256)])
    elif kind == "drop":
        del proof[at]
    else:
        proof.insert(at, draw.randrange(256))
