"""Forced sampling on a CPU: one pass over each row's logits, compiled by numba when this module is imported.

A row is taken a block at a time, small enough to stay in the first-level cache: the block's largest logit and its
exponentials, its Philox words as indices of the noise table, and the largest score. Every loop is written so that
LLVM vectorises it (no branch, no store beside a gather, no floating-point reduction but the one sum), and its
arithmetic is that of `node.protocol.sampling`: each operation rounded to float32 by itself, without fast-math and
without fused multiply-adds, so scores agree bit for bit.

A block whose largest logit could not win even with the table's largest noise needs no noise at all.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numba import njit, types  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

from node.protocol.sampling import gumbel_table
from node.sampling import Peaks

BLOCK = 1024
"""Tokens taken at once; a multiple of 4."""

_PARALLEL_VALUES = 2**17
"""Fewer logits than this are done sooner than another thread wakes."""

_FIRST, _SECOND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_FIRST, _WEYL_SECOND = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HIGH_SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

_LINEAR_WORDS = np.uint32(1 << 12)
_KEPT_BITS = np.uint32(12)
_INDEX_SHIFT = np.uint32(23 - 11)
_INDEX_BIAS = np.uint32((127 + 10) << 11)

_SIGN_SHIFT, _MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)
_LOWEST = np.int32(-(2**31))

# exp(x) = 2**n exp(r): adding 1.5 * 2**23 rounds to an integer, ln 2 is subtracted in two parts, and exp(r) for
# |r| <= ln(2) / 2 is Cephes' polynomial (expf, S. L. Moshier).
_ROUNDING = np.float32(12582912.0)
_ROUNDING_BITS = np.int32(0x4B400000)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_E7, _E6, _E5 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_E4, _E3, _E2 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ONE = np.float32(1.0)
_SMALLEST_POWER = np.float32(-87.0)
_EXPONENT_SHIFT, _EXPONENT_BIAS = np.int32(23), np.int32(127)

_jit = njit(nogil=True, error_model="numpy")


@_jit  # type: ignore[untyped-decorator]
def table_entry(word: np.uint32) -> np.uint32:
    """The table entry for a 32-bit word, as `table_index`.

    From 2**12 on, a float32's exponent and the first 11 bits of its fraction are octave and entry in one. The
    conversion rounds to 24 bits; `word >> 12` has its leading one below the 12 bits that count, and clearing that
    bit keeps a carry out of them.
    """
    bits = np.float32(word & ~(word >> _KEPT_BITS)).view(np.uint32)
    return word if word < _LINEAR_WORDS else (bits >> _INDEX_SHIFT) - _INDEX_BIAS


@_jit  # type: ignore[untyped-decorator]
def _order(value: np.float32) -> np.int32:
    """An integer in the order of floats, whose maximum LLVM can vectorise; a positive NaN is above infinity.

    It puts -0.0 below 0.0, which are equal as scores; but no noise is zero, so no score is -0.0.
    """
    bits = np.float32(value).view(np.int32)
    return bits ^ ((bits >> _SIGN_SHIFT) & _MAGNITUDE)


@_jit  # type: ignore[untyped-decorator]
def _value(order: np.int32) -> np.float32:
    """What `_order` was given."""
    return np.int32(order ^ ((order >> _SIGN_SHIFT) & _MAGNITUDE)).view(np.float32)


@_jit  # type: ignore[untyped-decorator]
def _entries(out: NDArray[np.uint32], first: np.uint64, where: np.uint64, words: NDArray[np.uint32]) -> None:
    """Table entries of 4 tokens for each counter from `first` on.

    A word has 64 bits here: x86's vectors multiply the low halves of such lanes. Two loops are faster than one.
    """
    s0, s1, s2, s3 = np.uint64(words[0]), np.uint64(words[1]), np.uint64(words[2]), np.uint64(words[3])
    for quad in range(out.size // 4):
        c0, c1, c2, c3 = first + np.uint64(quad), where, s2, s3
        k0, k1 = s0, s1
        for _ in range(10):
            p0, p1 = _FIRST * (c0 & _LOW), _SECOND * (c2 & _LOW)
            c0, c1, c2, c3 = (p1 >> _HIGH_SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HIGH_SHIFT) ^ c3 ^ k1, p0 & _LOW
            k0, k1 = (k0 + _WEYL_FIRST) & _LOW, (k1 + _WEYL_SECOND) & _LOW
        out[4 * quad], out[4 * quad + 1] = np.uint32(c0), np.uint32(c1)
        out[4 * quad + 2], out[4 * quad + 3] = np.uint32(c2), np.uint32(c3)
    for token in range(out.size):
        out[token] = table_entry(out[token])


@_jit  # type: ignore[untyped-decorator]
def _scaled(out: NDArray[np.float32], logits: NDArray[np.float32], temperature: np.float32) -> np.int32:
    """Write logits / temperature to `out`; returns their highest."""
    highest = _LOWEST
    for token in range(logits.size):
        scaled = logits[token] / temperature
        out[token] = scaled
        highest = max(highest, _order(scaled))
    return highest


@_jit  # type: ignore[untyped-decorator]
def _highest_score(scaled: NDArray[np.float32], entries: NDArray[np.uint32], table: NDArray[np.float32]) -> np.int32:
    highest = _LOWEST
    for token in range(scaled.size):
        highest = max(highest, _order(scaled[token] + table[entries[token]]))
    return highest


@_jit  # type: ignore[untyped-decorator]
def _first_with(
    score: np.int32, scaled: NDArray[np.float32], entries: NDArray[np.uint32], table: NDArray[np.float32]
) -> int:
    """The lowest token with that score; 0 where a NaN's bits came out another way."""
    for token in range(scaled.size):
        if _order(scaled[token] + table[entries[token]]) == score:
            return token
    return 0


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _exponentials(out: NDArray[np.float32], scaled: NDArray[np.float32], shift: np.float32) -> None:
    """exp(scaled - shift) to within 2 units in the last place, at least exp(-87); a NaN stays one."""
    for token in range(scaled.size):
        power = scaled[token] - shift
        # Not `max`: a NaN has to stay.
        power = _SMALLEST_POWER if power < _SMALLEST_POWER else power  # noqa: FURB136
        rounded = power * _LOG2_E + _ROUNDING
        whole = rounded - _ROUNDING
        rest = power - whole * _LN2_HIGH
        rest = rest - whole * _LN2_LOW
        series = ((((_E7 * rest + _E6) * rest + _E5) * rest + _E4) * rest + _E3) * rest + _E2
        exponent = np.float32(rounded).view(np.int32) - _ROUNDING_BITS + _EXPONENT_BIAS
        scale = np.int32(exponent << _EXPONENT_SHIFT).view(np.float32)
        out[token] = (series * rest * rest + rest + _ONE) * scale


