"""Proofs and distances recorded from toploc 0.1.6: whoever speaks its wire format must meet the same here."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import pytest
import torch
from independent.proofs import interpolate
from locations import VECTORS_FOLDER
from torch import Tensor

import toploc
from toploc import ProofPoly, VerificationResult

VECTORS = VECTORS_FOLDER / "toploc_0_1_6.json.gz"
CASES = json.loads(gzip.decompress(VECTORS.read_bytes()))["cases"]


def rows(case: dict[str, Any], field: str) -> Tensor:
    octets = bytearray(base64.b64decode(case[field]))
    return torch.frombuffer(octets, dtype=torch.int16).view(torch.bfloat16).view(-1, case["hidden"])


def as_list(case: dict[str, Any], activations: Tensor) -> list[Tensor]:
    """One tensor per decoded token, after one of the whole prefill."""
    prefill = case["prefill_tokens"]
    return ([] if case["skip_prefill"] else [activations[:prefill]]) + list(activations[prefill:])


def arguments(case: dict[str, Any]) -> tuple[int, int, bool]:
    return case["decode_batching_size"], case["topk"], case["skip_prefill"]


def recorded(case: dict[str, Any]) -> tuple[list[bytes], list[VerificationResult]]:
    proofs = [bytes.fromhex(text) for text in case["proofs_hex"]]
    return proofs, [VerificationResult(**result) for result in case["verify"]]


def verifier_rows(case: dict[str, Any]) -> Tensor:
    own = case["verifier_activations_bf16_le_b64"] is None
    return rows(case, "activations_bf16_le_b64" if own else "verifier_activations_bf16_le_b64")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
class TestReferenceVectors:
    def test_builds_the_recorded_bytes(self, case: dict[str, Any]) -> None:
        proofs, _ = recorded(case)
        activations = as_list(case, rows(case, "activations_bf16_le_b64"))
        assert toploc.build_proofs_bytes(activations, *arguments(case)) == proofs
        assert [base64.b64decode(p) for p in toploc.build_proofs_base64(activations, *arguments(case))] == proofs
        polynomials = toploc.build_proofs(activations, *arguments(case))
        assert [p.modulus for p in polynomials] == case["moduli"]
        assert polynomials == [ProofPoly.from_bytes(proof) for proof in proofs]

    def test_measures_the_recorded_distances(self, case: dict[str, Any]) -> None:
        proofs, expected = recorded(case)
        activations = as_list(case, verifier_rows(case))
        texts = [base64.b64encode(proof).decode() for proof in proofs]
        polynomials = [ProofPoly.from_bytes(proof) for proof in proofs]
        assert toploc.verify_proofs_bytes(activations, proofs, *arguments(case)) == expected
        assert toploc.verify_proofs_base64(activations, texts, *arguments(case)) == expected
        assert toploc.verify_proofs(activations, polynomials, *arguments(case)) == expected

    def test_chunks_of_many_sequences_give_the_recorded_bytes(self, case: dict[str, Any]) -> None:
        proofs, expected = recorded(case)
        size = case["decode_batching_size"]

        def chunked(activations: Tensor) -> list[Tensor]:
            prefill = case["prefill_tokens"]
            return [*([activations[:prefill]] if prefill else []), *torch.split(activations[prefill:], size)]

        chunks = chunked(rows(case, "activations_bf16_le_b64"))
        assert toploc.build_chunk_proofs(chunks, case["topk"]) == proofs
        assert toploc.verify_chunk_proofs(chunked(verifier_rows(case)), proofs, case["topk"]) == expected


@pytest.mark.parametrize("case", [case for case in CASES if case["skip_prefill"]], ids=lambda case: case["name"])
def test_one_tensor_is_the_same_as_a_list_of_its_rows(case: dict[str, Any]) -> None:
    proofs, expected = recorded(case)
    assert toploc.build_proofs_bytes(rows(case, "activations_bf16_le_b64"), *arguments(case)) == proofs
    assert toploc.verify_proofs_bytes(verifier_rows(case), proofs, *arguments(case)) == expected


def test_the_vectors_search_for_a_modulus() -> None:
    """Without such a case, a verifier that ignores the modulus would pass this file."""
    assert any(modulus < 65497 for case in CASES for modulus in case["moduli"])


def magnitudes_at_the_edge(chunk: Tensor, topk: int) -> list[float]:
    """The k-th largest magnitude, and the next one."""
    return chunk.flatten().abs().float().topk(topk + 1).values[-2:].tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_no_recorded_chunk_ties_at_the_kth_place(case: dict[str, Any]) -> None:
    """The peer's bytes are reproduced where nothing ties; a tied recording would ask for one kernel's order."""
    activations, prefill = rows(case, "activations_bf16_le_b64"), case["prefill_tokens"]
    decoded = torch.split(activations[prefill:], case["decode_batching_size"])
    for chunk in [*([activations[:prefill]] if prefill else []), *decoded]:
        kth, following = magnitudes_at_the_edge(chunk, case["topk"])
        assert kth > following


def test_a_peers_proof_of_a_chunk_with_ties_is_close_to_ours() -> None:
    """It commits to other elements of the same magnitude, those that torch.topk took, and has other bytes."""
    draw = torch.Generator().manual_seed(1)
    others = 0
    for _ in range(8):
        chunk, topk = torch.randn(32, 512, generator=draw).bfloat16(), 128
        kth, following = magnitudes_at_the_edge(chunk, topk)
        taken = chunk.flatten().abs().topk(topk).indices.numpy()
        patterns = chunk.flatten().view(torch.int16).numpy().view("<u2")[taken]
        words = (65497, *interpolate(taken, patterns).tolist())
        peers = b"".join(word.to_bytes(2, "big") for word in words)
        (ours,) = toploc.build_proofs_bytes(chunk, 32, topk, skip_prefill=True)
        (result,) = toploc.verify_proofs_bytes(chunk, [peers], 32, topk, skip_prefill=True)
        assert kth == following or ours == peers
        assert result.exp_mismatches <= 5
        others += ours != peers
    assert others, "some of these chunks must tie"
