"""Sketch final hidden states in 4 bytes per token, and measure how far other states are from a sketch.

A sketch is eight random projections of a token's state, each rounded to a dithered grid and kept modulo 16: the
verifier has the state itself, so the remainder tells how far the two are apart. Dithered quantisation of random
projections after Boufounos, "Universal Rate-Efficient Scalar Quantization" (IEEE Trans. Inf. Theory, 2012).

    stream = SHAKE-128("swarmproof/1 sketch" || seed)
    u_j    = (word_j >> 8) / 2**24          word_0 .. word_7: u32, little-endian, the first 32 bytes
    R_ji   = -1 where bit j of byte 32 + i is set, else +1          for hidden element i = 0 .. d - 1
    z_j    = sum_i R_ji h_i / (sqrt(d) rms(h)) = sum_i R_ji h_i / |h|
    q_j    = floor(z_j / step + u_j) mod 16
    sketch = for each token four bytes; byte b holds q_2b in its low and q_2b+1 in its high four bits

Arithmetic is float64. Signed sums of bfloat16 values are exact in it unless their magnitudes span nine decades, so the
bytes do not depend on the order of summation (kernel, batch, device).

Everything is relative to the length of the state: final hidden states come out of a normalisation, where the length
follows from the direction. Not guaranteed: an error is a distance, not a verdict; the caller sets the limits. A state
dominated by a few elements says little about the others. How tokens were sampled, and whether they were decoded from
the sketched states, leaves no trace in a sketch.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toploc.errors import BadActivations, BadArgument, MalformedProof, NonFiniteActivations, WrongProofCount

PROJECTIONS = 8
LEVELS = 16
TOKEN_BYTES = PROJECTIONS // 2

SEED_BYTES = range(16, 65)
# Above, projections (of rms 1) wrap too seldom for an invented state to be far; below, the grid is three orders of
# magnitude finer than bfloat16, which only a mistake in the units asks for.
STEPS = (2.0**-20, 2.0**-4)
MIN_HIDDEN = 8

_DOMAIN = b"swarmproof/1 sketch"
_DITHER_BYTES = 4 * PROJECTIONS
# Elements projected at once: 2 MiB of float64, to stay in a core's cache.
_SLICE_ELEMENTS = 2**18
# Shifts up to a quarter of the range: with an honest error on top, none of them wraps.
_MAX_SHIFT = LEVELS / 4


@dataclass(frozen=True, slots=True)
class Gain:
    """How far the prover's errors go from the verifier's weights towards a candidate's.

    `gain`: about 0 if the prover used the verifier's weights, about 1 if it used the candidate's. `error`: its standard
    error, infinite if nothing could be compared. `tokens`: those with a compared projection.
    """

    gain: float
    error: float
    tokens: int


def build_chunk_sketches(chunks: Sequence[Tensor], seeds: Sequence[bytes], *, step: float) -> list[bytes]:
    """Build a sketch of 4 bytes per token for each chunk [tokens, hidden], bfloat16, of any number of sequences.

    `seeds[i]`: 16 .. 64 bytes, the same for all chunks of a sequence. `step`: of the grid, relative to the rms of a
    token's hidden state; about the rms error of honest states. Independent of batching. Raises a `CallerFault`.
    """
    tokens = _checked_tokens(chunks, seeds, step)
    if not chunks:
        return []
    levels = torch.cat(_grid_positions(chunks, seeds, step)).floor().remainder(LEVELS).to(torch.uint8)
    return _encode(levels, tokens)


def check_sketch_form(sketches: Sequence[bytes], tokens: Sequence[int]) -> None:
    """Raise a `BadProof` for sketches no honest prover sends for chunks of so many `tokens`; needs no activations.

    Raises `WrongProofCount`, or `MalformedProof` with the index of the first sketch of another length. Any bytes of the
    right length are the sketch of some states.
    """
    if len(sketches) != len(tokens):
        raise WrongProofCount(f"{len(tokens)} chunks need as many sketches, not {len(sketches)}")
    for index, (sketch, count) in enumerate(zip(sketches, tokens, strict=True)):
        if not isinstance(sketch, bytes):
            raise MalformedProof("a sketch must be a bytes object", index=index)
        if len(sketch) != TOKEN_BYTES * count:
            message = f"a sketch of {count} tokens must have {TOKEN_BYTES * count} bytes, not {len(sketch)}"
            raise MalformedProof(message, index=index)


def sketch_errors(
    chunks: Sequence[Tensor], seeds: Sequence[bytes], sketches: Sequence[bytes], *, step: float
) -> list[Tensor]:
    """Measure the errors [tokens, 8] of each chunk's sketch, float32 in -8 .. 8, in units of `step`.

    `chunks`: at least one, recomputed by the verifier, as are `seeds`; `sketches` are untrusted. Identical states have
    errors uniform in -1/2 .. 1/2; unrelated ones, uniform in -8 .. 8. The sketches' form is checked first. Raises a
    `BadProof` if no honest prover of these chunks sends them, and a `CallerFault` if the activations cannot be
    measured.
    """
    tokens = _checked_tokens(chunks, seeds, step)
    if not chunks:
        raise BadActivations("no chunks to verify")
    check_sketch_form(sketches, tokens)
    own = torch.cat(_grid_positions(chunks, seeds, step))
    middle = _decode(sketches).to(own.device).double() + 0.5
    wrapped = (own - middle + LEVELS / 2).remainder(LEVELS) - LEVELS / 2
    return list(torch.split(wrapped.float(), tokens))


def distances(errors: Tensor) -> Tensor:
    """Return the rms of each token's errors [tokens, 8], [tokens], in units of the step.

    Identical states give 0.29 on average over many tokens (rms), unrelated ones 4.62.
    """
    return errors.square().mean(-1).sqrt()


def shifts(
    chunks: Sequence[Tensor], other_chunks: Sequence[Tensor], seeds: Sequence[bytes], *, step: float
) -> list[Tensor]:
    """Predict the errors [tokens, 8] per chunk of a prover of `other_chunks`, float32, in units of `step`.

    `chunks`, `other_chunks`: states of the same tokens, [tokens, hidden], bfloat16, under the verifier's weights and
    under a candidate's. Neither wrapped nor rounded to the grid. Raises a `CallerFault`.
    """
    tokens = _checked_tokens(chunks, seeds, step)
    if _checked_tokens(other_chunks, seeds, step) != tokens:
        raise BadArgument("chunks and other chunks must have the same tokens")
    if not chunks:
        return []
    # An error is the verifier's grid position minus the prover's.
    both = zip(_grid_positions(chunks, seeds, step), _grid_positions(other_chunks, seeds, step), strict=True)
    return [(own - other).float() for own, other in both]


def gain(errors: Sequence[Tensor], shifts: Sequence[Tensor], seeds: Sequence[bytes]) -> Gain:
    """Apply the matched filter <x, d> / <d, d> to `errors` x for `shifts` d, both [tokens, 8] for each chunk.

    `seeds`: as for both. Chunks of one sequence share their projections and so part of their errors; the standard error
    is therefore the larger of two, over tokens and (if at least two) over sequences. Projections whose shift exceeds 4
    in magnitude are left out, as their errors may have wrapped; for weights that far away, `sketch_errors` of the
    candidate's own states is the better test. Raises `BadArgument`.
    """
    if not len(errors) == len(shifts) == len(seeds):
        raise BadArgument("errors, shifts and seeds must be of equal number")
    for index, (x, d) in enumerate(zip(errors, shifts, strict=True)):
        if x.shape != d.shape or x.ndim != 2 or x.shape[1] != PROJECTIONS:
            raise BadArgument(f"errors and shifts must have shape [tokens, {PROJECTIONS}]", index=index)
    if not errors:
        return Gain(0.0, math.inf, 0)
    x, d = torch.cat(list(errors)).double(), torch.cat(list(shifts)).double()
    d = d.masked_fill(d.abs() > _MAX_SHIFT, 0)
    tokens, power = int(d.any(1).sum()), float(d.square().sum())
    if tokens < 2:
        return Gain(0.0, math.inf, tokens)
    value = float((x * d).sum()) / power
    residuals = ((x - value * d) * d).sum(1)
    sequence_numbers = {seed: number for number, seed in enumerate(dict.fromkeys(seeds))}
    sums = torch.stack([part.sum() for part in torch.split(residuals, [len(x) for x in errors])])
    sequence = torch.tensor([sequence_numbers[seed] for seed in seeds], device=residuals.device)
    by_sequence = residuals.new_zeros(len(sequence_numbers)).index_add(0, sequence, sums)
    return Gain(
        value,
        max(_sum_deviation(residuals, tokens), _sum_deviation(by_sequence, len(sequence_numbers))) / power,
        tokens,
    )


def _sum_deviation(residuals: Tensor, count: int) -> float:
    """Estimate the standard deviation of the sum of `count` independent residuals; the gain takes one degree of
    freedom.
    """
    return math.sqrt(float(residuals.square().sum()) * count / (count - 1)) if count > 1 else 0.0


def _checked_tokens(chunks: Sequence[Tensor], seeds: Sequence[bytes], step: float) -> list[int]:
    """Return the tokens of each chunk; raises a `CallerFault` for chunks `_grid_positions` cannot process."""
    if not STEPS[0] <= step <= STEPS[1]:
        raise BadArgument(f"step must be in {STEPS[0]:g} .. {STEPS[1]:g} of the rms of a state, not {step}")
    if len(seeds) != len(chunks):
        raise BadArgument(f"{len(chunks)} chunks need as many seeds, not {len(seeds)}")
    for index, seed in enumerate(seeds):
        if not isinstance(seed, bytes) or len(seed) not in SEED_BYTES:
            raise BadArgument(f"a seed must have {SEED_BYTES[0]} .. {SEED_BYTES[-1]} bytes", index=index)
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, Tensor) or chunk.dtype != torch.bfloat16:
            message = "activations must be bfloat16 tensors: cast with .to(torch.bfloat16), as the prover did"
            raise BadActivations(message, index=index)
        if chunk.ndim != 2 or chunk.shape[0] < 1 or chunk.shape[1] < MIN_HIDDEN:
            message = f"a chunk must be [tokens >= 1, hidden >= {MIN_HIDDEN}], not {list(chunk.shape)}"
            raise BadActivations(message, index=index)
    if len({chunk.device for chunk in chunks}) > 1:
        raise BadActivations("activations must be on one device")
    return [len(chunk) for chunk in chunks]


@torch.no_grad()
def _grid_positions(chunks: Sequence[Tensor], seeds: Sequence[bytes], step: float) -> list[Tensor]:
    """Compute each chunk's projections on the dithered grid, z / step + u: [tokens, 8] float64, in steps.

    On the activations' device, or on the CPU where that has no float64. Raises `NonFiniteActivations`, or
    `BadActivations` for a state without a direction.
    """
    # By sequence, so that one sequence's signs are held at a time.
    by_sequence: defaultdict[tuple[bytes, int], list[int]] = defaultdict(list)
    for position, (chunk, seed) in enumerate(zip(chunks, seeds, strict=True)):
        by_sequence[seed, chunk.shape[1]].append(position)
    device = chunks[0].device if chunks[0].device.type == "cuda" else torch.device("cpu")
    patterns = _patterns(device)
    positions, lengths = [torch.empty(0)] * len(chunks), [torch.empty(0)] * len(chunks)
    for (seed, hidden), members in by_sequence.items():
        dither, signs = _projection(seed, hidden, patterns)
        for position in members:
            sums, lengths[position] = _project(chunks[position].to(device), signs)
            positions[position] = sums / (lengths[position] * step).unsqueeze(1) + dither
    _require_directions(lengths)
    return positions


def _patterns(device: torch.device) -> Tensor:
    """Tabulate the signs [256, 8], float64, of each byte: -1 where its bit is set."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(PROJECTIONS, device=device) & 1
    return (1 - 2 * bits).double()


