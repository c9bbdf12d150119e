"""Sketches: what prover and verifier must agree on to the bit, and how far honest, noisy and unrelated states are."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import toploc
from toploc import Gain, build_chunk_sketches, check_sketch_form, distances, gain, shifts, sketch_errors
from toploc.errors import (
    BadActivations,
    BadArgument,
    BadProof,
    MalformedProof,
    NonFiniteActivations,
    WrongProofCount,
)

SEED = b"0123456789abcdef"
OTHER_SEED = b"0123456789abcdeF"
STEP = 0.006
UNRELATED = 16 / math.sqrt(12)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def noisy(chunk: Tensor, sigma: float, *, seed: int = 99) -> Tensor:
    """`chunk` with noise of `sigma` times the rms of each token."""
    wide = chunk.float()
    noise = torch.randn(wide.shape, generator=torch.Generator().manual_seed(seed))
    return (wide + sigma * wide.square().mean(1, keepdim=True).sqrt() * noise).bfloat16()


def rms(errors: list[Tensor]) -> float:
    return float(torch.cat(errors).square().mean().sqrt())


def slow_sketch(chunk: Tensor, seed: bytes, step: float) -> bytes:
    """The definition, one element at a time over Python numbers."""
    hidden = chunk.shape[1]
    stream = hashlib.shake_128(b"swarmproof/1 sketch" + seed).digest(32 + hidden)
    dither = [(int.from_bytes(stream[4 * j : 4 * j + 4], "little") >> 8) / 2**24 for j in range(8)]
    out = bytearray()
    for row in chunk.tolist():
        norm = math.sqrt(hidden) * math.sqrt(math.fsum(value * value for value in row) / hidden)
        level = []
        for j in range(8):
            signed = [-value if stream[32 + i] >> j & 1 else value for i, value in enumerate(row)]
            level.append(math.floor(math.fsum(signed) / norm / step + dither[j]) % 16)
        out += bytes(level[2 * b] | level[2 * b + 1] << 4 for b in range(4))
    return bytes(out)


CHUNKS = [gaussian(4, 64, seed=i) for i in range(3)]
SEEDS = [SEED, SEED, OTHER_SEED]
HONEST = build_chunk_sketches(CHUNKS, SEEDS, step=STEP)


class TestBytes:
    def test_a_state_worked_out_by_hand(self) -> None:
        """Another implementation must come to these bytes, or its honest workers are refused.

        The state (3, 4, 0, ...) has length 5. Of this seed's stream, byte 32 is e5 and byte 33 is 07: element 0 is
        negative in projections 0, 2, 5, 6 and 7, element 1 in 0, 1 and 2. The signed sums are -7, -1, -7, 7, 7, 1, 1,
        1; divided by 5 and by a step of 1/32, -44.8, -6.4, -44.8, 44.8, 44.8, 6.4, 6.4, 6.4. The dithers begin
        5977f3b4, cb3cc007, ...: .7068, .0303, .9952, .6624, .2579, .5058, .7973, .0388. Rounded down: -45, -7, -44, 45,
        45, 6, 7, 6, and modulo 16 3, 9, 4, 13, 13, 6, 7, 6.
        """
        state = torch.tensor([[3.0, 4.0] + [0.0] * 7]).bfloat16()
        assert build_chunk_sketches([state], [SEED], step=1 / 32) == [bytes.fromhex("93 d4 6d 67")]

    @pytest.mark.parametrize("hidden", [8, 9, 127, 128, 1003])
    @pytest.mark.parametrize("tokens", [1, 3, 33])
    def test_every_width_and_length_follows_the_definition(self, tokens: int, hidden: int) -> None:
        chunk = gaussian(tokens, hidden, seed=hidden)
        (sketch,) = build_chunk_sketches([chunk], [SEED * 4], step=STEP)
        assert len(sketch) == 4 * tokens
        assert sketch == slow_sketch(chunk, SEED * 4, STEP)

    def test_each_chunk_gets_the_sketch_it_would_get_alone(self) -> None:
        """A worker sketches many rollouts in one call, and a verifier others: what shares a call must not matter."""
        chunks = [gaussian(1 + i % 33, (96, 1003, 5120)[i % 3], seed=i) for i in range(24)]
        seeds = [bytes([i % 5]) * 16 for i in range(24)]
        sketches = build_chunk_sketches(chunks, seeds, step=STEP)
        alone = [build_chunk_sketches([c], [s], step=STEP)[0] for c, s in zip(chunks, seeds, strict=True)]
        assert sketches == alone
        row_by_row = [
            b"".join(build_chunk_sketches([row.unsqueeze(0)], [s], step=STEP)[0] for row in c)
            for c, s in zip(chunks, seeds, strict=True)
        ]
        assert sketches == row_by_row
        together = sketch_errors(chunks, seeds, sketches, step=STEP)
        for i, errors in enumerate(together):
            (one,) = sketch_errors([chunks[i]], [seeds[i]], [sketches[i]], step=STEP)
            assert torch.allclose(errors, one, rtol=0, atol=1e-6)

    def test_a_chunk_larger_than_one_pass_is_cut_without_a_trace(self) -> None:
        long = gaussian(3000, 1024)
        (whole,) = build_chunk_sketches([long], [SEED], step=STEP)
        parts = build_chunk_sketches(list(torch.split(long, 32)), [SEED] * 94, step=STEP)
        assert whole == b"".join(parts)

    def test_the_scale_of_a_state_does_not_count(self) -> None:
        """Up to where squares leave float32: an engine whose states are large must not be told they are infinite."""
        for scale in (2.0**-100, 0.25, 2.0**100):
            assert build_chunk_sketches([CHUNKS[0] * scale], [SEED], step=STEP) == HONEST[:1]

    def test_strides_and_gradients_leave_no_trace(self) -> None:
        chunk = gaussian(5, 64)
        expected = build_chunk_sketches([chunk], [SEED], step=STEP)
        strided = chunk.repeat_interleave(2, dim=1)[:, ::2]
        for same in (strided, chunk.clone().requires_grad_()):
            assert build_chunk_sketches([same], [SEED], step=STEP) == expected
            (errors,) = sketch_errors([same], [SEED], expected, step=STEP)
            assert not errors.requires_grad

    def test_a_sketch_made_for_another_rollout_is_worth_nothing(self) -> None:
        """Were the projections the same for all, a sketch of common states could be kept and sent again."""
        chunk = gaussian(64, 512)
        first, second = build_chunk_sketches([chunk, chunk], [SEED, OTHER_SEED], step=STEP)
        assert rms(sketch_errors([chunk], [SEED], [first], step=STEP)) < 0.5
        assert rms(sketch_errors([chunk], [OTHER_SEED], [first], step=STEP)) > 4
        assert sum(a == b for a, b in zip(first, second, strict=True)) < 16

    def test_no_chunks_have_no_sketches(self) -> None:
        assert build_chunk_sketches([], [], step=STEP) == []
        assert shifts([], [], [], step=STEP) == []

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_gpu_and_a_cpu_come_to_the_same_bytes(self) -> None:
        chunks = [gaussian(32, 5120, seed=i) for i in range(8)]
        seeds = [bytes([i]) * 32 for i in range(8)]
        sketches = build_chunk_sketches(chunks, seeds, step=STEP)
        on_gpu = [chunk.cuda() for chunk in chunks]
        assert build_chunk_sketches(on_gpu, seeds, step=STEP) == sketches
        assert rms(sketch_errors(on_gpu, seeds, sketches, step=STEP)) < 0.3


class TestErrors:
    def test_identical_states_err_by_half_a_step_at_most(self) -> None:
        chunks = [gaussian(32, 1000, seed=i) for i in range(16)]
        seeds = [bytes([i]) * 32 for i in range(16)]
        errors = sketch_errors(chunks, seeds, build_chunk_sketches(chunks, seeds, step=STEP), step=STEP)
        assert all(one.shape == (32, 8) and one.dtype == torch.float32 for one in errors)
        joined = torch.cat(errors)
        assert float(joined.abs().max()) <= 0.5
        assert abs(float(joined.mean())) < 0.02
        assert float(joined.square().mean()) == pytest.approx(1 / 12, rel=0.05)

    @pytest.mark.parametrize("noise_in_steps", [0.5, 1.0, 1.5])
    def test_noise_shows_at_its_own_size(self, noise_in_steps: float) -> None:
        """Limits are multiples of an honest level: a distance that is not linear in the noise would void them."""
        step = 0.02
        chunks = [gaussian(64, 1024, seed=i) for i in range(16)]
        seeds = [bytes([i]) * 16 for i in range(16)]
        sketches = build_chunk_sketches([noisy(c, noise_in_steps * step) for c in chunks], seeds, step=step)
        found = rms(sketch_errors(chunks, seeds, sketches, step=step))
        assert found == pytest.approx(math.sqrt(noise_in_steps**2 + 1 / 12), rel=0.05)

    def test_an_error_is_what_the_verifier_has_more_than_the_prover(self) -> None:
        """Signed, and wrapped: 7 levels off shows as 7, 9 levels off as -7 the other way round."""
        (own,) = sketch_errors([CHUNKS[0]], [SEED], HONEST[:1], step=STEP)
        for off, seen in ((1, -1), (7, -7), (9, 7), (15, 1)):
            raised = bytes((byte & 0xF0) | (byte + off & 15) for byte in HONEST[0])
            (errors,) = sketch_errors([CHUNKS[0]], [SEED], [raised], step=STEP)
            assert torch.allclose(errors[:, 0::2], own[:, 0::2] + seen, atol=1e-5)
            assert torch.equal(errors[:, 1::2], own[:, 1::2])

    def test_errors_stay_in_the_range_of_the_levels(self) -> None:
        chunk = gaussian(512, 64)
        (errors,) = sketch_errors([chunk], [SEED], [b"\x08" * 2048], step=STEP)
        assert float(errors.abs().max()) <= 8
        assert float(errors.max()) > 7.9
        assert float(errors.min()) < -7.9

    def test_one_swapped_token_shows_at_that_token(self) -> None:
        tampered = CHUNKS[0].clone()
        tampered[2] = gaussian(64, seed=50)
        (errors,) = sketch_errors([tampered], [SEED], HONEST[:1], step=STEP)
        near = distances(errors) <= 0.5
        assert near.tolist() == [True, True, False, True]


class TestDistances:
    def test_equal_the_definition(self) -> None:
        errors = torch.tensor([[1.0] * 8, [0.0] * 8, [2.0, -2.0] * 4, [4.0] + [0.0] * 7])
        assert distances(errors).tolist() == pytest.approx([1.0, 0.0, 2.0, math.sqrt(2)])

    @pytest.mark.parametrize("step", [2.0**-20, STEP, 2.0**-4])
    @pytest.mark.parametrize("sketch", ["random bytes", "a constant", "another prompt's states"])
    def test_what_was_not_computed_is_far(self, sketch: str, step: float) -> None:
        """At any step a run may set, even the widest: or a worker saves the forward pass and guesses."""
        chunk = gaussian(4096, 256)
        sent = {
            "random bytes": torch.randint(256, (4 * 4096,), generator=torch.Generator().manual_seed(1)).tolist(),
            "a constant": [0] * (4 * 4096),
            "another prompt's states": build_chunk_sketches([gaussian(4096, 256, seed=1)], [SEED], step=step)[0],
        }[sketch]
        (errors,) = sketch_errors([chunk], [SEED], [bytes(sent)], step=step)
        found = distances(errors)
        assert float(found.square().mean().sqrt()) == pytest.approx(UNRELATED, rel=0.02)
        assert float((found < 2).float().mean()) < 0.005
        assert float(found.min()) > 0.6


class TestHostileSketches:
    @pytest.mark.parametrize("sketches", [[], HONEST[:2], [*HONEST, HONEST[0]], HONEST * 1000])
    def test_missing_or_extra_sketches_are_refused(self, sketches: list[bytes]) -> None:
        with pytest.raises(WrongProofCount):
            sketch_errors(CHUNKS, SEEDS, sketches, step=STEP)
        with pytest.raises(WrongProofCount):
            check_sketch_form(sketches, [4, 4, 4])

    @pytest.mark.parametrize("sketch", [b"", HONEST[1][:-1], HONEST[1] + b"\0", HONEST[1] * 2, HONEST[1].hex(), None])
    def test_a_sketch_of_another_length_or_type_is_refused_by_its_index(self, sketch: bytes) -> None:
        sent = [HONEST[0], sketch, HONEST[2]]
        for check in (
            lambda: sketch_errors(CHUNKS, SEEDS, sent, step=STEP),
            lambda: check_sketch_form(sent, [4, 4, 4]),
        ):
            with pytest.raises(MalformedProof) as caught:
                check()
            assert (caught.value.code, caught.value.index) == ("malformed_proof", 1)

    def test_form_is_judged_even_where_activations_cannot_be(self) -> None:
        """A bad sketch is the prover's fault whatever the verifier computed."""
        broken = [CHUNKS[0] * math.inf, *CHUNKS[1:]]
        with pytest.raises(BadProof):
            sketch_errors(broken, SEEDS, [*HONEST[:2], b""], step=STEP)

    def test_a_sketch_moved_to_a_chunk_of_another_length_is_refused(self) -> None:
        chunks = [gaussian(4, 64), gaussian(3, 64)]
        sketches = build_chunk_sketches(chunks, [SEED] * 2, step=STEP)
        with pytest.raises(MalformedProof) as caught:
            sketch_errors(chunks, [SEED] * 2, sketches[::-1], step=STEP)
        assert caught.value.index == 0

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.binary(max_size=20), max_size=4))
    def test_any_bytes_are_measured_or_refused(self, sketches: list[bytes]) -> None:
        try:
            errors = sketch_errors(CHUNKS, SEEDS, sketches, step=STEP)
        except BadProof:
            assert [len(sketch) for sketch in sketches] != [16, 16, 16]
        else:
            assert all(bool((one.abs() <= 8).all()) for one in errors)