@njit(nogil=True, fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _total(values: NDArray[np.float32]) -> np.float32:
    """Their sum, in whatever order is fast: it goes into log-probabilities, which are compared with a tolerance."""
    total = np.float32(0.0)
    for index in range(values.size):
        total += values[index]
    return total


@njit(  # type: ignore[untyped-decorator]
    types.void(
        types.Array(types.float32, 2, "C", readonly=True),
        types.Array(types.uint32, 2, "C", readonly=True),
        types.Array(types.uint32, 1, "C", readonly=True),
        types.float32,
        types.Array(types.float32, 1, "C", readonly=True),
        types.int64,
        types.int64,
        types.int64[::1],
        types.float32[::1],
        types.float32[::1],
        types.float64[::1],
    ),
    nogil=True,
    error_model="numpy",
)
def _rows(  # noqa: PLR0917
    logits: NDArray[np.float32],
    words: NDArray[np.uint32],
    positions: NDArray[np.uint32],
    temperature: np.float32,
    table: NDArray[np.float32],
    start: int,
    end: int,
    tokens: NDArray[np.int64],
    scores: NDArray[np.float32],
    maxima: NDArray[np.float32],
    sums: NDArray[np.float64],
) -> None:
    vocabulary = logits.shape[1]
    entries = np.empty(BLOCK, np.uint32)
    scaled_block, powers_block = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for row in range(start, end):
        best, token, largest, total = _LOWEST, 0, _LOWEST, 0.0
        for first in range(0, vocabulary, BLOCK):
            size = min(BLOCK, vocabulary - first)
            scaled, powers = scaled_block[:size], powers_block[:size]
            highest = _scaled(scaled, logits[row, first : first + size], temperature)
            if highest > largest:
                total = total * math.exp(_value(largest) - _value(highest)) if first else total
                largest = highest
            # Before the first logit above -inf there is nothing to scale by, and -inf - -inf would be NaN.
            shift = np.float32(0.0) if _value(largest) == -np.inf else _value(largest)
            _exponentials(powers, scaled, shift)
            total += _total(powers)
            # Rounding is monotone: no score of the block is above this, and an equal one loses to its lower token.
            if _order(_value(highest) + table[0]) <= best:
                continue
            quads = (size + 3) // 4
            _entries(entries[: 4 * quads], np.uint64(first // 4), np.uint64(positions[row]), words[row])
            score = _highest_score(scaled, entries, table)
            if score > best:
                best, token = score, first + _first_with(score, scaled, entries, table)
        tokens[row], scores[row], maxima[row], sums[row] = token, _value(best), _value(largest), total


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sampling")


# A forked child has the pool, but not its threads: it would wait for them forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)


def peaks(logits: Tensor, words: NDArray[np.uint32], positions: NDArray[np.uint32], temperature: float) -> Peaks:
    """The rows' peaks for `logits` [B, V] float32 on a CPU, in as many threads as torch has."""
    rows = len(logits)
    out = (np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.float32), np.empty(rows))
    threads = min(rows, torch.get_num_threads()) if logits.numel() >= _PARALLEL_VALUES else 1
    values = logits.contiguous().numpy()

    def part(index: int) -> None:
        start, end = rows * index // threads, rows * (index + 1) // threads
        _rows(values, words, positions, np.float32(temperature), gumbel_table(), start, end, *out)

    if threads == 1:
        part(0)
    else:
        list(_pool(threads).map(part, range(threads)))
    return Peaks(*map(torch.from_numpy, out))
