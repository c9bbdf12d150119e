"""Forced sampling as engines and the verifier run it (docs/protocol.md, section 4).

`node.protocol.sampling` is the readable definition; this gives the same tokens and margins bit for bit, without
holding the noise: a numba kernel on a CPU (`node.sampling_numba`), a Triton kernel on a CUDA device
(`node.sampling_triton`), and the definition itself, a bounded number of values at a time, on any other device.
Log-probabilities are compared with a tolerance, and may differ in their last bits between the three.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.protocol.sampling import gumbel_noise, gumbel_table, philox4x32, table_index
from node.protocol.slots import SEED_BYTES

MAX_NOISE_VALUES = 2**20
"""Noise held at once where no kernel runs; its generator needs some 80 bytes for each value."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The forced tokens [B] int64, and the log-probabilities [B] float32 of them, without noise.

    A row with a NaN or with +inf has a log-probability that is not finite, and some token of the vocabulary.
    """

    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a pass over the rows finds, each [B]: the token of the highest score (the lowest such) and that score;
    the largest logits / T, and the sum of exp(logits / T - largest), NaN in a row with a NaN or with +inf.
    """

    tokens: Tensor
    scores: Tensor
    largest: Tensor
    exponentials: Tensor


class Choose(Protocol):
    """`choose`, or another rule in its place."""

    def __call__(
        self, logits: Tensor, seeds: Sequence[bytes], positions: Sequence[int], *, temperature: float
    ) -> Choice:
        """As `choose`."""


def choose(logits: Tensor, seeds: Sequence[bytes], positions: Sequence[int], *, temperature: float) -> Choice:
    """The forced tokens of `logits` [B, V] float32, row r's by its seed (16 bytes) and completion position.

    -inf rules a token out. Raises ValueError for arguments that do not fit each other.
    """
    logits = logits.detach()
    words, where = _counters(logits, seeds, positions, temperature)
    peaks = _backend(logits.device.type)(logits, words, where, temperature)
    return Choice(peaks.tokens, _logprobs(_at(logits, peaks.tokens, temperature), peaks))


def appraise(
    logits: Tensor, tokens: Tensor, seeds: Sequence[bytes], positions: Sequence[int], *, temperature: float
) -> tuple[Tensor, Tensor]:
    """The log-probabilities [B] of the given tokens [B], and the margins [B] by which they lost: 0 if forced.

    Arguments as for `choose`; raises ValueError for a token outside the vocabulary as well.
    """
    logits = logits.detach()
    words, where = _counters(logits, seeds, positions, temperature)
    chosen = tokens.long().cpu().numpy()
    if chosen.shape != where.shape:
        raise ValueError("one token per row")
    # A gather out of bounds is an error on a CPU, but ends a CUDA process.
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < logits.shape[1]:
        raise ValueError("a token is outside the vocabulary")
    peaks = _backend(logits.device.type)(logits, words, where, temperature)
    scaled = _at(logits, tokens.long().to(logits.device), temperature)
    noise = torch.from_numpy(_noise_at(words, where, chosen)).to(logits.device)
    return _logprobs(scaled, peaks), peaks.scores - (scaled + noise)


def warm_up(device: torch.device | str) -> None:
    """Compile what `device` needs (seconds, once in a process), so that the first step is not slow."""
    choose(torch.zeros(1, 8, device=device), [bytes(SEED_BYTES)], [0], temperature=1.0)


def reference_peaks(
    logits: Tensor, words: NDArray[np.uint32], positions: NDArray[np.uint32], temperature: float
) -> Peaks:
    """By the definition, on any device; `words` [B, 4] are the seeds'."""
    step = max(1, MAX_NOISE_VALUES // logits.shape[1])
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        scaled = _scaled(logits[part], temperature)
        seeds = [row.astype("<u4").tobytes() for row in words[part]]
        noise = torch.from_numpy(gumbel_noise(seeds, positions[part].tolist(), vocabulary=logits.shape[1]))
        scores = scaled + noise.to(scaled.device)
        largest = scaled.amax(-1)
        tokens = scores.argmax(-1)
        parts.append((tokens, scores.amax(-1), largest, (scaled - largest[:, None]).exp().sum(-1)))
    return Peaks(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _counters(
    logits: Tensor, seeds: Sequence[bytes], positions: Sequence[int], temperature: float
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The seeds' words [B, 4] and the positions [B], checked against the other arguments."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
        raise ValueError("logits are [rows, vocabulary] in float32")
    if not len(logits) == len(seeds) == len(positions):
        raise ValueError("one seed and one position per row")
    if any(len(seed) != SEED_BYTES for seed in seeds):
        raise ValueError(f"a seed has {SEED_BYTES} bytes")
    if any(not 0 <= position < 2**32 for position in positions):
        raise ValueError("a position has 32 bits")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError("the temperature is above 0")
    words = np.frombuffer(b"".join(seeds), dtype="<u4").reshape(-1, 4).astype(np.uint32)
    return words, np.asarray(positions, dtype=np.uint32)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, rounded once. CUDA multiplies by the reciprocal of a number, but divides by a tensor."""
    return logits / torch.tensor(temperature, dtype=torch.float32, device=logits.device)


def _at(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return _scaled(logits.gather(1, tokens[:, None])[:, 0], temperature)


def _logprobs(scaled: Tensor, peaks: Peaks) -> Tensor:
    return (scaled - peaks.largest) - peaks.exponentials.log().float()


def _noise_at(
    words: NDArray[np.uint32], positions: NDArray[np.uint32], tokens: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The protocol's noise [B] of one token in each row (section 4.3)."""
    seeds = words.astype(np.uint64).T
    counter = np.stack((tokens.astype(np.uint64) // np.uint64(4), positions.astype(np.uint64), seeds[2], seeds[3]))
    out = philox4x32(counter, seeds[:2])
    noise: NDArray[np.float32] = gumbel_table()[table_index(out[tokens % 4, np.arange(len(tokens))])]
    return noise


_Backend: TypeAlias = Callable[[Tensor, NDArray[np.uint32], NDArray[np.uint32], float], Peaks]


@cache
def _backend(device_type: str) -> _Backend:
    """Imported when first used: each takes a while to import, and the CPU's compiles as it is imported."""
    if device_type == "cpu":
        from node.sampling_numba import peaks  # noqa: PLC0415

        return peaks
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        from node.sampling_triton import peaks as peaks_on_cuda  # noqa: PLC0415

        return peaks_on_cuda
    return reference_peaks