def spoilt(value: float) -> list[Tensor]:
    """The chunks, with one value in the last token of the second."""
    chunk = CHUNKS[1].clone()
    chunk[-1, 5] = value
    return [CHUNKS[0], chunk, CHUNKS[2]]


class TestCallersMistakes:
    """None may be blamed on the prover: a verifier that meets one has no verdict."""

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_states_that_are_not_finite(self, value: float) -> None:
        for call in calls(spoilt(value)):
            with pytest.raises(NonFiniteActivations) as caught:
                call()
            assert caught.value.index == 1

    def test_a_state_of_zeros_has_no_direction(self) -> None:
        silent = CHUNKS[1].clone()
        silent[2] = 0
        for call in calls([CHUNKS[0], silent, CHUNKS[2]]):
            with pytest.raises(BadActivations) as caught:
                call()
            assert (caught.value.code, caught.value.index) == ("bad_activations", 1)

    @pytest.mark.parametrize(
        "chunk",
        [CHUNKS[0].float(), CHUNKS[0].half(), CHUNKS[0][0], CHUNKS[0][:0], CHUNKS[0][:, :7], CHUNKS[0][None], [[1.0]]],
        ids=["float32", "float16", "no token axis", "no tokens", "too narrow", "three axes", "a list"],
    )
    def test_chunks_of_another_form(self, chunk: Tensor) -> None:
        for call in calls([CHUNKS[0], chunk, CHUNKS[2]]):
            with pytest.raises(BadActivations) as caught:
                call()
            assert caught.value.index == 1

    def test_nothing_to_verify(self) -> None:
        with pytest.raises(BadActivations):
            sketch_errors([], [], [], step=STEP)

    @pytest.mark.parametrize("step", [0.0, -STEP, 2.0**-21, 0.07, 6.0, math.nan, math.inf])
    def test_steps_that_make_no_grid_or_one_too_coarse(self, step: float) -> None:
        """At 6 (a percentage, say) every state has the same sketch, and every prover passes."""
        with pytest.raises(BadArgument):
            build_chunk_sketches(CHUNKS, SEEDS, step=step)

    @pytest.mark.parametrize("seed", [b"", SEED[:15], b"x" * 65, "0123456789abcdef", bytearray(SEED)])
    def test_seeds_of_another_form(self, seed: bytes) -> None:
        with pytest.raises(BadArgument) as caught:
            build_chunk_sketches(CHUNKS, [SEED, SEED, seed], step=STEP)
        assert caught.value.index == 2

    def test_fewer_seeds_than_chunks(self) -> None:
        with pytest.raises(BadArgument):
            sketch_errors(CHUNKS, SEEDS[:2], HONEST, step=STEP)

    @pytest.mark.parametrize(("own", "other"), [(4, 3), (3, 4), (1, 4)])
    def test_shifts_of_other_tokens(self, own: int, other: int) -> None:
        """A single token would be compared with every one of the others, and the suspicion be about nothing."""
        with pytest.raises(BadArgument):
            shifts([CHUNKS[0][:own]], [CHUNKS[0][:other]], [SEED], step=STEP)

    def test_errors_and_shifts_that_do_not_belong_together(self) -> None:
        eight = torch.ones(4, 8)
        for errors, moved, seeds in (
            ([eight], [], [SEED]),
            ([eight], [eight], []),
            ([eight], [eight[:3]], [SEED]),
            ([eight[:, :4]], [eight[:, :4]], [SEED]),
        ):
            with pytest.raises(BadArgument):
                gain(errors, moved, seeds)


