"""Activation proofs: TOPLOC's polynomial and the sketch (section 6.2), and how far states are from them (7.1)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .values import Refused

FIELD = 65497
PLACES = 16


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bfloat16 bit patterns of float32 values, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(patterns: np.ndarray) -> np.ndarray:
    """Return the values of bfloat16 bit patterns as float64."""
    return (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def largest(flat: np.ndarray, k: int) -> np.ndarray:
    """Return the indexes of the `k` elements of the largest magnitude, of equal ones the lower index first."""
    magnitude = (flat & 0x7FFF).astype(np.int64)
    return np.argsort(-magnitude, kind="stable")[:k]


@functools.cache
def inverses() -> np.ndarray:
    """Return the inverse of each element of the field (0 for 0)."""
    return np.array([0, *(pow(number, -1, FIELD) for number in range(1, FIELD))], dtype=np.int64)


def interpolate(points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the coefficients, ascending, of the polynomial over the field through (points, values)."""
    points, coefficients = points.astype(np.int64), values.astype(np.int64) % FIELD
    count = len(points)
    inverse = inverses()
    for step in range(1, count):  # Newton's divided differences
        gaps = (points[step:] - points[:-step]) % FIELD
        coefficients[step:] = (coefficients[step:] - coefficients[step - 1 : -1]) * inverse[gaps] % FIELD
    result = np.zeros(count, dtype=np.int64)
    for step in range(count - 1, -1, -1):  # Horner's rule on Newton's form
        result[1:], result[0] = (result[:-1] - points[step] * result[1:]) % FIELD, -points[step] * result[0] % FIELD
        result[0] = (result[0] + coefficients[step]) % FIELD
    return result


def prove_toploc(chunk: np.ndarray, k: int) -> bytes:
    """Return the TOPLOC proof of a chunk of bfloat16 patterns [tokens, hidden]."""
    flat = chunk.reshape(-1)
    chosen = largest(flat, k)
    modulus = FIELD
    while modulus and len(np.unique(chosen % modulus)) < k:
        modulus -= 1
    coefficients = interpolate(chosen % modulus, flat[chosen])
    return b"".join(int(number).to_bytes(2, "big") for number in (modulus, *coefficients))


def decode_toploc(proof: bytes, elements: int) -> tuple[int, list[int]]:
    """Return modulus and coefficients of a proof of a chunk of so many elements, or refuse it (6.2)."""
    modulus, *coefficients = (int.from_bytes(proof[at : at + 2], "big") for at in range(0, len(proof), 2))
    if not 1 <= modulus <= FIELD or (modulus < FIELD and elements <= FIELD):
        raise Refused("malformed_proof", f"modulus {modulus}")
    if any(number >= FIELD for number in coefficients):
        raise Refused("malformed_proof", "a coefficient is not in the field")
    return modulus, coefficients


@dataclass(frozen=True)
class ToplocDistance:
    """What a chunk's own largest elements are against its proof (7.1)."""

    exponent_mismatches: int
    mantissa_mean: float
    mantissa_median: float


def toploc_distance(chunk: np.ndarray, proof: bytes) -> ToplocDistance:
    """Compare a verifier's own chunk with a proof of it."""
    flat = chunk.reshape(-1)
    modulus, coefficients = decode_toploc(proof, flat.size)
    own = largest(flat, len(coefficients))
    claimed = np.zeros(len(own), dtype=np.int64)
    for number in reversed(coefficients):
        claimed = (claimed * (own % modulus) + number) % FIELD
    exponents = lambda patterns: (patterns >> 7) & 0xFF  # noqa: E731
    agree = exponents(claimed) == exponents(flat[own].astype(np.int64))
    gaps = np.abs((claimed & 0x7F) - (flat[own].astype(np.int64) & 0x7F))[agree]
    if not gaps.size:
        return ToplocDistance(len(own), 2.0**64, 2.0**64)
    return ToplocDistance(int((~agree).sum()), float(gaps.mean()), float(np.median(gaps)))


class Sketcher:
    """The eight projections and dithers of one completion."""

    def __init__(self, seed: bytes, hidden: int, step: float) -> None:
        stream = hashlib.shake_128(b"swarmproof/1 sketch" + seed).digest(32 + hidden)
        words = [int.from_bytes(stream[at : at + 4], "little") for at in range(0, 32, 4)]
        self.step = step
        self.dithers = np.array([(word >> 8) / 2**24 for word in words])
        bits = np.frombuffer(stream[32:], dtype=np.uint8)
        self.signs = np.stack([1.0 - 2.0 * (bits >> j & 1) for j in range(8)])

    def project(self, chunk: np.ndarray) -> np.ndarray:
        """Return z_j / step + u_j of each token of a chunk of bfloat16 patterns: [tokens, 8]."""
        states = from_bfloat16(chunk)
        return states @ self.signs.T / np.sqrt((states**2).sum(axis=1, keepdims=True)) / self.step + self.dithers

    def prove(self, chunk: np.ndarray) -> bytes:
        """Return a chunk's sketch: four bytes a token."""
        places = np.floor(self.project(chunk)).astype(np.int64) % PLACES
        return (places[:, 0::2] + 16 * places[:, 1::2]).astype(np.uint8).tobytes()

    def distances(self, chunk: np.ndarray, proof: bytes) -> np.ndarray:
        """Return each token's distance from its sketch, in steps of the grid (7.1)."""
        packed = np.frombuffer(proof, dtype=np.uint8).reshape(-1, 4)
        places = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8)
        gaps = self.project(chunk) - (places + 0.5)
        return np.sqrt((((gaps + 8) % PLACES - 8) ** 2).mean(axis=1))


def proof_bytes(proofs: dict[str, object], tokens: int) -> int:
    """Return how long the proof of a chunk of so many tokens is, by the run's `proofs`."""
    scheme = str(proofs["scheme"])
    toploc = 2 + 2 * int(str(proofs["top_k"])) if "toploc/1" in scheme else 0
    return toploc + (4 * tokens if "sketch/1" in scheme else 0)


def prove(chunks: Sequence[np.ndarray], seed: bytes, proofs: dict[str, object]) -> list[bytes]:
    """Return the proofs of a completion's chunks of float32 states [tokens, hidden], by the run's scheme."""
    made = []
    scheme = str(proofs["scheme"])
    for states in chunks:
        chunk = to_bfloat16(states)
        values = from_bfloat16(chunk)
        if not np.isfinite(values).all() or not values.any(axis=1).all():
            raise Refused("unprovable", "a state is not finite, or all zeros")
        proof = prove_toploc(chunk, int(str(proofs["top_k"]))) if "toploc/1" in scheme else b""
        if "sketch/1" in scheme:
            proof += Sketcher(seed, chunk.shape[1], float(str(proofs["sketch_step"]))).prove(chunk)
        made.append(proof)
    return made
