"""Reconstruct a result from a base and a chain of deltas in one pass, without intermediate files.

Windows are decoded by several threads (decoding releases the GIL most of the time), one window each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from shardcast import wire
from shardcast.errors import CorruptChunk
from shardcast.manifest import Payload
from shardcast.store.payload_file import PayloadFile


def patch(base: PayloadFile, deltas: Sequence[Path], result: PayloadFile, *, threads: int = 1) -> int:
    """Apply `deltas` to `base` in order, write the chunks of `result`, and return how many mismatched their digest.

    Mismatching chunks are not written. Raises Malformed "bad_delta", and LocalFault for this disk.
    """

    def write(index: int, chunk: memoryview) -> bool:
        if not result.holds(index):
            try:
                result.write(index, chunk)
            except CorruptChunk:
                return False
        return True

    return _apply(base, deltas, result.payload, write, threads)


def count_mismatches(base: PayloadFile, deltas: Sequence[Path], full: Payload, *, threads: int) -> int:
    """Apply `deltas` to `base` in memory and return how many chunks of `full` come out wrong; raises as `patch`."""

    def compare(index: int, chunk: memoryview) -> bool:
        return wire.digest(chunk) == full.chunk_digest(index)

    return _apply(base, deltas, full, compare, threads)


def _apply(
    base: PayloadFile,
    deltas: Sequence[Path],
    full: Payload,
    accept: Callable[[int, memoryview], bool],
    threads: int,
) -> int:
    """Give every chunk that comes out to `accept`, by index; return how many it did not accept."""
    from shardcast.codec.delta import DeltaFile  # noqa: PLC0415  brings numpy, 20 MiB that most processes never need

    with ExitStack() as stack:
        opened = [
            stack.enter_context(DeltaFile.open(path, result_bytes=full.payload_bytes, chunk_bytes=full.chunk_bytes))
            for path in deltas
        ]
        window_bytes, threads = opened[0].window_bytes, max(1, min(threads, opened[0].window_count))
        # Used again and again: a small process's allocator gives the memory of each window back to the system, and
        # touching it anew takes longer than reading and decoding it (docs/broadcast.md, "Processors").
        free = [memoryview(bytearray(min(window_bytes, full.payload_bytes))) for _ in range(threads)]

        def patch_window(window: int) -> int:
            buffer, start = free.pop(), window * window_bytes
            try:
                data = buffer[: full.payload_bytes - start]
                # What a damaged base lacks stays another window's, and fails the digest check like any wrong byte.
                base.read_into(data, start)
                for delta in opened:
                    if delta.changed(window):
                        delta.apply(window, data)
                first, offsets = start // full.chunk_bytes, range(0, len(data), full.chunk_bytes)
                return sum(not accept(first + i, data[at : at + full.chunk_bytes]) for i, at in enumerate(offsets))
            finally:
                free.append(buffer)

        pool = stack.enter_context(ThreadPoolExecutor(threads))
        try:
            return sum(pool.map(patch_window, range(opened[0].window_count)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
