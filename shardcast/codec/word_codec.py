"""How the words of one segment changed: the codec under `shardcast.codec.delta`, which describes the container.

A segment is a run of U words of 1, 2, 4 or 8 bytes, read as unsigned little-endian integers. The step of a
changed word is (new - base) modulo 2**bits, taken as a signed number: no float arithmetic, so -0.0, NaN
payloads and infinities survive. The magnitude of a word is the word without its top bit: for floats, |x| in
the order of its size. Every integer is little-endian. Bodies by mode:

UNCHANGED  empty: the words are the base's.

SPARSE     few words changed, at most half (rounded up). Optimisers move all weights by about as much, so
           those that change most often are the small ones, whose units in the last place are fine: words are
           divided into classes by the magnitude of the base's word, and each class is coded by itself.
    u8     C, the number of classes, 1 to 8
    u64    C - 1 thresholds, strictly falling, above 0. Class c > 0 holds the words of magnitude < threshold c
           and >= threshold c + 1 (0 after the last); a word's rank is its index among the words of its class.
           In class 0 are all others, but a rank there is the index among all words of the segment.
    for each class, in order:
        set    the ranks of the changed words, out of the size of the class (class 0: of the segment)
        bits   one for each changed word: 1 when its step is negative
        set    which of the changed words (counted from 0) have steps other than +1 and -1
        sizes  |step| - 2 of those
    `shardcast.codec.bits` describes sets and sizes.

DENSE      most words changed. The zigzag of the step ((step << 1) ^ (step >> bits - 1), so that steps near zero
           are small numbers) of every word, in byte planes, the lowest first; for each plane:
    u32    length in bytes
    bytes  the plane itself when the length is U, otherwise one zstd frame (RFC 8878) that states its content
           size, which is U, and has a window of at most 4 MiB

FRESH      the base is of no use: the planes of the new words themselves, as in DENSE.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from shardcast.codec.bits import (
    Positions,
    Reader,
    bad_delta,
    encode_set,
    encode_sizes,
    find,
    pack_bits,
    read_set,
    read_sizes,
)

MAX_SEGMENT_WORDS = 2**21
WORD_TYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}

Words = npt.NDArray[Any]
"""One-dimensional, of one of WORD_TYPES."""

_MAX_CLASSES = 8
_MAX_ZSTD_WINDOW_BYTES = 2**22
_LENGTH = struct.Struct("<I")
_THRESHOLD = struct.Struct("<Q")

# The encoder's choices; any others are as valid.
_ALWAYS_SPARSE, _NEVER_SPARSE = 1 / 16, 1 / 2  # of the words changed; in between, what is cheapest by estimate
_DENSE_SPEED_WORTH = 1.2  # times the bytes: where half of the words change, dense decodes five times as fast
_SAMPLE_WORDS = 2**14
_MIN_CHANGED_FOR_CLASSES = 256
_CLASS_OVERHEAD_BITS = 8 * 40
# Shares of the words below each threshold. The finer the classes, the slower; these lose 3 % to octaves.
_DIVISIONS = ((1 / 4,), (1 / 8,), (1 / 8, 1 / 64), (1 / 4, 1 / 16, 1 / 64), (1 / 8, 1 / 32, 1 / 128))
# Matches are rare in planes of differences and cost more than they save: what counts is zstd's Huffman coder.
_ZSTD = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17
)


class Mode(IntEnum):
    UNCHANGED = 0
    SPARSE = 1
    DENSE = 2
    FRESH = 3


def encode_words(base: Words, result: Words) -> tuple[Mode, bytes]:
    """Encode a segment of up to MAX_SEGMENT_WORDS as (mode, body); the body is never much longer than the segment."""
    positions = find(base != result)
    if not positions.size:
        return Mode.UNCHANGED, b""
    mode = _cheapest(base, result, positions)
    if mode is Mode.SPARSE:
        body = _sparse_body(base, result, positions)
        if len(body) < result.nbytes:
            return mode, body
        mode = Mode.FRESH
    if mode is Mode.DENSE:
        return mode, _planes_body(_zigzag(result - base))
    return mode, _planes_body(result)


def decode_words(mode: int, body: memoryview, words: Words) -> None:
    """Decode `body` onto the base's `words`, in place.

    Raises Malformed "bad_delta", which leaves `words` undefined. Memory: at most 60 bytes per changed word and 20 per
    word below the thresholds, or three times the segment in the other modes.
    """
    reader = Reader(body)
    if mode == Mode.SPARSE:
        _apply_sparse(reader, words)
    elif mode == Mode.DENSE:
        words += _unzigzag(_read_planes(reader, words))
    elif mode == Mode.FRESH:
        words[:] = _read_planes(reader, words)
    elif mode != Mode.UNCHANGED:
        raise bad_delta(f"unknown segment mode {mode}")
    reader.finish()


# Choosing a mode from a sample


def _cheapest(base: Words, result: Words, positions: Positions) -> Mode:
    """Estimate each mode's cost on a sample and return the cheapest."""
    share = len(positions) / len(base)
    if share <= _ALWAYS_SPARSE:
        return Mode.SPARSE
    every = _stride(len(base))
    steps = result[::every] - base[::every]
    costs = {Mode.DENSE: _plane_bits(_zigzag(steps)), Mode.FRESH: _plane_bits(result[::every].copy())}
    if share <= _NEVER_SPARSE:
        sizes = _magnitudes(steps[steps != 0])
        large = sizes[sizes > 1].astype(np.float64)
        bits = len(sizes) * (1 + _entropy([len(large), len(sizes) - len(large)])) + float(np.log2(2 * large).sum())
        per_change = bits / max(1, len(sizes))
        costs[Mode.SPARSE] = _DENSE_SPEED_WORTH * (_entropy([share, 1 - share]) + share * per_change)
    return min(costs, key=lambda mode: costs[mode])


