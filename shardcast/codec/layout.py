"""Detect the word layout of a file, so that deltas compare whole numbers instead of their bytes.

A safetensors file declares it in its header (u64 length, little-endian; JSON: name -> dtype, shape, data_offsets).
Anything else is treated as single bytes: a wrong width costs compression, never correctness. The decoder does not use
this module.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass

import msgspec

from shardcast.codec.word_codec import MAX_SEGMENT_WORDS

MAX_SEGMENTS = 1024
"""Per window."""
_CROWDED_SEGMENTS = 900  # leaves room for the rest of the largest window, in segments of single bytes
_MAX_HEADER_BYTES = 32 * 2**20
_LENGTH_BYTES = 8
_WIDTHS = {
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32", "C64"), 4),  # a complex number is two words
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}


class _Tensor(msgspec.Struct):
    """A header entry; `__metadata__` decodes as an empty one."""

    dtype: str = ""
    data_offsets: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes `start` to `stop` are words of `width` bytes."""

    start: int
    stop: int
    width: int


class WordLayout:
    """The word layout of a file of `size_bytes`."""

    def __init__(self, size_bytes: int, tensors: list[_Run]) -> None:
        """Build from `tensors` sorted by start; overlapping or out-of-range ones are treated as bytes."""
        self._runs: list[_Run] = []
        at = 0
        for run in tensors:
            whole = run.stop - (run.stop - run.start) % run.width
            if at <= run.start < whole and run.stop <= size_bytes:
                self._append(_Run(at, run.start, 1))
                self._append(_Run(run.start, whole, run.width))
                at = whole
        self._append(_Run(at, size_bytes, 1))
        self._starts = [run.start for run in self._runs]

    def segments(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split bytes `start` to `stop` into at most MAX_SEGMENTS pairs (word width, words)."""
        found: list[tuple[int, int]] = []
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            run = self._runs[index]
            end = min(run.stop, stop)
            if len(found) > _CROWDED_SEGMENTS:
                run, end = _Run(start, stop, 1), stop
            # A word that crosses the window's edge is coded as single bytes.
            head = min((run.start - start) % run.width, end - start)
            words, tail = divmod(end - start - head, run.width)
            for width, count in ((1, head), (run.width, words), (1, tail)):
                found += [(width, min(MAX_SEGMENT_WORDS, count - done)) for done in range(0, count, MAX_SEGMENT_WORDS)]
            start, index = end, index + 1
        return found

    def _append(self, run: _Run) -> None:
        if run.start == run.stop:
            return
        if self._runs and self._runs[-1].width == run.width:
            run = _Run(self._runs.pop().start, run.stop, run.width)
        self._runs.append(run)


def read_layout(descriptor: int, size_bytes: int) -> WordLayout:
    """Read the layout of an open file; unrecognised content is laid out as single bytes."""
    header_bytes = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    data = _LENGTH_BYTES + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or data > size_bytes:
        return WordLayout(size_bytes, [])
    try:
        header = msgspec.json.decode(os.pread(descriptor, header_bytes, _LENGTH_BYTES), type=dict[str, _Tensor])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return WordLayout(size_bytes, [])
    tensors = [
        _Run(data + tensor.data_offsets[0], data + tensor.data_offsets[1], _WIDTHS.get(tensor.dtype, 1))
        for tensor in header.values()
    ]
    return WordLayout(size_bytes, sorted((run for run in tensors if run.start >= data), key=lambda run: run.start))
