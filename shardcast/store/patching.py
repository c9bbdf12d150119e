"""Reconstruct a result from a base and a chain of deltas in one pass, without intermediate files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from shardcast.errors import CorruptChunk
from shardcast.store.payload_file import PayloadFile

THREADS = 2
"""One window per thread: decoding releases the GIL most of the time."""


def patch(base: PayloadFile, deltas: Sequence[Path], result: PayloadFile) -> int:
    """Apply `deltas` to `base` in order, write the chunks of `result`, and return how many mismatched their digest.

    Mismatching chunks are not written. Raises Malformed "bad_delta", and LocalFault for this disk.
    """
    from shardcast.codec.delta import DeltaFile  # noqa: PLC0415  brings numpy, 20 MiB that most processes never need

    full = result.payload
    with ExitStack() as stack:
        opened = [
            stack.enter_context(DeltaFile.open(path, result_bytes=full.payload_bytes, chunk_bytes=full.chunk_bytes))
            for path in deltas
        ]
        window_bytes = opened[0].window_bytes

        def patch_window(window: int) -> int:
            start = window * window_bytes
            size = min(window_bytes, full.payload_bytes - start)
            # Padding for a damaged base fails the digest check like any other wrong byte.
            data: bytes | bytearray = base.read_range(start, size).ljust(size, b"\0")
            for delta in opened:
                if delta.changed(window):
                    data = delta.apply(window, data)
            return _write(result, start, data)

        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        try:
            return sum(pool.map(patch_window, range(opened[0].window_count)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write(result: PayloadFile, start: int, data: bytes | bytearray) -> int:
    """Write a window's chunks, `start` being the first's offset; return how many mismatched their digest."""
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