def _plane_bits(sample: Words) -> float:
    """Estimate the bits per word when coded as byte planes."""
    return 8 * len(_planes_body(sample)) / len(sample)


def _entropy(weights: npt.ArrayLike) -> float:
    """Compute the Shannon entropy in bits per symbol."""
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares[shares > 0] / shares.sum()
    return float(-(shares * np.log2(shares)).sum())


def _stride(count: int) -> int:
    """Return a stride that samples about _SAMPLE_WORDS of `count`; odd, as matrix rows are seldom of odd length."""
    return count // _SAMPLE_WORDS | 1


# Sparse


def _sparse_body(base: Words, result: Words, positions: Positions) -> bytes:
    changed_base = base[positions]
    steps = result[positions] - changed_base
    thresholds = _thresholds(base, changed_base)
    parts = [bytes([len(thresholds) + 1]), *(_THRESHOLD.pack(threshold) for threshold in thresholds)]
    magnitudes = _magnitude_of_words(changed_base)
    for members, (high, low) in zip(_classes(base, thresholds), _bounds(thresholds, base), strict=True):
        inside = np.flatnonzero((magnitudes < high) & (magnitudes >= low))
        ranks = positions[inside] if members is None else np.searchsorted(members, positions[inside])
        parts += _class_parts(ranks, steps[inside])
    return b"".join(parts)


def _class_parts(ranks: Positions, steps: Words) -> list[bytes]:
    sizes = _magnitudes(steps)
    large = np.flatnonzero(sizes > 1)
    return [
        *encode_set(ranks),
        pack_bits(_signed(steps) < 0),
        *encode_set(large),
        *encode_sizes(sizes[large].astype(np.uint64) - np.uint64(2)),
    ]


def _apply_sparse(reader: Reader, words: Words) -> None:
    (classes,) = reader.read(1)
    if not 1 <= classes <= _MAX_CLASSES:
        raise bad_delta(f"{classes} word classes are out of bounds")
    thresholds = [int(reader.unpack(_THRESHOLD)[0]) for _ in range(classes - 1)]
    if not all(high > low for high, low in _bounds(thresholds, words)):
        raise bad_delta("class thresholds are not strictly falling")
    changes = []
    changes_left = (len(words) + 1) // 2
    for members in _classes(words, thresholds):
        size = len(words) if members is None else len(members)
        ranks, steps = _read_class(reader, size, words.dtype, max_changes=changes_left)
        changes.append((ranks if members is None else members[ranks], steps))
        changes_left -= len(ranks)
    for positions, steps in changes:
        words[positions] += steps


def _read_class(reader: Reader, size: int, dtype: np.dtype[Any], *, max_changes: int) -> tuple[Positions, Words]:
    """Read (ranks, steps) of at most `max_changes` changed words in a class of `size` words."""
    ranks = read_set(reader, size, max_count=max_changes)
    negative = reader.bits(len(ranks)).view(np.bool_)
    large = read_set(reader, len(ranks), max_count=len(ranks))
    sizes = read_sizes(reader, len(large))
    if large.size and int(sizes.max()) + 2 > 1 << 8 * dtype.itemsize - 1:
        raise bad_delta("step exceeds half the range of its word")
    steps = np.ones(len(ranks), dtype)
    steps[large] = sizes + np.uint64(2)
    np.negative(steps, out=steps, where=negative)
    return ranks, steps


