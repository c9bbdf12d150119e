"""Frames on a libp2p stream: u32 length, then so many bytes. Every read has a limit and a deadline."""

from __future__ import annotations

from typing import Protocol

import trio

from shardcast.errors import Malformed

FRAME_SECONDS = 20.0
"""In which a frame that has begun must be complete; and in which a peer must take one."""


class Stream(Protocol):
    """What is needed of a libp2p stream."""

    async def read(self, n: int | None = None) -> bytes:
        """At least one byte and at most `n`, or none at the end."""

    async def write(self, data: bytes) -> None:
        """All of `data`."""


async def read_frame(stream: Stream, *, max_bytes: int, idle_seconds: float) -> bytes | None:
    """The next frame, or None at the end of the stream; raises Malformed and trio.TooSlowError.

    `idle_seconds` is how long nothing at all may come.
    """
    with trio.fail_after(idle_seconds):
        first = await stream.read(4)
    if not first:
        return None
    with trio.fail_after(FRAME_SECONDS):
        head = first + await read_exactly(stream, 4 - len(first))
        size = int.from_bytes(head)
        if size > max_bytes:
            raise Malformed(f"a frame of {size} bytes, at most {max_bytes} are taken", code="oversized")
        return await read_exactly(stream, size)


async def write_frame(stream: Stream, data: bytes) -> None:
    """Send `data` as one frame; raises trio.TooSlowError when the peer does not take it."""
    with trio.fail_after(FRAME_SECONDS):
        await stream.write(len(data).to_bytes(4) + data)


async def read_exactly(stream: Stream, size: int) -> bytes:
    """So many bytes, however long that takes; raises Malformed where the stream ends before."""
    pieces, left = [], size
    while left:
        piece = await stream.read(left)
        if not piece:
            raise Malformed("the stream ended within a frame", code="truncated")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
