"""Files made to crash, stall or exhaust whoever reads them."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import zstandard

from coordinator.lab.redteam.attack import Forged, SlotAttack
from coordinator.lab.redteam.workshop import Work
from node.protocol.submission import Rollout
from node.submission.writer import compress, write_rollouts

ROWS = 200_000
TOKENS = 2_000_000
DEPTH = 1_000_000
ZEROS = 256 * 1024 * 1024


def _content(rollouts: list[Rollout]) -> dict[str, Any]:
    """An honest file's content, to be changed."""
    content: dict[str, Any] = msgspec.msgpack.decode(zstandard.decompress(write_rollouts(rollouts)))
    return content


def _file(content: dict[str, Any]) -> bytes:
    return compress(msgspec.msgpack.encode(content))


def many_rows(rollouts: list[Rollout]) -> bytes:
    """Hundreds of thousands of rows in a few kilobytes."""
    content = _content(rollouts)
    return _file(content | {"rows": content["rows"][:1] * ROWS})


def long_array(rollouts: list[Rollout]) -> bytes:
    """Millions of tokens in one row, which compress to nothing."""
    content = _content(rollouts)
    content["rows"][0]["completion_ids"] = struct.pack("<i", 7) * TOKENS
    return _file(content)


def understated(rollouts: list[Rollout]) -> bytes:  # noqa: ARG001  (one of BOMBS)
    """A quarter of a gigabyte of zeros behind a header that says a thousand bytes."""
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(ZEROS))
    header = zstandard.FRAME_HEADER + b"\xe0" + struct.pack("<Q", 1000)
    return header + packed[zstandard.frame_header_size(packed) :]


def overstated(rollouts: list[Rollout]) -> bytes:
    """A header that says that an exabyte follows."""
    body = write_rollouts(rollouts)
    return zstandard.FRAME_HEADER + b"\xe0" + struct.pack("<Q", 2**60) + body[zstandard.frame_header_size(body) :]


def nested(rollouts: list[Rollout]) -> bytes:  # noqa: ARG001
    """Arrays within arrays, to exhaust a parser's stack."""
    return compress(b"\x91" * DEPTH + b"\x90")


def claimed_reward(rollouts: list[Rollout]) -> bytes:
    """A field that does not belong there."""
    content = _content(rollouts)
    return _file(content | {"rows": [row | {"reward": 1.0} for row in content["rows"]]})


def left_out(rollouts: list[Rollout]) -> bytes:
    """A group without its worst draw."""
    return write_rollouts(rollouts[:-1])


def cut_short(rollouts: list[Rollout]) -> bytes:
    """The first half of a file."""
    body = write_rollouts(rollouts)
    return body[: len(body) // 2]


def noise(rollouts: list[Rollout]) -> bytes:  # noqa: ARG001
    """Random bytes behind the right mark."""
    return zstandard.FRAME_HEADER + os.urandom(4096)


BOMBS: tuple[Callable[[list[Rollout]], bytes], ...] = (
    many_rows,
    long_array,
    understated,
    overstated,
    nested,
    claimed_reward,
    left_out,
    cut_short,
    noise,
)


class SubmissionBombs(SlotAttack):
    """Whatever the file is, the next one must be read."""

    name = "submission-bombs"
    about = "sends files made to crash, stall or exhaust their reader"
    stands_for = "submission bombs"
    stopped_by = frozenset({"malformed_submission", "wrong_schema", "wrong_group_size", "oversized_body"})

    def __init__(self) -> None:
        self._turn = itertools.cycle(BOMBS)

    async def forge(self, work: Work) -> Forged:
        bomb = next(self._turn)
        return Forged(bomb(await work.honest()), note=bomb.__name__)
