"""The proofs of a run under each scheme: what a prover sends, and what is refused before anything is measured."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from node.protocol.run import ProofSpec
from node.protocol.submission import proof_bytes
from node.verification.proofs import Distances, build_proofs, check_proofs, verify_proofs
from toploc import VerificationResult, build_chunk_proofs, build_chunk_sketches, distances, sketch_errors
from toploc.errors import BadModulus, BadProof, CallerFault, MalformedProof, NonFiniteActivations, WrongProofCount

HIDDEN = 64
TOPLOC = ProofSpec(scheme="toploc/1", chunk_tokens=4, top_k=8)
SKETCH = ProofSpec(scheme="sketch/1", chunk_tokens=4, sketch_step=0.01)
BOTH = ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=4, top_k=8, sketch_step=0.01)
SCHEMES = pytest.mark.parametrize("spec", [TOPLOC, SKETCH, BOTH], ids=lambda spec: spec.scheme)
SKETCHED = pytest.mark.parametrize("spec", [SKETCH, BOTH], ids=lambda spec: spec.scheme)

TOKENS = [4, 4, 1, 3]
CHUNKS = [
    torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n + i)).bfloat16() for i, n in enumerate(TOKENS)
]
SEEDS = [bytes([1]) * 16, bytes([1]) * 16, bytes([1]) * 16, bytes([2]) * 16]
EXACT = VerificationResult(0, 0.0, 0.0)


def proofs_of(spec: ProofSpec) -> list[bytes]:
    return build_proofs(CHUNKS, SEEDS, spec=spec)


def check(proofs: list[bytes], spec: ProofSpec) -> None:
    check_proofs(proofs, TOKENS, hidden=HIDDEN, spec=spec)


def far(found: Distances) -> list[float]:
    """Of each token, in steps."""
    return distances(torch.tensor(found.sketch)).tolist()


def near(chunk: Tensor) -> Tensor:
    """Almost the same states: one step of the grid away in each projection, or so."""
    noise = torch.randn(chunk.shape, generator=torch.Generator().manual_seed(len(chunk)))
    return (chunk.float() + 0.01 * noise).bfloat16()


def test_a_proof_is_that_of_its_scheme_and_of_both_schemes_one_after_the_other() -> None:
    toploc = build_chunk_proofs(CHUNKS, 8)
    sketches = build_chunk_sketches(CHUNKS, SEEDS, step=0.01)
    assert proofs_of(TOPLOC) == toploc
    assert proofs_of(SKETCH) == sketches
    assert proofs_of(BOTH) == [a + b for a, b in zip(toploc, sketches, strict=True)]


@SCHEMES
def test_honest_proofs_have_the_size_of_the_page_and_no_distance(spec: ProofSpec) -> None:
    proofs = proofs_of(spec)
    assert [len(proof) for proof in proofs] == [proof_bytes(spec, tokens=tokens) for tokens in TOKENS]
    check(proofs, spec)
    for tokens, found in zip(TOKENS, verify_proofs(CHUNKS, SEEDS, proofs, spec=spec), strict=True):
        assert found.toploc == (EXACT if spec.has_toploc else None)
        assert len(found.sketch) == (tokens if spec.has_sketch else 0)
        assert all(abs(error) <= 0.5 for errors in found.sketch for error in errors)


@SCHEMES
def test_what_shares_a_call_does_not_count(spec: ProofSpec) -> None:
    """A worker proves many completions at once and a verifier others: neither may depend on its neighbours."""
    alone = [build_proofs([chunk], [seed], spec=spec)[0] for chunk, seed in zip(CHUNKS, SEEDS, strict=True)]
    assert alone == proofs_of(spec)
    together = verify_proofs([near(chunk) for chunk in CHUNKS], SEEDS, alone, spec=spec)
    for index, found in enumerate(together):
        (one,) = verify_proofs([near(CHUNKS[index])], [SEEDS[index]], [alone[index]], spec=spec)
        assert found.toploc == one.toploc
        for together_errors, errors in zip(found.sketch, one.sketch, strict=True):
            assert together_errors == pytest.approx(errors, abs=1e-5)


def test_both_schemes_measure_what_each_measures_alone() -> None:
    """A verifier that mixed up the parts would measure noise, and call honest workers cheats."""
    states = [near(chunk) for chunk in CHUNKS]
    both = verify_proofs(states, SEEDS, proofs_of(BOTH), spec=BOTH)
    toploc = verify_proofs(states, SEEDS, proofs_of(TOPLOC), spec=TOPLOC)
    sketch = verify_proofs(states, SEEDS, proofs_of(SKETCH), spec=SKETCH)
    assert both == [Distances(a.toploc, b.sketch) for a, b in zip(toploc, sketch, strict=True)]
    errors = sketch_errors(states, SEEDS, proofs_of(SKETCH), step=0.01)
    assert [found.sketch for found in both] == [error.tolist() for error in errors]
    assert any(found.toploc != EXACT for found in both)
    assert max(abs(error) for found in both for errors in found.sketch for error in errors) > 0.5


@SKETCHED
def test_another_completions_seed_makes_a_sketch_of_nothing(spec: ProofSpec) -> None:
    """What is replayed from another sample has that sample's projections."""
    found = verify_proofs(CHUNKS, SEEDS[::-1], proofs_of(spec), spec=spec)
    assert min(max(far(found[0])), max(far(found[3]))) > 3.0
    assert max(far(found[1])) <= 0.5