def _projection(seed: bytes, hidden: int, patterns: Tensor) -> tuple[Tensor, Tensor]:
    """Derive a sequence's dithers [8], in steps, and signs [8, hidden], both float64."""
    stream = hashlib.shake_128(_DOMAIN + seed).digest(_DITHER_BYTES + hidden)
    words = [int.from_bytes(stream[i : i + 4], "little") for i in range(0, _DITHER_BYTES, 4)]
    dither = torch.tensor([(word >> 8) / 2**24 for word in words], dtype=torch.float64, device=patterns.device)
    octets = torch.frombuffer(bytearray(stream[_DITHER_BYTES:]), dtype=torch.uint8).to(patterns.device)
    return dither, patterns.index_select(0, octets.int()).t().contiguous()


def _project(states: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute signed sums [tokens, 8] and lengths [tokens], float64, of states [tokens, hidden]."""
    sums, lengths = [], []
    for part in torch.split(states, max(1, _SLICE_ELEMENTS // states.shape[1])):
        wide = part.double()
        # In this order the product takes two thirds of the time on a CPU.
        sums.append((signs @ wide.t()).t())
        lengths.append(torch.linalg.vector_norm(wide, dim=1))
    return torch.cat(sums), torch.cat(lengths)


def _require_directions(lengths: Sequence[Tensor]) -> None:
    """Raise for a state with NaN, infinity or only zeros, all of which show in its length."""
    joined = torch.cat(list(lengths))
    bad = (~(joined.isfinite() & (joined > 0))).nonzero()
    if not bad.numel():
        return
    index = next(i for i, length in enumerate(lengths) if bool((~(length.isfinite() & (length > 0))).any()))
    if not bool(lengths[index].isfinite().all()):
        raise NonFiniteActivations("activations must be finite: NaN or infinity found", index=index)
    raise BadActivations("a hidden state of zeros has no direction to sketch", index=index)


def _encode(levels: Tensor, tokens: Sequence[int]) -> list[bytes]:
    """Pack levels [tokens, 8], uint8 and below 16, of all chunks into one sketch each."""
    octets = levels[:, 0::2] | levels[:, 1::2] << 4
    buffer = bytearray(octets.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(octets.flatten())
    sketches, start = [], 0
    for count in tokens:
        sketches.append(bytes(buffer[start : start + TOKEN_BYTES * count]))
        start += TOKEN_BYTES * count
    return sketches


def _decode(sketches: Sequence[bytes]) -> Tensor:
    """Unpack the levels [tokens, 8], uint8, of sketches of checked form."""
    octets = torch.frombuffer(bytearray(b"".join(sketches)), dtype=torch.uint8).view(-1, TOKEN_BYTES)
    return torch.stack([octets & 15, octets >> 4], dim=-1).view(-1, PROJECTIONS)
