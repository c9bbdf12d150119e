"""Proofs of inference: commit to activations in a few bytes per token, and measure distances from a proof.

TOPLOC proofs (`toploc.poly`) take 258 bytes per chunk of tokens, sketches (`toploc.sketch`) 4 bytes per token.
"""

from toploc.poly import (
    ProofPoly,
    VerificationResult,
    build_chunk_proofs,
    build_proofs,
    build_proofs_base64,
    build_proofs_bytes,
    check_form,
    verify_chunk_proofs,
    verify_proofs,
    verify_proofs_base64,
    verify_proofs_bytes,
)
from toploc.sketch import Gain, build_chunk_sketches, check_sketch_form, distances, gain, shifts, sketch_errors

__all__ = [
    "Gain",
    "ProofPoly",
    "VerificationResult",
    "build_chunk_proofs",
    "build_chunk_sketches",
    "build_proofs",
    "build_proofs_base64",
    "build_proofs_bytes",
    "check_form",
    "check_sketch_form",
    "distances",
    "gain",
    "shifts",
    "sketch_errors",
    "verify_chunk_proofs",
    "verify_proofs",
    "verify_proofs_base64",
    "verify_proofs_bytes",
]