def test_the_step_of_the_run_is_the_unit() -> None:
    coarse = msgspec.structs.replace(SKETCH, sketch_step=0.02)
    states = [near(chunk) for chunk in CHUNKS]
    fine_sum, coarse_sum = (
        sum(sum(far(found)) for found in verify_proofs(states, SEEDS, proofs_of(spec), spec=spec))
        for spec in (SKETCH, coarse)
    )
    assert 1.2 * coarse_sum < fine_sum < 2 * coarse_sum


# What no honest prover sends, each with the place where it is.

Damage = Callable[[bytes], bytes]
CUT = 2 + 2 * 8
DAMAGES: dict[str, tuple[ProofSpec, Damage, type[BadProof]]] = {
    "toploc: nothing": (TOPLOC, lambda _: b"", MalformedProof),
    "toploc: a byte short": (TOPLOC, lambda proof: proof[:-1], MalformedProof),
    "toploc: a byte long": (TOPLOC, lambda proof: proof + b"\0", MalformedProof),
    "toploc: with a sketch that the run has not": (TOPLOC, lambda proof: proof + bytes(16), MalformedProof),
    "toploc: no modulus": (TOPLOC, lambda proof: bytes(2) + proof[2:], BadModulus),
    "toploc: a modulus beyond the field": (TOPLOC, lambda proof: b"\xff\xff" + proof[2:], BadModulus),
    "toploc: a modulus below the field": (TOPLOC, lambda proof: b"\xff\xd8" + proof[2:], BadModulus),
    "toploc: a coefficient beyond the field": (TOPLOC, lambda proof: proof[:-2] + b"\xff\xff", MalformedProof),
    "sketch: nothing": (SKETCH, lambda _: b"", MalformedProof),
    "sketch: a byte short": (SKETCH, lambda proof: proof[:-1], MalformedProof),
    "sketch: a token short": (SKETCH, lambda proof: proof[:-4], MalformedProof),
    "sketch: a token long": (SKETCH, lambda proof: proof + bytes(4), MalformedProof),
    "sketch: of a full chunk": (SKETCH, lambda proof: (proof * 4)[:16], MalformedProof),
    "both: only toploc": (BOTH, lambda proof: proof[:CUT], MalformedProof),
    "both: only the sketch": (BOTH, lambda proof: proof[CUT:], MalformedProof),
    "both: a token short": (BOTH, lambda proof: proof[:-4], MalformedProof),
    "both: a token long": (BOTH, lambda proof: proof + bytes(4), MalformedProof),
    "both: the sketch first": (BOTH, lambda _: bytes(4) + b"\1" * CUT, BadModulus),
    "both: no modulus": (BOTH, lambda proof: bytes(2) + proof[2:], BadModulus),
    "both: a coefficient beyond the field": (
        BOTH,
        lambda proof: proof[: CUT - 2] + b"\xff\xff" + proof[CUT:],
        MalformedProof,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_no_prover_makes_is_refused_with_its_place(damage: str) -> None:
    """Before any activations are there, and likewise when there are: the third chunk's proof, of one token."""
    spec, change, error = DAMAGES[damage]
    proofs = proofs_of(spec)
    proofs[2] = change(proofs[2])
    calls: list[Callable[[], object]] = [
        lambda: check(proofs, spec),
        lambda: verify_proofs(CHUNKS, SEEDS, proofs, spec=spec),
    ]
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        assert (type(caught.value), caught.value.index) == (error, 2)


@SCHEMES
@pytest.mark.parametrize("count", [0, 3, 5])
def test_fewer_or_more_proofs_than_chunks_are_refused(count: int, spec: ProofSpec) -> None:
    """Fewer proofs must never mean fewer checks."""
    proofs = (proofs_of(spec) * 2)[:count]
    with pytest.raises(WrongProofCount):
        check(proofs, spec)
    with pytest.raises(WrongProofCount):
        verify_proofs(CHUNKS, SEEDS, proofs, spec=spec)


@SCHEMES
def test_no_chunks_need_no_proofs(spec: ProofSpec) -> None:
    assert build_proofs([], [], spec=spec) == []
    check_proofs([], [], hidden=HIDDEN, spec=spec)


@SCHEMES
def test_states_that_cannot_be_proved_are_the_callers_fault(spec: ProofSpec) -> None:
    broken = CHUNKS[1].clone()
    broken[2, 3] = float("nan")
    with pytest.raises(NonFiniteActivations) as caught:
        build_proofs([CHUNKS[0], broken], SEEDS[:2], spec=spec)
    assert caught.value.index == 1
    with pytest.raises(NonFiniteActivations):
        verify_proofs([CHUNKS[0], broken], SEEDS[:2], proofs_of(spec)[:2], spec=spec)


def test_an_honest_proof_passes_where_two_indices_are_one_modulo_the_largest_modulus() -> None:
    """In chunks of 32 tokens of a real model some are: refusing the smaller modulus would reject honest workers."""
    states = torch.full((32, 4096), 0.5).bfloat16()
    states.view(-1)[[5, 5 + 65497]] = 2.0
    (proof,) = build_proofs([states], SEEDS[:1], spec=TOPLOC)
    assert int.from_bytes(proof[:2], "big") < 65497
    check_proofs([proof], [32], hidden=4096, spec=TOPLOC)
    with pytest.raises(BadModulus):
        check_proofs([proof], [15], hidden=4096, spec=TOPLOC)


@pytest.mark.parametrize(
    ("spec", "least"),
    [(TOPLOC, 8), (SKETCH, 8), (BOTH, 8), (msgspec.structs.replace(BOTH, top_k=4), 8), (ProofSpec(), 128)],
)
def test_the_smallest_hidden_size_is_that_of_which_proofs_can_be_made(spec: ProofSpec, least: int) -> None:
    """A trainer refuses a narrower model at once, instead of having every worker fail on it."""
    assert spec.min_hidden == least
    states = torch.randn(1, least, generator=torch.Generator().manual_seed(1)).bfloat16()
    (proof,) = build_proofs([states], SEEDS[:1], spec=spec)
    check_proofs([proof], [1], hidden=least, spec=spec)
    with pytest.raises(CallerFault):
        build_proofs([states[:, 1:]], SEEDS[:1], spec=spec)
