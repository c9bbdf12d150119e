"""Activation proofs: TOPLOC's bytes and base64, alone and against activations, and sketches."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random

import torch

import toploc
from benchmarks.fuzzing.mutation import bytes_mutator, mixed, of_one, scramble
from benchmarks.fuzzing.target import Harness, Target
from toploc.errors import BadProof
from toploc.field import MAX_TOPK, PRIME

TOPK, HIDDEN, TOKENS = 8, 48, 4
STEP = 0.02
SEED = bytes(range(16))
# The second chunk is shorter; the third has more elements than a modulus can keep apart.
SIZES = (TOKENS, 2, 2048)
WORDS = [value.to_bytes(2, "big") for value in (0, 1, 2, PRIME - 1, PRIME, 2**16 - 1, 0x7F80, 0xFF80, TOPK, 255)]
NULL = bytes(2 + 2 * TOPK)
KNOWN_FORGERY = bytes.fromhex("ffd9405b")


def _activations(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


CHUNKS = [_activations(tokens, seed) for seed, tokens in enumerate(SIZES)]


def _words(rng: Random, data: bytes) -> bytes:
    """Replace, swap, lose and repeat whole words of a proof."""
    words = [data[at : at + 2] for at in range(0, len(data) - 1, 2)]
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(words)) if words else 0
        replacement = rng.choice(([rng.choice(WORDS)], [rng.randbytes(2)], [], words[at : at + 1] * 2))
        words[at : at + 1] = replacement
    return b"".join(words)


MUTATE = mixed((2, of_one(_words)), (1, bytes_mutator(*WORDS, NULL, KNOWN_FORGERY)))


def _bytes(_: ExitStack) -> Harness:
    """Feed one proof, whose length says how many points it has."""

    def run(data: bytes) -> None:
        proof = toploc.ProofPoly.from_bytes(data)
        assert proof.to_bytes() == data, "it encodes to other bytes"
        assert all(0 <= proof(x) < PRIME for x in (0, 1, PRIME - 1))

    wide = [_activations(MAX_TOPK // HIDDEN + 1, seed=5)]
    seeds = [*toploc.build_chunk_proofs(CHUNKS, TOPK), *toploc.build_chunk_proofs(wide, MAX_TOPK)]
    return Harness(seeds, run, (BadProof,), MUTATE)


def _base64(_: ExitStack) -> Harness:
    def run(data: bytes) -> None:
        text = data.decode("latin-1")
        proof = toploc.ProofPoly.from_base64(text)
        assert proof.to_base64() == text, "it encodes to other text"

    def inside(rng: Random, data: bytes) -> bytes:
        try:
            return base64.b64encode(_words(rng, base64.b64decode(data)))
        except ValueError:
            return scramble(rng, data)

    seeds = [base64.b64encode(proof) for proof in toploc.build_chunk_proofs(CHUNKS, TOPK)]
    tokens = (b"=", b"==", b"\n", b" ", b"-_", b"\xff", b"A" * 20_000)
    return Harness(seeds, run, (BadProof,), mixed((2, of_one(inside)), (1, bytes_mutator(*tokens))))


def _parts(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Cut `data` where honest proofs of these sizes end; what is left over is the last one's."""
    parts = []
    for size in sizes[:-1]:
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]


def _verify(_: ExitStack) -> Harness:
    """Feed proofs of three chunks, and measure them. What has the form of a proof must be measurable."""
    size = 2 + 2 * TOPK
    elements = [tokens * HIDDEN for tokens in SIZES]

    def run(data: bytes) -> str:
        proofs = _parts(data, [size] * len(SIZES))
        toploc.check_form(proofs, elements, TOPK)
        try:
            results = toploc.verify_chunk_proofs(CHUNKS, proofs, TOPK)
        except BadProof as error:
            raise AssertionError(f"check_form let {error.code} through") from error
        for result in results:
            assert 0 <= result.exp_mismatches <= TOPK
            assert math.isfinite(result.mant_err_mean)
            assert math.isfinite(result.mant_err_median)
        return str([result.exp_mismatches for result in results])

    seeds = [b"".join(toploc.build_chunk_proofs(CHUNKS, TOPK))]
    return Harness(seeds, run, (BadProof,), MUTATE)


def _sketch(_: ExitStack) -> Harness:
    """Feed sketches of two chunks, and measure them. Any bytes of the right length are some states' sketch."""
    chunks = CHUNKS[:2]
    tokens = [len(chunk) for chunk in chunks]
    honest = toploc.build_chunk_sketches(chunks, [SEED] * 2, step=STEP)

    def run(data: bytes) -> None:
        sketches = _parts(data, [len(sketch) for sketch in honest])
        toploc.check_sketch_form(sketches, tokens)
        try:
            errors = toploc.sketch_errors(chunks, [SEED] * 2, sketches, step=STEP)
        except BadProof as error:
            raise AssertionError(f"check_sketch_form let {error.code} through") from error
        for of_chunk in errors:
            assert bool((of_chunk.abs() <= 8).all()), "an error further than half the range"
            assert bool(toploc.distances(of_chunk).isfinite().all())

    return Harness([b"".join(honest)], run, (BadProof,), bytes_mutator(bytes(4), b"\xff" * 4))


TARGETS = (
    Target("proofs.bytes", "any key, to the verifier", 50, _bytes),
    Target("proofs.base64", "whoever sends proofs as text", 50, _base64),
    Target("proofs.verify", "any key, to the verifier", 20, _verify),
    Target("proofs.sketch", "any key, to the verifier", 20, _sketch),
)
