"""Building and verifying as the engine and the verifier call it, and the caller's own mistakes."""

from __future__ import annotations

import pickle  # noqa: TID251 - users may pickle our values between their own processes
import random
import statistics

import pytest
import torch
from torch import Tensor

import toploc
from toploc import ProofPoly, VerificationResult
from toploc.errors import (
    BadActivations,
    BadArgument,
    CallerFault,
    ChunkTooSmall,
    MalformedProof,
    NonFiniteActivations,
)

P = 65497
EXACT = VerificationResult(0, 0.0, 0.0)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def slow_result(proof: bytes, chunk: Tensor, topk: int) -> VerificationResult:
    """The definition, one element at a time over Python integers."""
    bits = [value & 0xFFFF for value in chunk.reshape(-1).view(torch.int16).tolist()]
    top = sorted(range(len(bits)), key=lambda i: (-(bits[i] & 0x7FFF), i))[:topk]
    poly = ProofPoly.from_bytes(proof)
    pairs = [(poly(i % poly.modulus), bits[i]) for i in top]
    errors = [abs((a & 127) - (b & 127)) for a, b in pairs if a >> 7 & 255 == b >> 7 & 255]
    if not errors:
        return VerificationResult(topk, 2.0**64, 2.0**64)
    return VerificationResult(topk - len(errors), statistics.mean(errors), statistics.median(errors))


