"""What changed from one file to another of the same size, exactly, window by window.

Between two versions of a policy a percent of the weights change, most of them by a unit in the last place. A
delta lists these; it makes the result out of the base, byte for byte, whatever the bytes mean. It is no proof
of anything: who applies one compares the result's digests with the manifest's, and must start from the base
that the manifest names, since another base gives another result and no error.

The file, version 1; all integers little-endian, W and the number of windows N = ceil(result bytes / W):

    8 bytes   "SCDELTA1"
    u64       result bytes
    u64       W, which is chunk_bytes * ceil(4 MiB / chunk_bytes): a window is whole chunks of the result
    N x u32   the length of each window's change in bytes; 0 where the result's bytes are the base's
    N times   the change of a window, one after the other; nothing follows the last

    The change of a window (bytes i * W to (i + 1) * W of both files; the last window may be shorter):
    u16       the number of segments, 1 to 1024
    for each  u8 mode, u8 width of a word in bytes (1, 2, 4 or 8), u32 number of words (1 to 2**21), u32 length
              of the body in bytes; the words add up to the window
    for each  the body: `shardcast.codec.word_codec` says what is in it, by mode

Goals: windows can be encoded and decoded in any order and by several threads, in memory that depends on W
and not on the file; every size is known and bounded before it is allocated. Non-goals: files of different
sizes, and the least bytes at any price (adaptive arithmetic coding would save a few percent more, at a
hundredth of the speed).
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from shardcast.codec.bits import bad_delta
from shardcast.codec.layout import MAX_SEGMENTS, WordLayout, read_layout
from shardcast.codec.word_codec import MAX_SEGMENT_WORDS, WORD_TYPES, decode_words, encode_words
from shardcast.errors import LocalFault
from shardcast.files import as_local_fault

MIB = 2**20
MAX_CHUNK_BYTES = 64 * MIB

_MAGIC = b"SCDELTA1"
_HEADER = struct.Struct("<8sQQ")
_INDEX_TYPE = np.dtype("<u4")
_COUNT = struct.Struct("<H")
_SEGMENT = struct.Struct("<BBII")
# A window that did not compress has up to 8 lengths of planes for each segment, and the segments themselves.
_MAX_OVERHEAD_BYTES = MAX_SEGMENTS * 64
_MIN_WINDOW_BYTES = 4 * MIB


def encode(base: Path, result: Path, delta: Path, *, chunk_bytes: int, max_bytes: int, threads: int = 1) -> int | None:
    """Write the delta from `base` to `result` at `delta` and return its size in bytes.

    Returns None and leaves no file if it would exceed `max_bytes` or the inputs differ in size. Output does not depend
    on `threads`. Memory per thread: 3 windows where few words change, 17 at most. Raises LocalFault; the inputs must
    not change meanwhile.
    """
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk size {chunk_bytes} is outside 1..{MAX_CHUNK_BYTES} bytes")
    size = None
    try:
        with ExitStack() as stack:
            base_file, result_file = (stack.enter_context(path.open("rb", buffering=0)) for path in (base, result))
            result_bytes = os.fstat(result_file.fileno()).st_size
            if os.fstat(base_file.fileno()).st_size != result_bytes:
                return None
            encoder = _Encoder(base_file.fileno(), result_file.fileno(), result_bytes, window_bytes_of(chunk_bytes))
            size = encoder.write(delta, max_bytes, threads)
    except OSError as error:
        raise as_local_fault(error, Path(error.filename or delta)) from error
    finally:
        if size is None:
            delta.unlink(missing_ok=True)
    return size


class _Encoder:
    def __init__(self, base: int, result: int, result_bytes: int, window_bytes: int) -> None:
        self._base, self._result = base, result
        self._result_bytes, self._window_bytes = result_bytes, window_bytes
        self._layout: WordLayout = read_layout(result, result_bytes)

    def write(self, path: Path, max_bytes: int, threads: int) -> int | None:
        """Write the delta and return its size in bytes; None as soon as it exceeds `max_bytes`."""
        lengths = np.zeros(-(-self._result_bytes // self._window_bytes), _INDEX_TYPE)
        size = _HEADER.size + lengths.nbytes
        if size > max_bytes:
            return None
        with path.open("wb") as file, ThreadPoolExecutor(threads) as pool:
            file.seek(size)
            for window, change in enumerate(_in_order(pool, self._change, len(lengths), threads)):
                size += len(change)
                if size > max_bytes:
                    pool.shutdown(cancel_futures=True)
                    return None
                lengths[window] = len(change)
                file.write(change)
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, self._result_bytes, self._window_bytes) + lengths.tobytes())
        return size

    def _change(self, window: int) -> bytes:
        start = window * self._window_bytes
        stop = min(start + self._window_bytes, self._result_bytes)
        base, result = _read(self._base, start, stop), _read(self._result, start, stop)
        table, bodies, at = [], [], 0
        for width, count in self._layout.segments(start, stop):
            before, after = (np.frombuffer(data, WORD_TYPES[width], count, at) for data in (base, result))
            mode, body = encode_words(before, after)
            table.append(_SEGMENT.pack(mode, width, count, len(body)))
            bodies.append(body)
            at += width * count
        return b"".join([_COUNT.pack(len(table)), *table, *bodies]) if any(bodies) else b""


def _in_order(pool: ThreadPoolExecutor, function: Callable[[int], bytes], count: int, threads: int) -> Iterator[bytes]:
    """Yield `function(0..count - 1)` in order, computing a bounded number of results ahead."""
    waiting: deque[Future[bytes]] = deque()
    for index in range(count):
        waiting.append(pool.submit(function, index))
        if len(waiting) > 2 * threads:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class DeltaFile:
    """A delta file whose index was validated; usable from any thread until closed."""

    def __init__(self, path: Path, descriptor: int, *, result_bytes: int, window_bytes: int) -> None:
        """Take over `descriptor` unless this raises; use `open` instead."""
        self._path, self._descriptor = path, descriptor
        self.result_bytes, self.window_bytes = result_bytes, window_bytes
        self.window_count = -(-result_bytes // window_bytes)
        size = os.fstat(descriptor).st_size
        index_bytes = _INDEX_TYPE.itemsize * self.window_count
        if size < _HEADER.size + index_bytes:
            raise bad_delta(f"delta of {size} bytes is too short for an index of {self.window_count} windows")
        header = self._read(0, _HEADER.size)
        if _HEADER.unpack(header) != (_MAGIC, result_bytes, window_bytes):
            raise bad_delta("delta header is invalid, or for another result or chunk size")
        self._lengths = np.frombuffer(self._read(_HEADER.size, index_bytes), _INDEX_TYPE)
        if self.window_count and int(self._lengths.max()) > window_bytes + _MAX_OVERHEAD_BYTES:
            raise bad_delta("delta declares a change larger than its window")
        self._ends = np.cumsum(self._lengths, dtype=np.int64) + (_HEADER.size + index_bytes)
        if size != (self._ends[-1] if self.window_count else _HEADER.size):
            raise bad_delta(f"delta index does not add up to the file's {size} bytes")

    @classmethod
    def open(cls, path: Path, *, result_bytes: int, chunk_bytes: int) -> Self:
        """Open the delta at `path`; the result and chunk sizes must be those of the manifest.

        Raises Malformed "bad_delta" for anything else, and LocalFault when the file cannot be read.
        """
        if result_bytes < 0 or not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise bad_delta(f"delta result of {result_bytes} bytes in chunks of {chunk_bytes} is out of bounds")
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                return cls(path, descriptor, result_bytes=result_bytes, window_bytes=window_bytes_of(chunk_bytes))
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise as_local_fault(error, path) from error

    def changed(self, window: int) -> bool:
        """Return whether any byte of a window may differ from the base."""
        return self._length(window) > 0

    def apply(self, window: int, data: memoryview) -> None:
        """Turn the base's bytes of a window into the result's, in place.

        Raises Malformed "bad_delta" and LocalFault, which leave `data` undefined; ValueError when it is not as long as
        the window.
        """
        length = self._length(window)
        if len(data) != min(self.window_bytes, self.result_bytes - window * self.window_bytes):
            raise ValueError(f"base of {len(data)} bytes does not match window {window}")
        if length:
            try:
                change = self._read(int(self._ends[window]) - length, length)
            except OSError as error:
                raise as_local_fault(error, self._path) from error
            _apply(memoryview(change), data)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _length(self, window: int) -> int:
        if not 0 <= window < self.window_count:
            raise IndexError(f"window {window} is out of range")
        return int(self._lengths[window])

    def _read(self, start: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, start)
        if len(data) != length:
            raise bad_delta("delta file was truncated while open")
        return data


def _apply(change: memoryview, window: memoryview) -> None:
    """Validate the segments of a change against each other and the window, then decode them in place."""
    if len(change) < _COUNT.size:
        raise bad_delta("change has no segments")
    (count,) = _COUNT.unpack_from(change)
    body = _COUNT.size + count * _SEGMENT.size
    if not 1 <= count <= MAX_SEGMENTS or body > len(change):
        raise bad_delta(f"change of {len(change)} bytes declares {count} segments")
    segments = list(_SEGMENT.iter_unpack(change[_COUNT.size : body]))
    if not all(width in WORD_TYPES and 0 < words <= MAX_SEGMENT_WORDS for _, width, words, _ in segments):
        raise bad_delta("segment has an unknown width or size")
    if sum(width * words for _, width, words, _ in segments) != len(window):
        raise bad_delta("segments do not add up to their window")
    if body + sum(length for *_, length in segments) != len(change):
        raise bad_delta("segment bodies do not add up to their change")
    at = 0
    for mode, width, words, length in segments:
        decode_words(mode, change[body : body + length], np.frombuffer(window, WORD_TYPES[width], words, at))
        at, body = at + width * words, body + length


def window_bytes_of(chunk_bytes: int) -> int:
    """Return the window size W in bytes for chunks of `chunk_bytes`."""
    return chunk_bytes * -(-_MIN_WINDOW_BYTES // chunk_bytes)


def _read(descriptor: int, start: int, stop: int) -> bytes:
    data = os.pread(descriptor, stop - start, start)
    if len(data) != stop - start:
        raise LocalFault("input file was truncated while its delta was encoded; publish again")
    return data
