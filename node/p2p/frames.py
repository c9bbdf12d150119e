"""Length-prefixed frames on a libp2p stream: u32 length, then the bytes. Every read has a limit and a deadline."""

from __future__ import annotations

from typing import Protocol

import trio

from shardcast.errors import Malformed

FRAME_SECONDS = 20.0
"""Deadline for a frame once begun, and for a peer to read one."""


class Stream(Protocol):
    """The subset of a libp2p stream used here."""

    async def read(self, n: int | None = None) -> bytes:
        """Read at least one and at most `n` bytes, or none at the end."""

    async def write(self, data: bytes) -> None:
        """Write all of `data`."""


async def read_frame(stream: Stream, *, max_bytes: int, idle_seconds: float) -> bytes | None:
    """Read the next frame; None at the end of the stream. Raises Malformed and trio.TooSlowError.

    `idle_seconds` limits the wait for the frame's first byte.
    """
    with trio.fail_after(idle_seconds):
        first = await stream.read(4)
    if not first:
        return None
    with trio.fail_after(FRAME_SECONDS):
        head = first + await read_exactly(stream, 4 - len(first))
        size = int.from_bytes(head)
        if size > max_bytes:
            raise Malformed(f"frame of {size} bytes exceeds the limit of {max_bytes}", code="oversized")
        return await read_exactly(stream, size)


async def write_frame(stream: Stream, data: bytes) -> None:
    """Write `data` as one frame; raises trio.TooSlowError if the peer does not read it."""
    with trio.fail_after(FRAME_SECONDS):
        await stream.write(len(data).to_bytes(4) + data)


async def read_exactly(stream: Stream, size: int) -> bytes:
    """Read exactly `size` bytes without a deadline; raises Malformed if the stream ends first."""
    pieces, remaining = [], size
    while remaining:
        piece = await stream.read(remaining)
        if not piece:
            raise Malformed("stream ended within a frame", code="truncated")
        pieces.append(piece)
        remaining -= len(piece)
    return b"".join(pieces)
