"""From one version of a file to the next (section 10.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import zstandard

from .values import Refused

MIB4 = 4 * 2**20
MAX_WORDS = 2**21


class Body:
    """Bytes that are read from the front, and must be used up."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise Refused("bad_delta", "something is missing")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def bits(self, count: int) -> np.ndarray:
        raw = np.frombuffer(self.take((count + 7) // 8), dtype=np.uint8)
        bits = np.unpackbits(raw, bitorder="little")
        if bits[count:].any():
            raise Refused("bad_delta", "a bit string is filled up with ones")
        return bits[:count]

    def unary(self, count: int, length: int) -> np.ndarray:
        """Return `count` numbers, each so many zeros and a one, of a string of `length` bits."""
        ones = np.flatnonzero(self.bits(length))
        if len(ones) != count or length != (int(ones[-1]) + 1 if count else 0):
            raise Refused("bad_delta", "a unary string")
        return np.diff(ones, prepend=-1) - 1

    def end(self) -> None:
        if self.at != len(self.data):
            raise Refused("bad_delta", "something is left over")


def read_set(body: Body, size: int) -> np.ndarray:
    """Return a set of rising numbers below `size` (Rice codes)."""
    count, length, k = body.number(4), body.number(4), body.number(1)
    if count > size or k > 32 or length > count + (size >> k):
        raise Refused("bad_delta", "a set that cannot be")
    gaps = body.unary(count, length).astype(np.int64) << k
    for bit in range(k):
        gaps |= body.bits(count).astype(np.int64) << bit
    numbers = np.cumsum(gaps + 1) - 1
    if count and not 0 <= numbers[-1] < size:
        raise Refused("bad_delta", "a number beyond the set")
    return numbers


def read_sizes(body: Body, count: int) -> np.ndarray:
    """Return `count` sizes (exponential Golomb codes) as unsigned 64-bit numbers."""
    if not count:
        return np.zeros(0, dtype=np.uint64)
    length, k = body.number(4), body.number(1)
    if k > 63 or length > 64 * count:
        raise Refused("bad_delta", "sizes that cannot be")
    logs = body.unary(count, length).astype(np.int64) + k
    if logs.max() > 63:
        raise Refused("bad_delta", "a size that is too large")
    values = np.left_shift(np.ones(count, dtype=np.uint64), logs.astype(np.uint64))
    for bit in range(int(logs.max())):
        longer = logs > bit
        values[longer] |= body.bits(int(longer.sum())).astype(np.uint64) << np.uint64(bit)
    least = np.uint64(1 << k)
    if (values < least).any():
        raise Refused("bad_delta", "a size below 0")
    return values - least


def read_planes(body: Body, words: int, width: int) -> np.ndarray:
    """Return words from their byte planes, the lowest first."""
    result = np.zeros(words, dtype=np.uint64)
    for place in range(width):
        raw = body.take(body.number(4))
        if len(raw) != words:
            raw = _plane(raw, words)
        result |= np.frombuffer(raw, dtype=np.uint8).astype(np.uint64) << np.uint64(8 * place)
    return result


def _plane(frame: bytes, words: int) -> bytes:
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size != words or header.window_size > MIB4:
            raise Refused("bad_delta", "a plane's header")
        stream = zstandard.ZstdDecompressor(max_window_size=MIB4).decompressobj()
        plane = stream.decompress(frame)
    except zstandard.ZstdError as error:
        raise Refused("bad_delta", str(error)) from None
    if not stream.eof or stream.unused_data or len(plane) != words:
        raise Refused("bad_delta", "a plane")
    return plane


def _sparse(body: Body, base: np.ndarray, bits: int) -> np.ndarray:
    count = body.number(1)
    thresholds = [body.number(8) for _ in range(count - 1)]
    falling = all(low < high for low, high in zip([0, *reversed(thresholds)], reversed(thresholds), strict=False))
    if not 1 <= count <= 8 or not falling:
        raise Refused("bad_delta", "classes")
    magnitude = base & np.uint64((1 << bits - 1) - 1)
    limits = [*thresholds, 0]
    result = base.copy()
    for number in range(count):
        if number:
            inside = (magnitude < limits[number - 1]) & (magnitude >= limits[number])
            members = np.flatnonzero(inside)
        else:
            members = np.arange(len(base))
        changed = members[read_set(body, len(members))]
        negative = body.bits(len(changed)).astype(bool)
        size = np.ones(len(changed), dtype=np.uint64)
        large = read_set(body, len(changed))
        size[large] = read_sizes(body, len(large)) + np.uint64(2)
        result[changed] += np.where(negative, ~size + np.uint64(1), size)
    return result


def _segment(mode: int, body: Body, base: np.ndarray, width: int) -> np.ndarray:
    bits = 8 * width
    if mode == 0:
        return base
    if mode == 1:
        return _sparse(body, base, bits)
    if mode not in (2, 3):
        raise Refused("bad_delta", f"mode {mode}")
    words = read_planes(body, len(base), width)
    if mode == 3:
        return words
    return base + ((words >> np.uint64(1)) ^ (~(words & np.uint64(1)) + np.uint64(1)))


def _window(change: bytes, base: bytes) -> bytes:
    body = Body(change)
    count = body.number(2)
    if not 1 <= count <= 1024:
        raise Refused("bad_delta", "segments")
    heads = [(body.number(1), body.number(1), body.number(4), body.number(4)) for _ in range(count)]
    shapes = all(width in (1, 2, 4, 8) and 1 <= words <= MAX_WORDS for _, width, words, _ in heads)
    if not shapes or sum(width * words for _, width, words, _ in heads) != len(base):
        raise Refused("bad_delta", "the words do not add up to the window")
    result, at = [], 0
    for mode, width, words, length in heads:
        segment = Body(body.take(length))
        old = np.frombuffer(base[at : at + width * words], dtype=f"<u{width}").astype(np.uint64)
        new = _segment(mode, segment, old, width)
        segment.end()
        result.append(new.astype(f"<u{width}").tobytes())
        at += width * words
    body.end()
    return b"".join(result)


def apply_delta(delta: bytes, base: bytes, full: Mapping[str, Any]) -> bytes:
    """Return what `delta` makes of `base`; raises Refused with `bad_delta`.

    It is compared by the caller: a delta proves nothing.
    """
    window = full["chunk_bytes"] * -(-MIB4 // full["chunk_bytes"])
    body = Body(delta)
    if body.take(8) != b"SCDELTA1" or body.number(8) != len(base) or body.number(8) != window:
        raise Refused("bad_delta", "header")
    if len(base) != full["payload_bytes"]:
        raise Refused("bad_delta", "a base of another size")
    starts = range(0, len(base), window)
    lengths = [body.number(4) for _ in starts]
    result = []
    for start, length in zip(starts, lengths, strict=True):
        old = base[start : start + window]
        change = body.take(length)
        result.append(_window(change, old) if length else old)
    body.end()
    return b"".join(result)
