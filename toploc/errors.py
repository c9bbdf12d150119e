"""TOPLOC errors, classed by whose fault they are.

ToplocError
├── BadProof                     the prover sent something no honest prover sends
│   ├── MalformedProof           wrong length, bad base64, a coefficient outside the field
│   ├── BadModulus               0, above 65497, or one that no honest prover would have chosen
│   └── WrongProofCount          not exactly one proof per chunk
└── CallerFault                  the caller's fault; says nothing about the prover
    ├── BadActivations           wrong type, dtype or shape, or none at all
    │   ├── NonFiniteActivations NaN or infinity among the largest magnitudes
    │   └── ChunkTooSmall        a chunk with fewer elements than k
    └── BadArgument              k, batch size or points out of range

On `BadProof` a verifier refuses the proof; on `CallerFault` it has no verdict. Every error carries `code`, a stable
identifier for machines, a sentence for people, and `index`, the position of the proof or chunk at fault if known.
"""

from __future__ import annotations


class ToplocError(Exception):
    """Base of the tree; `code` is stable across releases."""

    code = "toploc_error"

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class BadProof(ToplocError):
    code = "bad_proof"


class MalformedProof(BadProof):
    code = "malformed_proof"


class BadModulus(BadProof):
    code = "bad_modulus"


class WrongProofCount(BadProof):
    code = "wrong_proof_count"


class CallerFault(ToplocError):
    code = "caller_fault"


class BadActivations(CallerFault):
    code = "bad_activations"


class NonFiniteActivations(BadActivations):
    code = "non_finite_activations"


class ChunkTooSmall(BadActivations):
    code = "chunk_too_small"


class BadArgument(CallerFault):
    code = "bad_argument"
