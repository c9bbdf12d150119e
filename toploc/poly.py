"""Build TOPLOC proofs of activations, and measure how far activations are from a proof.

TOPLOC (arXiv 2501.16007) commits to the k largest magnitudes of a chunk of final hidden states: a polynomial over
GF(65497) passes through (index mod modulus, bf16 bit pattern) of each. Names, signatures and wire format are those of
toploc 0.1.6, and so are the bytes wherever the k-th largest magnitude differs from the next one. Where several are
equal, this package commits to the lower indices; that one to those that `torch.topk` takes, which torch does not
specify, so there are no bytes of its own to reproduce (`benchmarks.toploc` counts such chunks). Where that package
turns an error into a null proof, pairs proofs and chunks loosely, or ignores the modulus, this one raises (see
`toploc.errors`):

- there is exactly one proof per chunk, the last shorter chunk included, and at least one;
- a proof has exactly k coefficients, and a modulus that an honest prover could have chosen;
- activations are finite bfloat16, at least k to a chunk. An engine that computes in float32 casts its hidden
  states to bfloat16 itself, and so does whoever verifies it: rounding is part of what is proved.

Not guaranteed: a result is three distances, not a verdict; the caller sets the limits. The sign bit does not count. How
tokens were sampled leaves no trace in a proof.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toploc import field, wire
from toploc.chunks import Chunk, checked_sizes, require_topk, split, top_points
from toploc.errors import BadActivations, BadArgument, BadModulus, MalformedProof, WrongProofCount

# Mantissa errors of a result without a matching exponent.
NO_MATCH = float(2**64)

_MANTISSA_BITS = 7
_MANTISSA = 2**_MANTISSA_BITS - 1
_EXPONENT = 0xFF


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """Distances of a chunk's k largest elements from its proof.

    `exp_mismatches`: elements whose exponent differs, 0 .. k. `mant_err_mean`, `mant_err_median`: over the other
    elements, the difference of the 7-bit mantissas, 0 .. 127; the median of an even number is the mean of the middle
    two. Both are 2**64 where no exponent matches.
    """

    exp_mismatches: int
    mant_err_mean: float
    mant_err_median: float

    def __repr__(self) -> str:
        return (
            f"VerificationResult[exp_mismatches={self.exp_mismatches}, "
            f"mant_err_mean={self.mant_err_mean:g}, mant_err_median={self.mant_err_median:g}]"
        )


@dataclass(frozen=True, slots=True)
class ProofPoly:
    """A proof as a polynomial: ascending coefficients over GF(65497), and the modulus of its indices."""

    coeffs: list[int]
    modulus: int

    def __call__(self, x: int) -> int:
        """Evaluate at `x`. As in toploc 0.1.6 the modulus is not applied: pass `index % modulus`."""
        value = 0
        for coefficient in reversed(self.coeffs):
            value = (value * x + coefficient) % field.PRIME
        return value

    def __len__(self) -> int:
        return len(self.coeffs)

    def __repr__(self) -> str:
        return f"ProofPoly[{self.modulus}]({self.coeffs})"

    @staticmethod
    def from_points(x: list[int], y: list[int]) -> ProofPoly:
        """Interpolate (x mod modulus, y mod 65497) under the largest modulus that keeps `x` distinct.

        `x`: distinct, 0 .. 2**63 - 1. Raises `BadArgument` otherwise, or if there is no such modulus.
        """
        if len(x) != len(y) or not 1 <= len(x) <= field.MAX_TOPK:
            raise BadArgument(f"x and y must have the same length in 1 .. {field.MAX_TOPK}")
        indices = torch.tensor([_checked_points(x)])
        moduli = field.separating_moduli(indices)
        values = torch.tensor([[value % field.PRIME for value in y]], dtype=torch.float64)
        coefficients = field.interpolate((indices % moduli).double(), values)
        return ProofPoly(coefficients[0].long().tolist(), int(moduli[0]))

    @staticmethod
    def from_points_tensor(x: Tensor, y: Tensor) -> ProofPoly:
        """Interpolate like `from_points`; `x` [k] int32 or int64, `y` [k] integral, or bfloat16 or float16 for its
        bits.
        """
        if x.ndim != 1 or y.ndim != 1 or x.dtype not in (torch.int32, torch.int64):
            raise BadArgument("x and y must have one dimension, and x must be int32 or int64")
        if y.dtype in (torch.bfloat16, torch.float16):
            if not bool(y.isfinite().all()):
                raise BadArgument("y must be finite")
            y = y.detach().contiguous().view(torch.int16).long() & 0xFFFF
        elif y.dtype not in (torch.int32, torch.uint32, torch.int64):
            raise BadArgument("y must be bfloat16, float16, int32, uint32 or int64")
        return ProofPoly.from_points(x.tolist(), y.tolist())

    @staticmethod
    def null(length: int) -> ProofPoly:
        """Return toploc 0.1.6's failure mark: all zeros, modulus 0. Nothing here returns or accepts it."""
        return ProofPoly([0] * length, 0)

    def to_bytes(self) -> bytes:
        try:
            return struct.pack(f">{1 + len(self.coeffs)}H", self.modulus, *self.coeffs)
        except struct.error as error:
            raise MalformedProof("modulus and coefficients must be below 2**16") from error

    @staticmethod
    def from_bytes(data: bytes) -> ProofPoly:
        """Decode an untrusted proof; raises `MalformedProof` or `BadModulus`."""
        modulus, coefficients = wire.decode_one(data)
        return ProofPoly(coefficients, modulus)

    def to_base64(self) -> str:
        return base64.b64encode(self.to_bytes()).decode("ascii")

    @staticmethod
    def from_base64(base64_str: str) -> ProofPoly:
        """Decode like `from_bytes`, from canonical base64."""
        return ProofPoly.from_bytes(wire.from_base64(base64_str, max_bytes=wire.proof_size(field.MAX_TOPK)))