class TestRoundTrip:
    def test_honest_chunks_at_hidden_4096_are_exact(self) -> None:
        """Some of these need a modulus below 65497, where a verifier that ignores it rejects honest work."""
        activations = gaussian(32 * 32, 4096)
        proofs = toploc.build_proofs(activations, 32, 128, skip_prefill=True)
        assert any(proof.modulus < P for proof in proofs)
        assert toploc.verify_proofs(activations, proofs, 32, 128, skip_prefill=True) == [EXACT] * 32
        assert toploc.verify_proofs(list(activations), proofs, 32, 128, skip_prefill=True) == [EXACT] * 32

    def test_the_polynomial_passes_through_the_largest_elements(self) -> None:
        activations = gaussian(32, 4096, seed=3)
        (proof,) = toploc.build_proofs(activations, 32, 128, skip_prefill=True)
        flat = activations.view(-1)
        largest = flat.abs() > flat.abs().topk(128).values[-1]
        for index in largest.nonzero()[:, 0].tolist():
            assert proof(index % proof.modulus) == int(flat[index].view(torch.int16)) & 0xFFFF

    @pytest.mark.parametrize("tokens", [1, 31, 32, 33, 70])
    def test_the_last_shorter_chunk_is_proved_too(self, tokens: int) -> None:
        activations = gaussian(tokens, 128)
        proofs = toploc.build_proofs_bytes(activations, 32, 128, skip_prefill=True)
        assert [len(proof) for proof in proofs] == [258] * -(-tokens // 32)
        tampered = activations.clone()
        tampered[-1] = gaussian(128, seed=9)
        results = toploc.verify_proofs_bytes(tampered, proofs, 32, 128, skip_prefill=True)
        assert results[:-1] == [EXACT] * (len(proofs) - 1)
        assert results[-1] != EXACT

    def test_the_prefill_is_a_chunk_of_its_own(self) -> None:
        activations = [gaussian(7, 64), *gaussian(5, 64, seed=1)]
        proofs = toploc.build_proofs_bytes(activations, 2, 16)
        assert len(proofs) == 4
        assert proofs[0] == toploc.build_chunk_proofs([activations[0]], 16)[0]
        assert toploc.verify_proofs_bytes(activations, proofs, 2, 16) == [EXACT] * 4

    def test_tokens_may_keep_a_batch_dimension_strides_and_gradients(self) -> None:
        plain = gaussian(40, 64)
        proofs = toploc.build_proofs_bytes(list(plain), 32, 16, skip_prefill=True)
        strided = gaussian(40, 64).repeat_interleave(2, dim=1)[:, ::2]
        for same in (
            [row.unsqueeze(0) for row in plain],
            [plain[:1].squeeze(0), *plain[1:].unsqueeze(1)],
            strided,
            plain.clone().requires_grad_(),
        ):
            assert toploc.build_proofs_bytes(same, 32, 16, skip_prefill=True) == proofs

    def test_views_of_one_tensor_are_proved_as_their_copies_are(self) -> None:
        """Views that follow each other in memory are not copied; of others only their own elements count."""
        memory = gaussian(41, 64)
        for rows in (
            [memory[i] for i in range(40)],
            [memory[i + 1] for i in range(40)],
            [memory[39 - i] for i in range(40)],
            [memory[i ^ 1] for i in range(40)],
            [memory[i] for i in (*range(20), *range(21, 41))],
            [memory[i // 2] for i in range(40)],
            [memory[0]] * 40,
            [*memory[:39], memory[39:41].flatten()[32:96]],
        ):
            copies = [row.clone() for row in rows]
            expected = toploc.build_proofs_bytes(copies, 8, 16, skip_prefill=True)
            assert toploc.build_proofs_bytes(rows, 8, 16, skip_prefill=True) == expected

    def test_tensors_that_share_memory_without_sharing_a_storage(self) -> None:
        """A GPU's allocator places storages side by side, and no view reaches from one into the next."""
        octets = bytearray(gaussian(32, 64).view(torch.int16).numpy().tobytes())
        whole = torch.frombuffer(octets, dtype=torch.bfloat16).view(4, 512)
        apart = [torch.frombuffer(octets, dtype=torch.bfloat16, count=512, offset=1024 * i) for i in range(4)]
        assert apart[1].data_ptr() == apart[0].data_ptr() + 1024
        assert toploc.build_chunk_proofs(apart, 16) == toploc.build_chunk_proofs(list(whole.clone()), 16)

    def test_an_empty_sequence_has_no_proofs(self) -> None:
        assert toploc.build_proofs_bytes([], 32, 128) == []
        assert toploc.build_proofs_bytes([], 32, 128, skip_prefill=True) == []
        assert toploc.build_chunk_proofs([], 128) == []


class TestManySequencesAtOnce:
    def test_each_chunk_gets_the_proof_it_would_get_alone(self) -> None:
        """A worker proves 64 completions in one call; a chunk must not depend on what shares its batch."""
        draw = random.Random(0)
        chunks = [gaussian(draw.randint(1, 32), 128, seed=i) for i in range(64)] + [gaussian(32, 4096, seed=64)]
        proofs = toploc.build_chunk_proofs(chunks, 128)
        assert proofs == [toploc.build_chunk_proofs([chunk], 128)[0] for chunk in chunks]
        assert toploc.verify_chunk_proofs(chunks, proofs, 128) == [EXACT] * 65

    def test_zeros_are_elements_like_others(self) -> None:
        """Chunks are padded with zeros to share a batch; padding must not stand in for a chunk's own zeros."""
        small, large = torch.zeros(1, 128).bfloat16(), gaussian(1, 200)
        proofs = toploc.build_chunk_proofs([small, large], 128)
        assert proofs == [toploc.build_chunk_proofs([chunk], 128)[0] for chunk in (small, large)]
        poly = ProofPoly.from_bytes(proofs[0])
        assert [poly(i) for i in range(128)] == [0] * 128


class TestDistances:
    @pytest.mark.parametrize("scale", [0.0, 0.002, 0.01, 0.1, 3.0])
    def test_equal_the_definition(self, scale: float) -> None:
        chunks = [gaussian(8, 512, seed=i) for i in range(6)]
        proofs = toploc.build_chunk_proofs(chunks, 128)
        noisy = [chunk + scale * gaussian(8, 512, seed=50 + i) for i, chunk in enumerate(chunks)]
        results = toploc.verify_chunk_proofs(noisy, proofs, 128)
        expected = [slow_result(proof, chunk, 128) for proof, chunk in zip(proofs, noisy, strict=True)]
        assert results == expected

    @pytest.mark.parametrize("k", [1, 2, 3, 4])
    def test_medians_of_few_matches_equal_the_definition(self, k: int) -> None:
        chunks = [gaussian(1, 8, seed=i) for i in range(40)]
        proofs = toploc.build_chunk_proofs(chunks, k)
        noisy = [chunk * 1.1 for chunk in chunks]
        expected = [slow_result(proof, chunk, k) for proof, chunk in zip(proofs, noisy, strict=True)]
        assert toploc.verify_chunk_proofs(noisy, proofs, k) == expected
        assert len({result.exp_mismatches for result in expected}) > 1

    def test_no_matching_exponent_is_the_largest_error(self) -> None:
        chunk = gaussian(4, 64)
        proofs = toploc.build_chunk_proofs([chunk], 16)
        assert toploc.verify_chunk_proofs([chunk * 4], proofs, 16) == [VerificationResult(16, 2.0**64, 2.0**64)]


class TestCallerFaults:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int16])
    def test_other_dtypes_are_refused_not_cast(self, dtype: torch.dtype) -> None:
        """A silent cast of one side only would move every mantissa."""
        activations = gaussian(4, 64)
        proofs = toploc.build_proofs_bytes(activations, 32, 16, skip_prefill=True)
        with pytest.raises(BadActivations, match="bfloat16"):
            toploc.build_proofs_bytes(activations.to(dtype), 32, 16, skip_prefill=True)
        with pytest.raises(BadActivations, match="bfloat16"):
            toploc.verify_proofs_bytes(activations.to(dtype), proofs, 32, 16, skip_prefill=True)

    def test_one_float32_token_among_others_is_refused(self) -> None:
        tokens = [*gaussian(3, 64), gaussian(64).float()]
        with pytest.raises(BadActivations):
            toploc.build_proofs_bytes(tokens, 32, 16, skip_prefill=True)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_non_finite_activations_are_an_error_not_a_null_proof(self, value: float) -> None:
        chunks = [gaussian(4, 64, seed=i) for i in range(3)]
        proofs = toploc.build_chunk_proofs(chunks, 16)
        chunks[1][2, 5] = value
        with pytest.raises(NonFiniteActivations) as built:
            toploc.build_chunk_proofs(chunks, 16)
        with pytest.raises(NonFiniteActivations) as verified:
            toploc.verify_chunk_proofs(chunks, proofs, 16)
        assert built.value.index == verified.value.index == 1

    def test_a_chunk_smaller_than_k_is_an_error(self) -> None:
        with pytest.raises(ChunkTooSmall) as caught:
            toploc.build_proofs_bytes(gaussian(33, 64), 32, 65, skip_prefill=True)
        assert caught.value.index == 1
        with pytest.raises(ChunkTooSmall):
            toploc.build_proofs_bytes([gaussian(0, 64), gaussian(64)], 32, 16)

    @pytest.mark.parametrize("topk", [0, -1, 4097])
    def test_a_wrong_k_is_not_blamed_on_the_prover(self, topk: int) -> None:
        chunk = gaussian(200, 64)
        for call in (
            lambda: toploc.build_chunk_proofs([chunk], topk),
            lambda: toploc.verify_chunk_proofs([chunk], [b"\xff\xd9\0\0"], topk),
            lambda: toploc.verify_proofs_base64([chunk], ["/9kAAA=="], 32, topk, skip_prefill=True),
        ):
            with pytest.raises(BadArgument):
                call()

    @pytest.mark.parametrize("size", [0, -32])
    def test_a_batch_has_at_least_one_token(self, size: int) -> None:
        with pytest.raises(BadArgument):
            toploc.build_proofs_bytes(gaussian(4, 64), size, 16, skip_prefill=True)

    def test_things_that_are_no_rows_of_tensors_are_refused(self) -> None:
        for wrong in ([1.0, 2.0], ["a"], [None], gaussian(4)):
            with pytest.raises(BadActivations):
                toploc.build_proofs_bytes(wrong, 32, 1, skip_prefill=True)

    def test_verifying_nothing_is_an_error(self) -> None:
        """all([]) is true: an empty list of results would pass whoever forgets to count."""
        for call in (
            lambda: toploc.verify_proofs_bytes([], [], 32, 128),
            lambda: toploc.verify_proofs_bytes(torch.empty(0, 64).bfloat16(), [], 32, 16, skip_prefill=True),
            lambda: toploc.verify_chunk_proofs([], [], 128),
        ):
            with pytest.raises(BadActivations):
                call()


class TestProofPoly:
    def test_values_are_those_of_the_polynomial(self) -> None:
        poly = ProofPoly([1, 2, 3, 4], P)
        assert [poly(x) for x in (0, 1, 42, P - 1)] == [
            (1 + 2 * x + 3 * x**2 + 4 * x**3) % P for x in (0, 1, 42, P - 1)
        ]
        assert len(poly) == 4

    def test_from_points_takes_lists_and_tensors(self) -> None:
        x, y = [5, 1, 70_000, 3], [4, 5, 65_000, 0]
        poly = ProofPoly.from_points(x, y)
        assert [poly(point % poly.modulus) for point in x] == y
        for dtype in (torch.int32, torch.int64):
            assert ProofPoly.from_points_tensor(torch.tensor(x, dtype=dtype), torch.tensor(y)) == poly
        bits = torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16)
        assert ProofPoly.from_points_tensor(torch.arange(3), bits)(1) == 0xC000

    def test_from_points_refuses_what_no_polynomial_passes_through(self) -> None:
        for x, y in (([1, 1], [2, 3]), ([1, 2], [3]), ([], []), ([-1], [3]), ([2**63], [3])):
            with pytest.raises(BadArgument):
                ProofPoly.from_points(x, y)

    @pytest.mark.parametrize(
        ("x", "y"),
        [
            (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
            (torch.zeros(1), torch.zeros(1, dtype=torch.int64)),
            (torch.zeros(1, dtype=torch.int64), torch.zeros(1)),
            (torch.zeros(1, dtype=torch.int64), torch.tensor([float("nan")], dtype=torch.bfloat16)),
        ],
    )
    def test_from_points_tensor_refuses_other_tensors(self, x: Tensor, y: Tensor) -> None:
        with pytest.raises(BadArgument):
            ProofPoly.from_points_tensor(x, y)

    def test_encodings_round_trip(self) -> None:
        poly = ProofPoly([1, 2, 3, P - 1], 65496)
        assert poly.to_bytes().hex() == "ffd8000100020003ffd8"
        assert ProofPoly.from_bytes(poly.to_bytes()) == poly
        assert ProofPoly.from_base64(poly.to_base64()) == poly
        assert poly not in (ProofPoly([1, 2, 3, P - 1], P), ProofPoly([1, 2, 3], 65496))
        assert repr(poly) == "ProofPoly[65496]([1, 2, 3, 65496])"

    def test_what_two_bytes_cannot_hold_is_an_error(self) -> None:
        for poly in (ProofPoly([-1], P), ProofPoly([2**16], P), ProofPoly([0], 2**16)):
            with pytest.raises(MalformedProof):
                poly.to_bytes()

    def test_null_is_the_mark_of_failure_of_the_reference(self) -> None:
        assert ProofPoly.null(5) == ProofPoly([0] * 5, 0)
        assert ProofPoly.null(5).to_bytes() == bytes(12)

    def test_values_survive_pickling(self) -> None:
        for value in (ProofPoly([1, 2], P), VerificationResult(1, 2.5, 3.0)):
            assert pickle.loads(pickle.dumps(value)) == value

    def test_results_print_their_figures(self) -> None:
        shown = repr(VerificationResult(3, 1.25, 1.0))
        assert shown == "VerificationResult[exp_mismatches=3, mant_err_mean=1.25, mant_err_median=1]"


def test_every_error_has_a_code_of_its_own() -> None:
    found, tree = [], [CallerFault.__mro__[1]]
    while tree:
        error = tree.pop()
        found.append(error.code)
        tree += error.__subclasses__()
    assert len(found) == len(set(found)) == 10
