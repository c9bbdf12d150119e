"""Forced sampling on a CPU: one pass over each row's logits, compiled by numba on the first import.

A row is processed in blocks that fit the first-level cache: the block's largest logit and exponentials, its Philox
words as indices of the noise table, and the largest score. Every loop is written to be vectorised by LLVM (no branch,
no store beside a gather, one floating-point reduction only), and rounds like `node.protocol.sampling`: each operation
to float32 by itself, without fast-math or fused multiply-adds, so scores agree bit for bit.

A block whose largest logit could not win even with the largest noise needs no noise at all.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numba import njit, types  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

from node.protocol.sampling import gumbel_table
from node.sampling.types import Peaks

log = logging.getLogger(__name__)

BLOCK = 1024
"""Tokens per block; a multiple of 4."""

_PARALLEL_VALUES = 2**17
"""Below this many logits, another thread would take longer to wake than to help."""

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

# A third of the time to compile went to wrappers through which Python and C could call each function, and to numba's
# own `view` and `empty`, which are compiled for each type that they are used with.
_OUTER = {"nogil": True, "error_model": "numpy"}
_INNER = {**_OUTER, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_jit = njit(**_INNER)


def _reinterpreted(given: types.Type, result: types.Type) -> Callable[..., Any]:
    """Make the function of compiled code that returns the bits of a `given` as a `result` of the same size."""

    def typed(_: Any, value: types.Type) -> tuple[Any, Callable[..., Any]] | None:
        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(result))

        return (result(given), generate) if value == given else None

    return cast("Callable[..., Any]", intrinsic(typed))


_float_bits = _reinterpreted(types.float32, types.int32)
_float_of_bits = _reinterpreted(types.int32, types.float32)


@njit(**_OUTER)  # type: ignore[untyped-decorator]
def table_entry(word: np.uint32) -> np.uint32:
    """Return the noise table entry of a 32-bit word, like `table_index`.

    From 2**12 on, a float32's exponent and the first 11 bits of its fraction are octave and entry in one. The
    conversion rounds to 24 bits; `word >> 12` has its leading one below the 12 bits that count, and clearing that bit
    keeps a carry out of them.
    """
    bits = np.uint32(_float_bits(np.float32(word & ~(word >> _KEPT_BITS))))
    return word if word < _LINEAR_WORDS else (bits >> _INDEX_SHIFT) - _INDEX_BIAS


@_jit  # type: ignore[untyped-decorator]
def _sortable(value: np.float32) -> np.int32:
    """Map a float to an integer of the same order, whose maximum LLVM can vectorise; a positive NaN is above infinity.

    It orders -0.0 below 0.0, which are equal as scores; but no noise is zero, so no score is -0.0.
    """
    bits = _float_bits(value)
    return np.int32(bits ^ ((bits >> _SIGN_SHIFT) & _MAGNITUDE))


@_jit  # type: ignore[untyped-decorator]
def _unsortable(order: np.int32) -> np.float32:
    """Invert `_sortable`."""
    return np.float32(_float_of_bits(np.int32(order ^ ((order >> _SIGN_SHIFT) & _MAGNITUDE))))


@_jit  # type: ignore[untyped-decorator]
def _noise_entries(out: NDArray[np.uint32], first: np.uint64, position: np.uint64, words: NDArray[np.uint32]) -> None:
    """Fill `out` with the table entries of 4 tokens per counter from `first` on.

    Words have 64 bits here, since x86 vectors multiply the low halves of such lanes. Two loops are faster than one.
    """
    s0, s1, s2, s3 = np.uint64(words[0]), np.uint64(words[1]), np.uint64(words[2]), np.uint64(words[3])
    for quad in range(out.size // 4):
        c0, c1, c2, c3 = first + np.uint64(quad), position, s2, s3
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
def _scale(out: NDArray[np.float32], logits: NDArray[np.float32], temperature: np.float32) -> np.int32:
    """Write logits / temperature to `out` and return the maximum in `_sortable` form."""
    highest = _LOWEST
    for token in range(logits.size):
        scaled = logits[token] / temperature
        out[token] = scaled
        highest = max(highest, _sortable(scaled))
    return highest


@_jit  # type: ignore[untyped-decorator]
def _highest_score(scaled: NDArray[np.float32], entries: NDArray[np.uint32], table: NDArray[np.float32]) -> np.int32:
    highest = _LOWEST
    for token in range(scaled.size):
        highest = max(highest, _sortable(scaled[token] + table[entries[token]]))
    return highest


@_jit  # type: ignore[untyped-decorator]
def _first_token_with(
    score: np.int32, scaled: NDArray[np.float32], entries: NDArray[np.uint32], table: NDArray[np.float32]
) -> int:
    """Return the lowest token with that score; 0 if a NaN's bits differ."""
    for token in range(scaled.size):
        if _sortable(scaled[token] + table[entries[token]]) == score:
            return token
    return 0


