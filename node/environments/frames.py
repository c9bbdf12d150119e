"""Length-prefixed frames on a pipe to a child process: a u32 length, big-endian, and that many bytes."""

from __future__ import annotations

import struct
from typing import IO

_LENGTH = struct.Struct(">I")


class BrokenFrame(Exception):
    """The stream ended inside a frame, or declared one above the limit."""


def send_frame(stream: IO[bytes], payload: bytes) -> None:
    """Write one frame and flush."""
    stream.write(_LENGTH.pack(len(payload)))
    stream.write(payload)
    stream.flush()


def receive_frame(stream: IO[bytes], *, max_bytes: int) -> bytes:
    """Read one frame; raise BrokenFrame, or EOFError if the stream ends before one begins."""
    header = stream.read(_LENGTH.size)
    if not header:
        raise EOFError("no further frame")
    if len(header) < _LENGTH.size:
        raise BrokenFrame("the stream ended inside a length")
    (size,) = _LENGTH.unpack(header)
    if size > max_bytes:
        raise BrokenFrame(f"a frame of {size} bytes where at most {max_bytes} are allowed")
    payload = stream.read(size)
    if len(payload) < size:
        raise BrokenFrame("the stream ended inside a frame")
    return payload
