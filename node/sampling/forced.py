"""Forced sampling as used by engines and the verifier (docs/protocol.md, section 4).

`node.protocol.sampling` is the readable definition; this gives the same tokens and margins bit for bit, without storing
the noise: a numba kernel on a CPU (`node.sampling.cpu`), a Triton kernel on CUDA (`node.sampling.cuda`), and the
definition itself in bounded memory elsewhere. Log-probabilities are compared with a tolerance, and may differ in their
last bits between the three.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.protocol.sampling import gumbel_noise, gumbel_table, philox4x32, table_index
from node.protocol.slots import SEED_BYTES
from node.sampling.types import Choice, Peaks

MAX_NOISE_VALUES = 2**20
"""Noise values held at once without a kernel, in a few tensors of as many numbers."""


def choose(logits: Tensor, seeds: Sequence[bytes], positions: Sequence[int], *, temperature: float) -> Choice:
    """Choose the forced token of each row of `logits` [B, V] float32, by its seed (16 bytes) and completion position.

    -inf rules a token out. Raises ValueError for arguments that do not match.
    """
    logits = logits.detach()
    words, where = _counters(seeds, positions, temperature)
    _check_logits(logits, rows=len(where))
    peaks = _backend(logits.device.type)(logits, words, where, temperature)
    return Choice(peaks.tokens, _logprobs(_scaled_logits_of(logits, peaks.tokens, temperature), peaks))


def appraise(
    parts: Iterable[Tensor], tokens: Tensor, seeds: Sequence[bytes], positions: Sequence[int], *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [B] of given tokens [B], and the margins [B] by which they lost (0 if forced).

    `parts` are the logits as for `choose`, by consecutive columns, each used up before the next is taken. There may be
    several on a CPU alone, and each but the last has a multiple of 4. Other arguments as for `choose`; also raises
    ValueError for a token outside the vocabulary.
    """
    words, where = _counters(seeds, positions, temperature)
    chosen = tokens.long().cpu()
    if chosen.shape != where.shape:
        raise ValueError("there must be one token per row")
    own, first = torch.zeros(len(chosen), dtype=torch.float32), 0
    peaks: Peaks | None = None
    for part in parts:
        logits = part.detach()
        _check_logits(logits, rows=len(chosen))
        if first % 4:
            raise ValueError("a part of the vocabulary ends within four tokens that share their noise")
        carried = () if peaks is None else ((peaks, first),)
        peaks = _backend(logits.device.type)(logits, words, where, temperature, *carried)
        # Only what is in bounds: a gather out of bounds is an error on a CPU, but kills a CUDA process.
        here = ((chosen >= first) & (chosen < first + logits.shape[1])).nonzero()[:, 0]
        own[here] = logits[here, chosen[here] - first].cpu()
        first += logits.shape[1]
    if peaks is None or bool(((chosen < 0) | (chosen >= first)).any()):
        raise ValueError("a token is outside the vocabulary")
    scaled = _scale(own.to(peaks.scores.device), temperature)
    noise = torch.from_numpy(_noise_at(words, where, chosen.numpy())).to(scaled.device)
    return _logprobs(scaled, peaks), peaks.scores - (scaled + noise)


def warm_up(device: torch.device | str) -> None:
    """Compile the kernels of `device` (seconds, once per process) before the first step."""
    # Of a real vocabulary's divisibility, for which Triton compiles a kernel of its own.
    choose(torch.zeros(1, 16, device=device), [bytes(SEED_BYTES)], [0], temperature=1.0)


def reference_peaks(
    logits: Tensor, words: NDArray[np.uint32], positions: NDArray[np.uint32], temperature: float
) -> Peaks:
    """Compute the peaks by the definition, on any device; `words` [B, 4] are those of the seeds."""
    step = max(1, MAX_NOISE_VALUES // logits.shape[1])
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        scaled = _scale(logits[part], temperature)
        seeds = [row.astype("<u4").tobytes() for row in words[part]]
        noise = torch.from_numpy(gumbel_noise(seeds, positions[part].tolist(), vocabulary=logits.shape[1]))
        scores = scaled + noise.to(scaled.device)
        largest = scaled.amax(-1)
        tokens = scores.argmax(-1)
        parts.append((tokens, scores.amax(-1), largest, (scaled - largest[:, None]).exp().sum(-1)))
    return Peaks(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _check_logits(logits: Tensor, *, rows: int) -> None:
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
        raise ValueError("logits must be [rows, vocabulary] in float32")
    if len(logits) != rows:
        raise ValueError("there must be one seed and one position per row")


def _counters(
    seeds: Sequence[bytes], positions: Sequence[int], temperature: float
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Validate the arguments; return the seeds' words [B, 4] and the positions [B]."""
    if len(seeds) != len(positions):
        raise ValueError("there must be one seed and one position per row")
    if any(len(seed) != SEED_BYTES for seed in seeds):
        raise ValueError(f"a seed must have {SEED_BYTES} bytes")
    if any(not 0 <= position < 2**32 for position in positions):
        raise ValueError("a position must fit into 32 bits")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError("the temperature must be above 0")
    words = np.frombuffer(b"".join(seeds), dtype="<u4").reshape(-1, 4).astype(np.uint32)
    return words, np.asarray(positions, dtype=np.uint32)


def _scale(logits: Tensor, temperature: float) -> Tensor:
    """Compute logits / temperature, rounded once. CUDA would multiply by a scalar's reciprocal, but divides by a
    tensor; one that is filled there, as a copy from the host would wait for the device.
    """
    return logits / torch.full((), temperature, dtype=torch.float32, device=logits.device)


def _scaled_logits_of(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return _scale(logits.gather(1, tokens[:, None])[:, 0], temperature)


def _logprobs(scaled: Tensor, peaks: Peaks) -> Tensor:
    return (scaled - peaks.largest) - peaks.exponentials.log().float()


def _noise_at(
    words: NDArray[np.uint32], positions: NDArray[np.uint32], tokens: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the protocol's noise [B] of one token per row (section 4.3)."""
    seeds = words.astype(np.uint64).T
    counter = np.stack((tokens.astype(np.uint64) // np.uint64(4), positions.astype(np.uint64), seeds[2], seeds[3]))
    out = philox4x32(counter, seeds[:2])
    noise: NDArray[np.float32] = gumbel_table()[table_index(out[tokens % 4, np.arange(len(tokens))])]
    return noise


_Backend: TypeAlias = Callable[..., Peaks]
"""(logits, words, positions, temperature) to peaks; a CPU's goes on from the peaks of the tokens before."""


@cache
def _backend(device_type: str) -> _Backend:
    """Import the backend on first use: imports are slow, and the CPU's compiles on import."""
    if device_type == "cpu":
        from node.sampling.cpu import peaks  # noqa: PLC0415

        return peaks
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        from node.sampling.cuda import peaks as peaks_on_cuda  # noqa: PLC0415

        return peaks_on_cuda
    return reference_peaks
