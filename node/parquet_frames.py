"""What `node.parquet_reader` and its child process say to each other: frames of a u32 length and that many bytes.

For each file the parent sends a `Shape` and then the file; the child answers with one `Answer`. Once at its
start, when its limits are in force, the child sends `READY`. Integers are big-endian.
"""

from __future__ import annotations

import struct
from typing import IO, Generic, TypeVar

import msgspec

from node.protocol.reasons import Reason

READY = b"ready"
MAX_DETAIL = 200
_LENGTH = struct.Struct(">I")

Row = TypeVar("Row")


class Shape(msgspec.Struct, frozen=True):
    """What a submission may hold at most; the parser's bounds, in items per row unless said otherwise.

    They are wider than the run's rules: a completion one token too long is a decision for
    `node.protocol.submission`, with its own reason.
    """

    rows: int
    prompt_tokens: int
    completion_tokens: int
    segments: int
    proofs: int
    proof_bytes: int


class Answer(msgspec.Struct, Generic[Row], frozen=True, forbid_unknown_fields=True):
    """The rows of a file, or the reason why there are none."""

    rows: list[Row]
    reason: Reason | None = None
    detail: str = ""


class BrokenFrame(Exception):
    """The stream ended inside a frame, or announced a longer one than is allowed."""


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
