"""Forced sampling: the token at position p is argmax(logits / T + gumbel(seed, p, token)).

The Gumbel-max trick (Maddison et al., arXiv 1411.0030) with noise from Philox4x32-10 (Salmon et al., SC'11),
so the choice is a deterministic function of the policy and the seed, with the distribution of ordinary
sampling. The noise is defined bit for bit (docs/protocol.md, section 4): 32 random bits choose an entry of a
float32 table, so no device's `log` takes part. The table has 2**11 entries per octave; a choice's
log-probability moves by less than 2**-11.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from node.protocol.slots import SEED_BYTES

TABLE_DIGEST = "487087ce087c45ee199c21a01b19e4a80dcec4f694a0d83ec53b25a603685f77"
BLOCK_VALUES = 2**16
"""Noise values made together, a multiple of 4: arrays in between take some 50 bytes for each, and fit a cache."""
_OCTAVE_BITS = 11
_ENTRIES = (33 - _OCTAVE_BITS) << _OCTAVE_BITS
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH_SHIFT = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Compute Philox4x32-10: `counter` [4, ...] and `key` [2, ...] hold 32-bit words; returns [4, ...] likewise."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _HIGH_SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HIGH_SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3))


@cache
def gumbel_table() -> NDArray[np.float32]:
    """Return the float32 Gumbel table, one entry per bin; raises ArithmeticError if this CPU's differs."""
    first = np.arange(_ENTRIES, dtype=np.int64)
    octave = np.maximum((first >> _OCTAVE_BITS) - 1, 0)
    low = (first - (octave << _OCTAVE_BITS)) << octave
    middle = (low + (1 << octave) / 2.0) * 2.0**-32
    table: NDArray[np.float32] = (-np.log(-np.log1p(-middle))).astype("<f4")
    if blake3(table.tobytes()).hexdigest() != TABLE_DIGEST:
        raise ArithmeticError("this machine's logarithm yields another noise table than the protocol's")
    table.setflags(write=False)
    return table


def table_index(bits: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the table entry for each 32-bit word: r below 2**12, else its octave and its next 11 bits."""
    octave = np.maximum(np.frexp(bits.astype(np.float64))[1] - 1 - _OCTAVE_BITS, 0).astype(np.uint64)
    index: NDArray[np.int64] = ((octave << np.uint64(_OCTAVE_BITS)) + (bits >> octave)).astype(np.int64)
    return index


def gumbel_noise(seeds: list[bytes], positions: list[int], *, vocabulary: int) -> NDArray[np.float32]:
    """Return noise [rows, vocabulary] for each row's seed (16 bytes) and completion position (from 0).

    Besides the result it takes a few MiB, whatever the vocabulary.
    """
    if len(seeds) != len(positions):
        raise ValueError("one position per seed")
    if any(len(seed) != SEED_BYTES for seed in seeds):
        raise ValueError(f"a seed has {SEED_BYTES} bytes")
    words = np.frombuffer(b"".join(seeds), dtype="<u4").reshape(len(seeds), 4).astype(np.uint64)
    where = np.asarray(positions, dtype=np.uint64)
    noise = np.empty((len(seeds), vocabulary), dtype=np.float32)
    rows = max(1, BLOCK_VALUES // vocabulary)
    for top in range(0, len(seeds), rows):
        for first in range(0, vocabulary, BLOCK_VALUES):
            block = noise[top : top + rows, first : first + BLOCK_VALUES]
            block[:] = _noise_block(words[top : top + rows], where[top : top + rows], first, block.shape[1])
    return noise


def _noise_block(
    words: NDArray[np.uint64], positions: NDArray[np.uint64], first: int, count: int
) -> NDArray[np.float32]:
    """Return the noise [rows, count] of the tokens from `first` on, a multiple of 4, by the seeds' words [rows, 4]."""
    quads = np.arange(first // 4, (first + count + 3) // 4, dtype=np.uint64)[None, :]
    counter = np.stack(np.broadcast_arrays(quads, positions[:, None], words[:, 2:3], words[:, 3:4]))
    bits = philox4x32(counter, np.stack((words[:, 0:1], words[:, 1:2])))
    per_token = bits.transpose(1, 2, 0).reshape(len(words), -1)[:, :count]
    noise: NDArray[np.float32] = gumbel_table()[table_index(per_token)]
    return noise