def calls(chunks: list[Tensor]) -> list[Callable[[], object]]:
    """Everything that takes activations."""
    return [
        lambda: build_chunk_sketches(chunks, SEEDS, step=STEP),
        lambda: sketch_errors(chunks, SEEDS, HONEST, step=STEP),
        lambda: shifts(chunks, CHUNKS, SEEDS, step=STEP),
        lambda: shifts(CHUNKS, chunks, SEEDS, step=STEP),
    ]


def filtered(own: list[Tensor], other: list[Tensor], proved: list[Tensor]) -> Gain:
    """The gain for `other` where the prover sketched `proved`; each chunk is a sequence of its own."""
    seeds = [bytes([i]) * 16 for i in range(len(own))]
    errors = sketch_errors(own, seeds, build_chunk_sketches(proved, seeds, step=STEP), step=STEP)
    return gain(errors, shifts(own, other, seeds, step=STEP), seeds)


OWN = [gaussian(48, 512, seed=i) for i in range(32)]
# Weights nearer to the verifier's than kernel noise: no distance tells them apart.
OTHER = [noisy(chunk, 0.4 * STEP, seed=500 + i) for i, chunk in enumerate(OWN)]


class TestGain:
    def test_an_honest_prover_has_none(self) -> None:
        proved = [noisy(chunk, STEP, seed=900 + i) for i, chunk in enumerate(OWN)]
        found = filtered(OWN, OTHER, proved)
        assert abs(found.gain) < 4 * found.error
        assert found.error < 0.1
        assert found.tokens == 32 * 48

    def test_a_prover_of_the_other_weights_has_all_of_it(self) -> None:
        """The stale or quantised policy that no distance shows."""
        proved = [noisy(chunk, STEP, seed=900 + i) for i, chunk in enumerate(OTHER)]
        found = filtered(OWN, OTHER, proved)
        assert abs(found.gain - 1) < 4 * found.error
        assert found.gain > 8 * found.error

    def test_shifts_are_the_errors_a_prover_of_the_other_states_would_have(self) -> None:
        seeds = [bytes([i]) * 16 for i in range(32)]
        errors = sketch_errors(OWN, seeds, build_chunk_sketches(OTHER, seeds, step=STEP), step=STEP)
        moved = shifts(OWN, OTHER, seeds, step=STEP)
        assert all(float((x - d).abs().max()) <= 0.5 for x, d in zip(errors, moved, strict=True))

    def test_the_standard_error_counts_what_a_rollouts_tokens_share(self) -> None:
        """Kernels and weights differ in the same direction at every token, under the same projections.

        Over tokens alone the standard error of these is an eighth of the true one, and honest workers would be
        accused.
        """
        draw = torch.Generator().manual_seed(5)
        ratios = []
        for _ in range(60):
            errors, moved, seeds = [], [], []
            for i in range(24):
                shared = torch.randn(2, 1, 8, generator=draw) + 0.3 * torch.randn(2, 64, 8, generator=draw)
                errors += list(torch.split(shared[0], 32))
                moved += list(torch.split(shared[1], 32))
                seeds += [bytes([i]) * 16] * 2
            found = gain(errors, moved, seeds)
            ratios.append(found.gain / found.error)
        assert 0.7 < math.sqrt(sum(ratio**2 for ratio in ratios) / 60) < 1.4

    def test_one_rollout_is_judged_by_the_spread_of_its_tokens(self) -> None:
        """A standard error of zero, for want of other rollouts, would make any gain a certain one."""
        draw = torch.Generator().manual_seed(1)
        ratios = []
        for _ in range(200):
            found = gain([torch.randn(64, 8, generator=draw)], [torch.randn(64, 8, generator=draw)], [SEED])
            ratios.append(found.gain / found.error)
        assert 0.8 < math.sqrt(sum(ratio**2 for ratio in ratios) / 200) < 1.25

    def test_shifts_that_would_wrap_are_left_out(self) -> None:
        """Half the tokens under the other weights are 9 steps away and so appear at -7: counted, they hide the rest."""
        moved = torch.ones(64, 8)
        moved[32:] = 9
        wrapped = (moved + 8) % 16 - 8 + 0.1 * torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        found = gain([wrapped], [moved], [SEED])
        assert found.tokens == 32
        assert found.gain == pytest.approx(1, abs=0.05)

    @pytest.mark.parametrize("moved", [[], [torch.zeros(4, 8)], [torch.full((4, 8), 5.0)]])
    def test_nothing_to_compare_proves_nothing(self, moved: list[Tensor]) -> None:
        found = gain([torch.ones(4, 8)] * len(moved), moved, [SEED] * len(moved))
        assert found == Gain(0.0, math.inf, 0)

    def test_one_token_has_no_spread_to_judge_by(self) -> None:
        assert gain([torch.ones(1, 8)], [torch.ones(1, 8)], [SEED]) == Gain(0.0, math.inf, 1)


def test_the_package_exports_what_engines_and_verifiers_call() -> None:
    assert {"build_chunk_sketches", "check_sketch_form", "sketch_errors"} <= set(toploc.__all__)
