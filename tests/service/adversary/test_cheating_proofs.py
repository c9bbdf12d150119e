"""Honest rollouts with other proofs than their own: swapped, repeated, missing, malformed and invented ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from cheating import RULES, SLOT, SPEC, VERSION
from narrow_run import RUN_ID, SHARPNESS, LeasedSlot
from verifying import drawn, measured

from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec, ProofSpec
from node.protocol.submission import Rollout
from node.verification.plan import Rules
from toploc import build_chunk_proofs


def with_proofs(rollouts: Sequence[Rollout], make: Callable[[Rollout], list[bytes]]) -> list[Rollout]:
    return [msgspec.structs.replace(one, proofs=make(one)) for one in rollouts]


def test_proofs_of_one_rollout_with_the_tokens_of_another(bench, honest):
    rows = [one for one in honest if len(one.proofs) == len(honest[0].proofs)]
    assert len(rows) >= 2
    swapped = [msgspec.structs.replace(one, proofs=rows[index - 1].proofs) for index, one in enumerate(rows)]
    others = [one for one in honest if len(one.proofs) != len(honest[0].proofs)]
    by_seed = {one.seed: one for one in [*swapped, *others]}
    assert bench.reason([by_seed[seed] for seed in bench.expected.seeds]) == Reason.PROOF_MISMATCH


def test_the_first_chunks_proof_for_every_chunk(bench, honest):
    repeated = with_proofs(honest, lambda one: [one.proofs[0]] * len(one.proofs))
    assert any(len(one.proofs) > 1 for one in honest)
    assert bench.reason(repeated) == Reason.PROOF_MISMATCH


@pytest.mark.parametrize("extra", [-1, 1])
def test_missing_and_extra_proofs(bench, honest, extra):
    """A verifier that pairs proofs and chunks loosely checks fewer chunks than there are."""
    changed = with_proofs(honest, lambda one: [one.proofs[0]] * (len(one.proofs) + extra))
    assert bench.reason(changed) == Reason.WRONG_PROOF_COUNT


def test_no_proofs_at_all(bench, honest):
    """All of nothing is true."""
    assert bench.reason(with_proofs(honest, lambda _: [])) == Reason.WRONG_PROOF_COUNT


def test_null_proofs(bench, honest):
    """All zeros, modulus 0: what a careless prover emits on any error, and what crashes a careless verifier."""
    assert bench.reason(with_proofs(honest, lambda one: [bytes(258)] * len(one.proofs))) == Reason.MALFORMED_PROOF


@pytest.mark.parametrize("modulus", [0, 1, 2, 65496, 65498, 65535])
def test_true_proofs_under_another_modulus(bench, honest, modulus):
    """A small modulus folds all indices onto few values, which a constant then fits."""

    def change(one: Rollout) -> list[bytes]:
        return [modulus.to_bytes(2, "big") + proof[2:] for proof in one.proofs]

    assert bench.reason(with_proofs(honest, change)) == Reason.MALFORMED_PROOF


def test_coefficients_outside_the_field(bench, honest):
    def change(one: Rollout) -> list[bytes]:
        return [proof[:-2] + b"\xff\xff" for proof in one.proofs]

    assert bench.reason(with_proofs(honest, change)) == Reason.MALFORMED_PROOF


@pytest.mark.parametrize("size", [0, 2, 4, 256, 260, 516])
def test_proofs_of_another_size(bench, honest, size):
    proofs = (b"\xff\xd9" + bytes(600))[:size]
    assert bench.reason(with_proofs(honest, lambda one: [proofs] * len(one.proofs))) == Reason.MALFORMED_PROOF


def constant_proof(value: int) -> bytes:
    """The polynomial that says `value`, a bf16 bit pattern, at every index."""
    return b"\xff\xd9" + value.to_bytes(2, "big") + bytes(254)


@pytest.mark.parametrize("value", [0x0000, 0x405B, 0xC05B, 0x3F80, 0x7FC0])
def test_one_constant_as_the_proof_of_everything(bench, honest, value):
    """The top magnitudes of a chunk are alike: one constant passes limits that are far from the honest figures."""
    forged = with_proofs(honest, lambda one: [constant_proof(value)] * len(one.proofs))
    assert bench.reason(forged) == Reason.PROOF_MISMATCH


def test_the_best_constant_for_each_chunk(bench, honest):
    """A forger who knows the typical magnitude: the constant with the smallest figures of all."""

    def best(one: Rollout) -> list[bytes]:
        candidates = range(0x3F80, 0x4280)

        def badness(value: int) -> float:
            (row,) = measured(
                bench.policies,
                with_proofs([one], lambda _: [constant_proof(value)] * len(one.proofs)),
                spec=SPEC,
            )
            return row.figures.exponent_mismatches

        return [constant_proof(min(candidates[::16], key=badness))] * len(one.proofs)

    rollouts = with_proofs(honest[:1], best) + list(honest[1:])
    verdict = bench.verdict(rollouts)
    assert verdict.reason == Reason.PROOF_MISMATCH
    assert verdict.figures is not None
    assert verdict.figures.exponent_mismatches > 10 * SPEC.limits.exponent_mismatches


def test_proofs_of_noise(bench, honest):
    def noise_proofs(one: Rollout) -> list[bytes]:
        generator = torch.Generator().manual_seed(5)
        chunk = torch.randn(SPEC.proofs.chunk_tokens, bench.policy.hidden, generator=generator).bfloat16() * SHARPNESS
        return build_chunk_proofs([chunk] * len(one.proofs), SPEC.proofs.top_k)

    assert bench.reason(with_proofs(honest, noise_proofs)) == Reason.PROOF_MISMATCH


@pytest.fixture(scope="module")
def sketched(bench) -> LeasedSlot:
    """A slot of a run with sketches alone, which nobody has calibrated."""
    spec = msgspec.structs.replace(SPEC, proofs=ProofSpec(scheme="sketch/1"), limits=LimitsSpec())
    return LeasedSlot(Rules(RUN_ID, spec, RULES.environments), bench.policies, VERSION, SLOT)


def honest_sketches(slot: LeasedSlot) -> list[Rollout]:
    parts = [(VERSION, slot.policy, None)]
    return [drawn(parts, slot.expected, seed, spec=slot.rules.spec) for seed in slot.expected.seeds]


@pytest.mark.parametrize("every", [2, 3])
def test_a_sketch_that_is_right_for_part_of_the_tokens(sketched, every):
    """The typical distance is that of the other tokens, so a worker could run the policy for half of them."""
    generator = torch.Generator().manual_seed(7)

    def partly(one: Rollout) -> list[bytes]:
        tokens = [proof[at : at + 4] for proof in one.proofs for at in range(0, len(proof), 4)]
        noise = torch.randint(256, (len(tokens), 4), generator=generator, dtype=torch.uint8)
        tokens[::every] = [bytes(row.tolist()) for row in noise[::every]]
        joined = b"".join(tokens)
        size = 4 * sketched.rules.spec.proofs.chunk_tokens
        return [joined[at : at + size] for at in range(0, len(joined), size)]

    rollouts = honest_sketches(sketched)
    assert sketched.reason(rollouts) is None
    verdict = sketched.verdict(with_proofs(rollouts, partly))
    assert verdict.reason == Reason.PROOF_MISMATCH
    assert verdict.finding is not None
    assert verdict.finding.figure == "far_evidence"
    assert verdict.figures.sketch_distance < sketched.rules.spec.limits.sketch_distance
