"""TOPLOC proofs of inference: activations in, 258 bytes per 32 tokens out, and how far a proof is from them."""

from toploc.poly import (
    ProofPoly,
    VerificationResult,
    build_chunk_proofs,
    build_proofs,
    build_proofs_base64,
    build_proofs_bytes,
    verify_chunk_proofs,
    verify_proofs,
    verify_proofs_base64,
    verify_proofs_bytes,
)

__all__ = [
    "ProofPoly",
    "VerificationResult",
    "build_chunk_proofs",
    "build_proofs",
    "build_proofs_base64",
    "build_proofs_bytes",
    "verify_chunk_proofs",
    "verify_proofs",
    "verify_proofs_base64",
    "verify_proofs_bytes",
]