def _bounds(thresholds: list[int], words: Words) -> Iterator[tuple[int, int]]:
    """Yield the magnitude bounds (exclusive high, inclusive low) of every class."""
    return pairwise([(1 << 8 * words.itemsize - 1) + 1, *thresholds, 0])


def _classes(base: Words, thresholds: list[int]) -> Iterator[Positions | None]:
    """Yield the positions of every class's words; None for class 0, whose ranks are positions."""
    yield None
    if not thresholds:
        return
    members = find(_magnitude_of_words(base) < thresholds[0])
    magnitudes = _magnitude_of_words(base[members])
    for low in (*thresholds[1:], 0):
        # Indices, since numpy is six times slower in selecting by a mask as irregular as this.
        inside, below = np.flatnonzero(magnitudes >= low), np.flatnonzero(magnitudes < low)
        yield members[inside]
        members, magnitudes = members[below], magnitudes[below]


def _thresholds(base: Words, changed_base: Words) -> list[int]:
    """Choose the class thresholds with the lowest estimated cost; empty when none saves enough."""
    changed, words = len(changed_base), len(base)
    if changed < _MIN_CHANGED_FOR_CLASSES or base.itemsize == 1:
        return []
    sample = np.sort(_magnitude_of_words(base[:: _stride(words)]))
    magnitudes = np.sort(_magnitude_of_words(changed_base))
    best: list[int] = []
    least = 0.98 * words * _entropy([changed, words - changed])
    for division in _DIVISIONS:
        thresholds = sorted({int(sample[int(share * len(sample))]) for share in division} - {0}, reverse=True)
        edges = np.array([*thresholds, 0], base.dtype)
        sizes = -np.diff(np.searchsorted(sample, edges) * (words / len(sample)), prepend=words)
        sizes[0] = words
        counts = -np.diff(np.searchsorted(magnitudes, edges), prepend=changed)
        cost = sum(
            size * _entropy([count, max(0.0, size - count)]) + _CLASS_OVERHEAD_BITS
            for size, count in zip(sizes, counts, strict=True)
        )
        if cost < least:
            best, least = thresholds, cost
    return best


def _magnitude_of_words(words: Words) -> Words:
    magnitudes: Words = words & words.dtype.type((1 << 8 * words.itemsize - 1) - 1)
    return magnitudes


def _magnitudes(steps: Words) -> Words:
    """Return |step|, or 2**(bits - 1) for the one step without a counterpart."""
    return np.abs(_signed(steps)).view(steps.dtype)


def _signed(steps: Words) -> Words:
    return steps.view(f"<i{steps.itemsize}")


# Dense and fresh


def _planes_body(words: Words) -> bytes:
    compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
    parts = []
    for plane in range(words.itemsize):
        data = (words >> 8 * plane).astype(np.uint8).tobytes()
        frame = compressor.compress(data)
        kept = min(data, frame, key=len)
        parts += [_LENGTH.pack(len(kept)), kept]
    return b"".join(parts)


def _read_planes(reader: Reader, template: Words) -> Words:
    words = np.empty_like(template)
    for plane in words.view(np.uint8).reshape(len(words), -1).T:
        (length,) = reader.unpack(_LENGTH)
        data = reader.read(length)
        plane[:] = np.frombuffer(data if length == len(words) else _decompress(data, len(words)), np.uint8)
    return words


def _decompress(frame: memoryview, size: int) -> bytes:
    """Decompress exactly `size` bytes; the frame's claims are checked before any allocation."""
    try:
        claimed = zstandard.get_frame_parameters(frame)
        if claimed.content_size != size or claimed.window_size > _MAX_ZSTD_WINDOW_BYTES:
            raise bad_delta("zstd frame size differs from its segment")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)
        data = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise bad_delta(f"plane is not a zstd frame: {error}") from error
    if len(data) != size:
        raise bad_delta("zstd frame size differs from its segment")
    return data


def _zigzag(steps: Words) -> Words:
    signed = _signed(steps)
    return (signed << 1 ^ signed >> 8 * steps.itemsize - 1).view(steps.dtype)


def _unzigzag(zigzag: Words) -> Words:
    return zigzag >> 1 ^ -(zigzag & 1)
