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
    for each  the body: `shardcast.words` says what is in it, by mode

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

from shardcast.bits import bad_delta
from shardcast.errors import LocalFault
from shardcast.files import as_local_fault
from shardcast.layout import MAX_SEGMENTS, Layout, read_layout
from shardcast.words import MAX_SEGMENT_WORDS, WORD_TYPES, decode_words, encode_words

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


def encode(base: Path, result: Path, delta: Path, *, chunk_bytes: int, most_bytes: int, threads: int = 2) -> int | None:
    """Write at `delta` the change from `base` to `result`, and return its size in bytes.

    None, and no file, when it would be larger than `most_bytes` or when base and result differ in size. The
    bytes do not depend on `threads`. Memory for each: 3 windows where few words change, 17 at most. Raises
    LocalFault; neither input may change meanwhile.
    """
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunks of {chunk_bytes} bytes")
    size = None
    try:
        with ExitStack() as stack:
            base_file, result_file = (stack.enter_context(path.open("rb", buffering=0)) for path in (base, result))
            result_bytes = os.fstat(result_file.fileno()).st_size
            if os.fstat(base_file.fileno()).st_size != result_bytes:
                return None
            encoder = _Encoder(base_file.fileno(), result_file.fileno(), result_bytes, window_bytes_of(chunk_bytes))
            size = encoder.write(delta, most_bytes, threads)
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
        self._layout: Layout = read_layout(result, result_bytes)

    def write(self, path: Path, most_bytes: int, threads: int) -> int | None:
        """The size of what was written; None as soon as it is more than `most_bytes`."""
        lengths = np.zeros(-(-self._result_bytes // self._window_bytes), _INDEX_TYPE)
        size = _HEADER.size + lengths.nbytes
        if size > most_bytes:
            return None
        with path.open("wb") as file, ThreadPoolExecutor(threads) as pool:
            file.seek(size)
            for window, change in enumerate(_in_order(pool, self._change, len(lengths), threads)):
                size += len(change)
                if size > most_bytes:
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
    """`function` of 0 to `count`, each begun when few others wait to be taken."""
    waiting: deque[Future[bytes]] = deque()
    for index in range(count):
        waiting.append(pool.submit(function, index))
        if len(waiting) > 2 * threads:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class Delta:
    """A delta file, checked as far as its index tells; any thread may use it until it is closed."""

    def __init__(self, path: Path, descriptor: int, *, result_bytes: int, window_bytes: int) -> None:
        """Takes over `descriptor`, unless it raises; use `open`."""
        self._path, self._descriptor = path, descriptor
        self.result_bytes, self.window_bytes = result_bytes, window_bytes
        self.window_count = -(-result_bytes // window_bytes)
        size = os.fstat(descriptor).st_size
        index_bytes = _INDEX_TYPE.itemsize * self.window_count
        if size < _HEADER.size + index_bytes:
            raise bad_delta(f"{size} bytes do not hold an index of {self.window_count} windows")
        header = self._read(0, _HEADER.size)
        if _HEADER.unpack(header) != (_MAGIC, result_bytes, window_bytes):
            raise bad_delta("not a delta, or for a result or chunks of another size")
        self._lengths = np.frombuffer(self._read(_HEADER.size, index_bytes), _INDEX_TYPE)
        if self.window_count and int(self._lengths.max()) > window_bytes + _MAX_OVERHEAD_BYTES:
            raise bad_delta("a change that is larger than its window")
        self._ends = np.cumsum(self._lengths, dtype=np.int64) + (_HEADER.size + index_bytes)
        if size != (self._ends[-1] if self.window_count else _HEADER.size):
            raise bad_delta(f"the index does not add up to the {size} bytes that there are")

    @classmethod
    def open(cls, path: Path, *, result_bytes: int, chunk_bytes: int) -> Self:
        """The delta at `path`, whose result must have the size and the chunks that the manifest says.

        Raises Malformed "bad_delta" for anything else, and LocalFault when the file cannot be read.
        """
        if result_bytes < 0 or not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise bad_delta(f"{result_bytes} bytes in chunks of {chunk_bytes}")
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
        """Whether any byte of a window may differ from the base's."""
        return self._length(window) > 0

    def apply(self, window: int, base: bytes | bytearray | memoryview) -> bytearray:
        """The result's bytes of a window, out of the base's.

        Raises Malformed "bad_delta" and LocalFault; ValueError when `base` is not as long as the window.
        """
        length = self._length(window)
        if len(base) != min(self.window_bytes, self.result_bytes - window * self.window_bytes):
            raise ValueError(f"{len(base)} bytes are not window {window}")
        result = bytearray(base)
        if length:
            try:
                change = self._read(int(self._ends[window]) - length, length)
            except OSError as error:
                raise as_local_fault(error, self._path) from error
            _apply(memoryview(change), result)
        return result

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
            raise IndexError(f"no window {window}")
        return int(self._lengths[window])

    def _read(self, start: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, start)
        if len(data) != length:
            raise bad_delta("the file has become shorter")
        return data


def _apply(change: memoryview, window: bytearray) -> None:
    """Check the segments of a change against each other and the window, then decode them in place."""
    if len(change) < _COUNT.size:
        raise bad_delta("a change without segments")
    (count,) = _COUNT.unpack_from(change)
    body = _COUNT.size + count * _SEGMENT.size
    if not 1 <= count <= MAX_SEGMENTS or body > len(change):
        raise bad_delta(f"{count} segments in a change of {len(change)} bytes")
    segments = list(_SEGMENT.iter_unpack(change[_COUNT.size : body]))
    if not all(width in WORD_TYPES and 0 < words <= MAX_SEGMENT_WORDS for _, width, words, _ in segments):
        raise bad_delta("a segment of no known width or size")
    if sum(width * words for _, width, words, _ in segments) != len(window):
        raise bad_delta("segments that do not add up to their window")
    if body + sum(length for *_, length in segments) != len(change):
        raise bad_delta("bodies that do not add up to their change")
    at = 0
    for mode, width, words, length in segments:
        decode_words(mode, change[body : body + length], np.frombuffer(window, WORD_TYPES[width], words, at))
        at, body = at + width * words, body + length


def window_bytes_of(chunk_bytes: int) -> int:
    """W for chunks of that size."""
    return chunk_bytes * -(-_MIN_WINDOW_BYTES // chunk_bytes)


def _read(descriptor: int, start: int, stop: int) -> bytes:
    data = os.pread(descriptor, stop - start, start)
    if len(data) != stop - start:
        raise LocalFault("a file became shorter while its delta was made")
    return data