@njit(**_INNER, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _exponentials(out: NDArray[np.float32], scaled: NDArray[np.float32], shift: np.float32) -> None:
    """Compute exp(scaled - shift) to within 2 units in the last place, at least exp(-87); NaN is preserved."""
    for token in range(scaled.size):
        power = scaled[token] - shift
        # Not `max`, which would drop a NaN.
        power = _SMALLEST_POWER if power < _SMALLEST_POWER else power  # noqa: FURB136
        rounded = power * _LOG2_E + _ROUNDING
        whole = rounded - _ROUNDING
        remainder = power - whole * _LN2_HIGH
        remainder = remainder - whole * _LN2_LOW
        series = ((((_E7 * remainder + _E6) * remainder + _E5) * remainder + _E4) * remainder + _E3) * remainder + _E2
        exponent = _float_bits(rounded) - _ROUNDING_BITS + _EXPONENT_BIAS
        scale = _float_of_bits(np.int32(exponent << _EXPONENT_SHIFT))
        out[token] = (series * remainder * remainder + remainder + _ONE) * scale


@njit(**_INNER, fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _sum_fast(values: NDArray[np.float32]) -> np.float32:
    """Sum in any order; used for log-probabilities, which are compared with a tolerance."""
    total = np.float32(0.0)
    for index in range(values.size):
        total += values[index]
    return total


_SIGNATURE = types.void(
    types.Array(types.float32, 2, "C", readonly=True),
    types.Array(types.uint32, 2, "C", readonly=True),
    types.Array(types.uint32, 1, "C", readonly=True),
    types.float32,
    types.Array(types.float32, 1, "C", readonly=True),
    types.int64,
    types.int64,
    types.int64,
    types.int64[::1],
    types.float32[::1],
    types.float32[::1],
    types.float64[::1],
    types.uint32[::1],
    types.float32[::1],
    types.float32[::1],
)


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile `function` for `_SIGNATURE` on this machine, or load what an earlier process compiled.

    numba keeps it beside Python's own compiled files, by the processor's features and this file's time and size, and it
    is trusted as those are. That may fail in many ways (nothing to write to, a full disk, a file cut short by a crash):
    then it is compiled anew.
    """
    try:
        return cast("Callable[..., None]", njit(_SIGNATURE, cache=True, **_OUTER)(function))
    except Exception:
        log.debug("what numba compiles is not kept", exc_info=True)
        return cast("Callable[..., None]", njit(_SIGNATURE, **_OUTER)(function))


@_compiled
def _rows(  # noqa: PLR0917
    logits: NDArray[np.float32],
    words: NDArray[np.uint32],
    positions: NDArray[np.uint32],
    temperature: np.float32,
    table: NDArray[np.float32],
    below: int,
    start: int,
    end: int,
    tokens: NDArray[np.int64],
    scores: NDArray[np.float32],
    maxima: NDArray[np.float32],
    sums: NDArray[np.float64],
    entries: NDArray[np.uint32],
    scaled_block: NDArray[np.float32],
    powers_block: NDArray[np.float32],
) -> None:
    """Fill rows `start` to `end` of `tokens` to `sums`; the last three are scratch memory for BLOCK tokens.

    The first logit is that of token `below`, a multiple of 4; above 0, the rows have the results of those below.
    """
    vocabulary = logits.shape[1]
    for row in range(start, end):
        best, token, largest, total = _LOWEST, 0, _LOWEST, 0.0
        if below:
            best, token, largest, total = _sortable(scores[row]), tokens[row], _sortable(maxima[row]), sums[row]
        for first in range(0, vocabulary, BLOCK):
            size = min(BLOCK, vocabulary - first)
            scaled, powers = scaled_block[:size], powers_block[:size]
            highest = _scale(scaled, logits[row, first : first + size], temperature)
            if highest > largest:
                total = total * math.exp(_unsortable(largest) - _unsortable(highest)) if below + first else total
                largest = highest
            # Before the first logit above -inf there is nothing to subtract, and -inf - -inf would be NaN.
            shift = np.float32(0.0) if _unsortable(largest) == -np.inf else _unsortable(largest)
            _exponentials(powers, scaled, shift)
            total += _sum_fast(powers)
            # Rounding is monotone, so no score of the block is above this; an equal one loses to the lower token.
            if _sortable(_unsortable(highest) + table[0]) <= best:
                continue
            quads = (size + 3) // 4
            _noise_entries(entries[: 4 * quads], np.uint64((below + first) // 4), np.uint64(positions[row]), words[row])
            score = _highest_score(scaled, entries, table)
            if score > best:
                best, token = score, below + first + _first_token_with(score, scaled, entries, table)
        tokens[row], scores[row], maxima[row], sums[row] = token, _unsortable(best), _unsortable(largest), total


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sampling")


# A forked child inherits the pool without its threads, and would wait for them forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)


def peaks(
    logits: Tensor,
    words: NDArray[np.uint32],
    positions: NDArray[np.uint32],
    temperature: float,
    before: tuple[Peaks, int] | None = None,
) -> Peaks:
    """Compute the rows' peaks of `logits` [B, V] float32 on a CPU, using torch's number of threads.

    `before` are the peaks of the first so many tokens, a multiple of 4: the logits are then those of the tokens behind
    them, and the result is of both.
    """
    rows = len(logits)
    below = 0
    out: tuple[NDArray[Any], ...] = (
        np.empty(rows, np.int64),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
        np.empty(rows),
    )
    if before is not None:
        found, below = before
        for held, column in zip(out, (found.tokens, found.scores, found.largest, found.exponentials), strict=True):
            held[:] = column.numpy()
    threads = min(rows, torch.get_num_threads()) if logits.numel() >= _PARALLEL_VALUES else 1
    values = logits.contiguous().numpy()

    def part(index: int) -> None:
        start, end = rows * index // threads, rows * (index + 1) // threads
        blocks = (np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32))
        _rows(values, words, positions, np.float32(temperature), gumbel_table(), below, start, end, *out, *blocks)

    if threads == 1:
        part(0)
    else:
        list(_pool(threads).map(part, range(threads)))
    return Peaks(*map(torch.from_numpy, out))