def _checked_points(x: list[int]) -> list[int]:
    if len(set(x)) != len(x) or not all(0 <= value < 2**63 for value in x):
        raise BadArgument("points must be distinct integers in 0 .. 2**63 - 1")
    return x


def find_injective_modulus(x: list[int]) -> int:
    """Find the largest modulus up to 65497 that keeps the integers `x` distinct; raises `BadArgument` if there
    is none.
    """
    return int(field.separating_moduli(torch.tensor([_checked_points(x)], dtype=torch.int64))[0])


def build_proofs(
    activations: Sequence[Tensor] | Tensor, decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[ProofPoly]:
    """Build like `build_proofs_bytes`, as polynomials."""
    proofs = build_proofs_bytes(activations, decode_batching_size, topk, skip_prefill)
    return [ProofPoly.from_bytes(proof) for proof in proofs]


def build_proofs_bytes(
    activations: Sequence[Tensor] | Tensor, decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[bytes]:
    """Build one proof of 2 + 2 * topk bytes per chunk of one sequence; none for an empty sequence.

    `activations`: bfloat16, on one device: one tensor [hidden] per decoded token, preceded by one of the whole prefill
    [tokens, hidden] unless `skip_prefill`; or one tensor whose rows stand for these. The prefill is a chunk, and so is
    each `decode_batching_size` tokens; the last may be shorter. Raises a `CallerFault`.
    """
    return _build(split(activations, decode_batching_size, skip_prefill=skip_prefill), topk)


def build_proofs_base64(
    activations: Sequence[Tensor] | Tensor, decode_batching_size: int, topk: int, skip_prefill: bool = False
) -> list[str]:
    """Build like `build_proofs_bytes`, in base64."""
    proofs = build_proofs_bytes(activations, decode_batching_size, topk, skip_prefill)
    return [base64.b64encode(proof).decode("ascii") for proof in proofs]


def build_chunk_proofs(chunks: Sequence[Tensor], topk: int) -> list[bytes]:
    """Build one proof per chunk [tokens, hidden], bfloat16, of any number of sequences.

    Gives the bytes of `build_proofs_bytes`, in a few large operations. Raises a `CallerFault`.
    """
    return _build([[chunk] for chunk in chunks], topk)


def verify_proofs(
    activations: Sequence[Tensor] | Tensor,
    proofs: Sequence[ProofPoly],
    decode_batching_size: int,
    topk: int,
    skip_prefill: bool = False,
) -> list[VerificationResult]:
    """Measure like `verify_proofs_bytes`, from polynomials."""
    encoded = [proof.to_bytes() for proof in proofs]
    return verify_proofs_bytes(activations, encoded, decode_batching_size, topk, skip_prefill)


def verify_proofs_bytes(
    activations: Sequence[Tensor] | Tensor,
    proofs: Sequence[bytes],
    decode_batching_size: int,
    topk: int,
    skip_prefill: bool = False,
) -> list[VerificationResult]:
    """Measure the distance of each chunk of one sequence from its untrusted proof.

    `activations` as for `build_proofs_bytes`, recomputed by the verifier. The proofs' form is checked first. Raises a
    `BadProof` if no honest prover of chunks of these sizes sends them, and a `CallerFault` if the activations cannot be
    measured.
    """
    return _verify(split(activations, decode_batching_size, skip_prefill=skip_prefill), proofs, topk)


def verify_proofs_base64(
    activations: Sequence[Tensor] | Tensor,
    proofs: Sequence[str],
    decode_batching_size: int,
    topk: int,
    skip_prefill: bool = False,
) -> list[VerificationResult]:
    """Measure like `verify_proofs_bytes`, from base64."""
    chunks = split(activations, decode_batching_size, skip_prefill=skip_prefill)
    _paired_sizes(chunks, proofs, topk)
    size = wire.proof_size(topk)
    decoded = [wire.from_base64(text, max_bytes=size, index=index) for index, text in enumerate(proofs)]
    return _verify(chunks, decoded, topk)


def verify_chunk_proofs(chunks: Sequence[Tensor], proofs: Sequence[bytes], topk: int) -> list[VerificationResult]:
    """Measure the distance of each chunk [tokens, hidden], bfloat16, of any number of sequences, from its proof.

    Errors as `verify_proofs_bytes`; their `index` is that of the chunk at fault.
    """
    return _verify([[chunk] for chunk in chunks], proofs, topk)


def check_form(proofs: Sequence[bytes], sizes: Sequence[int], topk: int) -> None:
    """Raise a `BadProof` if no honest prover makes these proofs of chunks of `sizes` elements.

    For a verifier without activations: the checks that `verify_chunk_proofs` makes first. What passes may still be a
    proof of anything. Raises `BadArgument` for a `topk` out of range.
    """
    require_topk(topk)
    _require_pairs(len(sizes), proofs)
    if proofs:
        _decode_honest(proofs, sizes, topk)


@torch.inference_mode()
def _build(chunks: Sequence[Chunk], topk: int) -> list[bytes]:
    sizes = checked_sizes(chunks, topk)
    if not chunks:
        return []
    # A few thousand numbers a chunk from here on, for which a device would be given a hundred little things to do.
    index, bits = (points.cpu() for points in top_points(chunks, sizes, topk))
    moduli = field.separating_moduli(index)
    coefficients = field.interpolate((index % moduli.unsqueeze(1)).double(), bits.double())
    return wire.encode(moduli, coefficients)


@torch.inference_mode()
def _verify(chunks: Sequence[Chunk], proofs: Sequence[bytes], topk: int) -> list[VerificationResult]:
    sizes = _paired_sizes(chunks, proofs, topk)
    moduli, coefficients = _decode_honest(proofs, sizes, topk)
    index, bits = top_points(chunks, sizes, topk)
    x = (index % moduli.to(index.device).unsqueeze(1)).double()
    return _distances(field.evaluate(coefficients.to(index.device), x).long(), bits)


def _paired_sizes(chunks: Sequence[Chunk], proofs: Sequence[object], topk: int) -> list[int]:
    """Return the chunks' sizes; raises unless there is at least one chunk and exactly one proof for each."""
    sizes = checked_sizes(chunks, topk)
    if not chunks:
        raise BadActivations("no chunks to verify")
    _require_pairs(len(chunks), proofs)
    return sizes


def _require_pairs(chunks: int, proofs: Sequence[object]) -> None:
    if len(proofs) != chunks:
        raise WrongProofCount(f"{chunks} chunks need as many proofs, not {len(proofs)}")


def _decode_honest(proofs: Sequence[bytes], sizes: Sequence[int], topk: int) -> tuple[Tensor, Tensor]:
    """Decode like `wire.decode`; raises `BadModulus` where an honest prover could not have chosen the modulus.

    An honest modulus is the largest that separates: 65497 itself where every index is below it.
    """
    moduli, coefficients = wire.decode(proofs, topk)
    for index, (modulus, size) in enumerate(zip(moduli.tolist(), sizes, strict=True)):
        min_modulus = field.PRIME if size <= field.PRIME else field.MIN_MODULUS
        if modulus < min_modulus:
            raise BadModulus(f"no honest proof of {size} elements has modulus {modulus}", index=index)
    return moduli, coefficients


def _distances(proved: Tensor, measured: Tensor) -> list[VerificationResult]:
    """Compare bf16 bit patterns [n, k], int64, with those that the proofs give at the same positions."""
    k = measured.shape[1]
    same_exponent = ((proved ^ measured) >> _MANTISSA_BITS) & _EXPONENT == 0
    error = ((proved & _MANTISSA) - (measured & _MANTISSA)).abs()
    count, total = same_exponent.sum(1), (error * same_exponent).sum(1)
    ordered = error.masked_fill(~same_exponent, _MANTISSA + 1).sort(1).values
    middle = ordered.gather(1, torch.stack([(count - 1).clamp(min=0) // 2, count // 2], dim=1))
    rows = torch.cat([count.unsqueeze(1), total.unsqueeze(1), middle], dim=1).tolist()
    return [
        VerificationResult(k - c, t / c, (low + high) / 2) if c else VerificationResult(k, NO_MATCH, NO_MATCH)
        for c, t, low, high in rows
    ]
