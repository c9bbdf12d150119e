"""Computing a result from an earlier one and a chain of deltas: in one pass, without files in between."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from shardcast.errors import CorruptChunk
from shardcast.payload_file import PayloadFile

THREADS = 2
"""A window each: decoding releases the interpreter's lock for most of its time."""


def patch(base: PayloadFile, deltas: Sequence[Path], result: PayloadFile) -> int:
    """Write what `deltas`, applied to `base` one after the other, give of `result`; how many chunks came out wrong.

    Only chunks that have their digest are written. Raises Malformed "bad_delta", and LocalFault for this disk.
    """
    from shardcast.delta import Delta  # noqa: PLC0415  brings numpy, 20 MiB that most processes never need

    full = result.payload
    with ExitStack() as stack:
        opened = [
            stack.enter_context(Delta.open(path, result_bytes=full.payload_bytes, chunk_bytes=full.chunk_bytes))
            for path in deltas
        ]
        window_bytes = opened[0].window_bytes

        def one(window: int) -> int:
            start = window * window_bytes
            size = min(window_bytes, full.payload_bytes - start)
            # What a damaged base does not give comes out wrong, as what it gives wrongly does.
            data: bytes | bytearray = base.read_range(start, size).ljust(size, b"\0")
            for delta in opened:
                if delta.changed(window):
                    data = delta.apply(window, data)
            return _write(result, start, data)

        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        try:
            return sum(pool.map(one, range(opened[0].window_count)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write(result: PayloadFile, start: int, data: bytes | bytearray) -> int:
    """Keep the chunks of a window, which begins at one; how many are not what they should be."""
    size, wrong, view = result.payload.chunk_bytes, 0, memoryview(data)
    for at in range(0, len(data), size):
        index = (start + at) // size
        if result.holds(index):
            continue
        try:
            result.write(index, view[at : at + size])
        except CorruptChunk:
            wrong += 1
    return wrong
