"""The file that a slot's group travels in, and the checks of it that need no model (sections 6.1 and 6.3)."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from .proofs import decode_toploc, proof_bytes
from .sampling import Course, chunks_of
from .values import Refused

FORMAT = "swarmproof/rollouts/3"
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One completion as it travels."""

    seed: bytes
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segment_versions: tuple[int, ...]
    segment_tokens: tuple[int, ...]
    proofs: tuple[bytes, ...]


LISTS = {
    "prompt_ids": "i",
    "completion_ids": "i",
    "logprobs": "f",
    "segment_versions": "q",
    "segment_tokens": "i",
}
"""Fields of numbers, with the struct code of an item."""

KEYS = ("seed", *LISTS, "proofs")


@dataclass(frozen=True)
class Bounds:
    """How much of each a file may have before it is refused unread (6.1)."""

    prompt_tokens: int
    completion_tokens: int
    segments: int
    proofs: int
    proof_bytes: int
    content_bytes: int

    def of(self, name: str) -> int:
        """Return the most items of a field of numbers."""
        return {
            "prompt_ids": self.prompt_tokens,
            "segment_versions": self.segments,
            "segment_tokens": self.segments,
        }.get(name, self.completion_tokens)


def bounds_of(spec: dict[str, Any]) -> Bounds:
    """Return the bounds of a run's submissions."""
    sampling, proofs = spec["sampling"], spec["proofs"]
    loose = lambda most: 2 * most + 16  # noqa: E731
    chunks = -(-sampling["max_new_tokens"] // proofs["chunk_tokens"])
    p, t = loose(sampling["max_prompt_tokens"]), loose(sampling["max_new_tokens"])
    v = loose(sampling["max_version_lead"] + 1)
    pieces = sampling["max_turns"] * (2 if any("thinking" in one for one in spec.get("environments", ())) else 1)
    n = loose(chunks + sampling["max_version_lead"] + pieces - 1)
    b = loose(proof_bytes(proofs, proofs["chunk_tokens"]))
    content = sampling["group_size"] * (4 * p + 8 * t + 12 * v + (5 + b) * n + 256) + 256
    return Bounds(p, t, v, n, b, min(content, 16 * spec["limits"]["max_submission_bytes"]))


# Writing


def _sized(length: int, small: tuple[int, int] | None, *codes: tuple[int, int]) -> bytes:
    if small is not None and length < small[1]:
        return bytes([small[0] | length])
    for code, width in codes:
        if length < 1 << 8 * width:
            return bytes([code]) + length.to_bytes(width, "big")
    raise Refused("oversized")


def _str(value: str) -> bytes:
    raw = value.encode()
    return _sized(len(raw), (0xA0, 32), (0xD9, 1), (0xDA, 2), (0xDB, 4)) + raw


def _bin(raw: bytes) -> bytes:
    return _sized(len(raw), None, (0xC4, 1), (0xC5, 2), (0xC6, 4)) + raw


def _array(items: Sequence[bytes]) -> bytes:
    return _sized(len(items), (0x90, 16), (0xDC, 2), (0xDD, 4)) + b"".join(items)


def _map(pairs: Sequence[tuple[str, bytes]]) -> bytes:
    return _sized(len(pairs), (0x80, 16)) + b"".join(_str(key) + value for key, value in pairs)


def encode_content(rows: Sequence[Row]) -> bytes:
    """Return the MessagePack value of a group."""
    packed = []
    for row in rows:
        lists = [
            (name, _bin(struct.pack(f"<{len(getattr(row, name))}{code}", *getattr(row, name))))
            for name, code in LISTS.items()
        ]
        packed.append(_map([("seed", _bin(row.seed)), *lists, ("proofs", _array([_bin(one) for one in row.proofs]))]))
    return _map([("format", _str(FORMAT)), ("rows", _array(packed))])


def write_file(rows: Sequence[Row]) -> bytes:
    """Return the body of a submission."""
    content = encode_content(rows)
    # One compress call states the content size; with `write_content_size` it does so for every size.
    return zstandard.ZstdCompressor(level=3, write_checksum=False, write_content_size=True).compress(content)


# Reading


def decompress(body: bytes, *, max_bytes: int) -> bytes:
    """Return the content of the one frame that `body` is; refuse it by its header before it is decompressed."""
    if body[:4] != b"\x28\xb5\x2f\xfd":
        raise Refused("malformed_submission", "not a frame")
    try:
        header = zstandard.get_frame_parameters(body)
    except zstandard.ZstdError as error:
        raise Refused("malformed_submission", str(error)) from None
    single_segment = body[4] >> 5 & 1
    states_size = bool(body[4] >> 6) or bool(single_segment)
    if not states_size or not 1 <= header.content_size <= max_bytes or header.dict_id or header.has_checksum:
        raise Refused("malformed_submission", "header")
    if header.window_size > 8 * MIB and header.window_size > header.content_size:
        raise Refused("malformed_submission", "window")
    window = max(header.window_size, header.content_size, 1024)
    stream = zstandard.ZstdDecompressor(max_window_size=window).decompressobj(read_across_frames=False)
    try:
        content = stream.decompress(body)
    except zstandard.ZstdError as error:
        raise Refused("malformed_submission", str(error)) from None
    if not stream.eof or stream.unused_data or len(content) != header.content_size:
        raise Refused("malformed_submission", "not one whole frame")
    return content


class Reader:
    """MessagePack, read from the front with the types that are expected."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise Refused("malformed_submission", "cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def length(self, small: tuple[int, int] | None, codes: dict[int, int]) -> int:
        code = self.take(1)[0]
        if small is not None and small[0] <= code < small[0] + small[1]:
            return code - small[0]
        if code not in codes:
            raise Refused("malformed_submission" if code == 0xC1 else "wrong_schema", f"type {code:#x}")
        return int.from_bytes(self.take(codes[code]), "big")

    def str(self) -> str:
        raw = self.take(self.length((0xA0, 32), {0xD9: 1, 0xDA: 2, 0xDB: 4}))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise Refused("malformed_submission", "not UTF-8") from None

    def bin(self) -> bytes:
        return self.take(self.length(None, {0xC4: 1, 0xC5: 2, 0xC6: 4}))

    def array(self) -> range:
        return range(self.length((0x90, 16), {0xDC: 2, 0xDD: 4}))

    def fields(self, names: Sequence[str]) -> Any:
        """Yield each of `names`, which must be exactly the map's keys in this order."""
        if self.length((0x80, 16), {0xDE: 2, 0xDF: 4}) != len(names):
            raise Refused("wrong_schema", "fields")
        for name in names:
            if self.str() != name:
                raise Refused("wrong_schema", f"not {name}")
            yield name


def _row(reader: Reader) -> Row:
    values: dict[str, Any] = {}
    for name in reader.fields(KEYS):
        if name == "proofs":
            values[name] = tuple(reader.bin() for _ in reader.array())
            continue
        raw = reader.bin()
        width = 16 if name == "seed" else struct.calcsize("<" + LISTS[name])
        if len(raw) != 16 if name == "seed" else len(raw) % width:
            raise Refused("wrong_schema", name)
        values[name] = raw if name == "seed" else tuple(item for (item,) in struct.iter_unpack("<" + LISTS[name], raw))
    return Row(**values)


def read_file(body: bytes, spec: dict[str, Any]) -> list[Row]:
    """Return the rows of a submission (checks 1 to 3); raises Refused with the verdict's reason."""
    bounds = bounds_of(spec)
    content = decompress(body, max_bytes=bounds.content_bytes)
    reader, rows = Reader(content), []
    for name in reader.fields(("format", "rows")):
        if name == "format":
            if reader.str() != FORMAT:
                raise Refused("wrong_schema", "format")
        else:
            rows = [_row(reader) for _ in reader.array()]
    if reader.at != len(content):
        raise Refused("malformed_submission", "something follows")
    too_many = any(len(getattr(row, name)) > bounds.of(name) for row in rows for name in LISTS) or any(
        len(row.proofs) > bounds.proofs or any(len(one) > bounds.proof_bytes for one in row.proofs) for row in rows
    )
    if too_many or encode_content(rows) != content:
        raise Refused("wrong_schema", "another encoding, or too many items")
    if len(rows) != spec["sampling"]["group_size"]:
        raise Refused("wrong_group_size")
    return rows


@dataclass(frozen=True)
class Expected:
    """What a slot forces of its submission, and what the leased policy says of tokens.

    `course(row)` gives how a row's completion goes (Turns.course). No prompt has more than `max_prompt_tokens`, and no
    completion more than `max_new_tokens`, in the slot's environment.
    """

    version: int
    prompt_ids: tuple[int, ...]
    seeds: tuple[bytes, ...]
    vocabulary: int
    hidden: int
    published: frozenset[int]
    max_prompt_tokens: int
    max_new_tokens: int
    course: Callable[[Sequence[int]], Course]


def _fails(reason: str, broken: bool, row: int) -> None:
    if broken:
        raise Refused(reason, f"row {row}")


def _check_segments(row: Row, expected: Expected, lead: int) -> bool:
    versions, tokens = row.segment_versions, row.segment_tokens
    return (
        len(versions) == len(tokens) >= 1
        and all(count >= 1 for count in tokens)
        and sum(tokens) == len(row.completion_ids)
        and all(low < high for low, high in itertools.pairwise(versions))
        and all(expected.version <= version <= expected.version + lead for version in versions)
        and set(versions) <= expected.published
    )


def check_rows(rows: Sequence[Row], expected: Expected, spec: dict[str, Any]) -> None:
    """Make checks 4 to 15 and decode the proofs; raises Refused with the reason of the first that fails."""
    sampling, proofs = spec["sampling"], spec["proofs"]
    measured: list[list[tuple[int, int, int]]] = []
    for number, row in enumerate(rows):
        count = len(row.completion_ids)
        _fails("wrong_prompt", row.prompt_ids != expected.prompt_ids, number)
        _fails("wrong_prompt", len(row.prompt_ids) > expected.max_prompt_tokens, number)
        _fails("wrong_seed", row.seed != expected.seeds[number], number)
        _fails("empty_completion", not count, number)
        _fails("too_long", count > expected.max_new_tokens, number)
        inside = all(0 <= token < expected.vocabulary for token in row.completion_ids)
        _fails("token_out_of_range", not inside, number)
        course = expected.course(row.completion_ids)
        _fails("tokens_after_eos", count > course.over, number)
        _fails("unfinished", count < course.over, number)
        _fails("wrong_logprob_count", len(row.logprobs) != count, number)
        sound = all(math.isfinite(value) and -80 <= value <= float(np.float32(1e-4)) for value in row.logprobs)
        _fails("logprob_not_finite", not sound, number)
        _fails("wrong_segments", not _check_segments(row, expected, sampling["max_version_lead"]), number)
        chunks = chunks_of(row.segment_tokens, list(course.replies), proofs["chunk_tokens"])
        _fails("wrong_proof_count", len(row.proofs) != len(chunks), number)
        sizes = [proof_bytes(proofs, tokens) for _, _, tokens in chunks]
        _fails("malformed_proof", [len(one) for one in row.proofs] != sizes, number)
        measured.append(chunks)
    if "toploc/1" in proofs["scheme"]:
        for row, chunks in zip(rows, measured, strict=True):
            for proof, (_, _, tokens) in zip(row.proofs, chunks, strict=True):
                decode_toploc(proof[: 2 + 2 * proofs["top_k"]], tokens * expected.hidden)
