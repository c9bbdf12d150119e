"""The activation proofs of a run: one of `toploc`'s schemes, or two in one (docs/protocol.md, section 6.2).

A proof covers a chunk of hidden states [tokens, hidden], bfloat16. With two schemes it is TOPLOC's bytes, then the
sketch's. Whoever builds proofs and whoever verifies them ask here, so that neither knows which scheme a run has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from node.protocol.reasons import Reason, Refusal
from node.protocol.run import ProofSpec
from node.protocol.submission import Rollout, chunk_sizes, proof_bytes, toploc_bytes
from node.protocol.turns import Replies, pieces
from toploc import (
    VerificationResult,
    build_chunk_proofs,
    build_chunk_sketches,
    check_form,
    check_sketch_form,
    sketch_errors,
    verify_chunk_proofs,
)
from toploc.errors import BadProof, MalformedProof, WrongProofCount


@dataclass(frozen=True, slots=True)
class Distances:
    """How far a chunk is from its proof: TOPLOC's numbers, and the sketch's eight errors of each token, in steps;
    None and empty where the run's scheme does not have them.
    """

    toploc: VerificationResult | None
    sketch: Sequence[Sequence[float]]


def build_proofs(chunks: Sequence[Tensor], seeds: Sequence[bytes], *, spec: ProofSpec) -> list[bytes]:
    """Build one proof for each chunk [tokens, hidden]; `seeds` are those of each chunk's completion.

    Raises toploc's CallerFault for states that cannot be proved.
    """
    proofs = [b""] * len(chunks)
    if spec.has_toploc:
        proofs = build_chunk_proofs(chunks, spec.top_k)
    if spec.has_sketch:
        sketches = build_chunk_sketches(chunks, seeds, step=spec.sketch_step)
        proofs = [proof + sketch for proof, sketch in zip(proofs, sketches, strict=True)]
    return proofs


def check_proofs(proofs: Sequence[bytes], tokens: Sequence[int], *, hidden: int, spec: ProofSpec) -> None:
    """Raise a BadProof if no honest prover of chunks of so many tokens sends these; needs no activations."""
    toploc, sketches = _parts(proofs, tokens, spec=spec)
    if spec.has_toploc:
        check_form(toploc, [count * hidden for count in tokens], spec.top_k)
    if spec.has_sketch:
        check_sketch_form(sketches, tokens)


def check_proof_form(rollouts: Sequence[Rollout], replies: Sequence[Replies], *, hidden: int, spec: ProofSpec) -> None:
    """Raise malformed_proof for a proof that no honest prover makes of a chunk of its size (section 6.2).

    The prefill would find it too, but not cheaply, and only in the rows that it measures. `replies` are what
    `check_rollouts` found of each, which has counted each row's proofs.
    """
    sizes = [
        size
        for rollout, inserted in zip(rollouts, replies, strict=True)
        for size in chunk_sizes(pieces(rollout.segment_tokens, inserted), chunk_tokens=spec.chunk_tokens)
    ]
    places = [(row, index) for row, rollout in enumerate(rollouts) for index in range(len(rollout.proofs))]
    try:
        # All rows at once: a call takes longer than what it does for a few proofs.
        check_proofs([proof for rollout in rollouts for proof in rollout.proofs], sizes, hidden=hidden, spec=spec)
    except BadProof as error:
        row, index = places[error.index or 0]
        raise Refusal(Reason.MALFORMED_PROOF, f"Row {row}, proof {index}: {error.code}.") from error


def verify_proofs(
    chunks: Sequence[Tensor], seeds: Sequence[bytes], proofs: Sequence[bytes], *, spec: ProofSpec
) -> list[Distances]:
    """Return the distance of each chunk from its proof.

    Raises a BadProof, whose `index` tells the proof, for what no honest prover sends, and a CallerFault for
    states that cannot be measured.
    """
    toploc, sketches = _parts(proofs, [len(chunk) for chunk in chunks], spec=spec)
    results: list[VerificationResult | None] = [None] * len(chunks)
    if spec.has_toploc:
        results = list(verify_chunk_proofs(chunks, toploc, spec.top_k))
    errors: list[list[list[float]]] = [[] for _ in chunks]
    if spec.has_sketch:
        errors = [own.tolist() for own in sketch_errors(chunks, seeds, sketches, step=spec.sketch_step)]
    return [Distances(result, own) for result, own in zip(results, errors, strict=True)]


def _parts(proofs: Sequence[bytes], tokens: Sequence[int], *, spec: ProofSpec) -> tuple[list[bytes], list[bytes]]:
    """Split each proof into its TOPLOC and its sketch part; raises BadProof for wrong sizes."""
    if len(proofs) != len(tokens):
        raise WrongProofCount(f"{len(tokens)} chunks need as many proofs, not {len(proofs)}")
    for index, (proof, count) in enumerate(zip(proofs, tokens, strict=True)):
        if len(proof) != proof_bytes(spec, tokens=count):
            raise MalformedProof(f"{len(proof)} bytes for {count} tokens", index=index)
    cut = toploc_bytes(spec)
    return [proof[:cut] for proof in proofs], [proof[cut:] for proof in proofs]
