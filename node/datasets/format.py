"""The canonical file of a dataset (docs/protocol.md, section 5.5).

    magic     8 bytes, "SWPDATA1"
    length    u32, little-endian: the bytes of the header
    header    canonical JSON of `DatasetHeader`
    offsets   rows + 1 times u64, little-endian: where each row begins, counted from the first; the last is the end
    rows      canonical JSON of a `DatasetRow` each, nothing between them

Where the operator keeps the answers, a file of prompts travels: the same without answers, metadata and salt.

Rows that may be leased come first, held-out ones last. A file is verified as a whole before it is used, and read row by
row: a row costs its own bytes, and 16 bytes of a digest stay in memory for it, since who can write to the file can
replace a row after the start. It is not mapped, since a mapped file that is cut short ends the process (SIGBUS).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import UNSET, Meta, UnsetType

from node.errors import DatasetFault
from node.protocol.environment_spec import MAX_DATASET_BYTES, MAX_PROBLEMS, Argument, FileSpec
from node.protocol.grading import GraderSpec
from shardcast.errors import Malformed
from shardcast.wire import Wire, decode, encode

MAGIC = b"SWPDATA1"
LENGTH_BYTES = 4
OFFSET_BYTES = 8
MAX_HEADER_BYTES = 64 * 1024
MAX_ROW_BYTES = 2**20
_PIECE_BYTES = 2**22
_ROW_DIGEST_BYTES = 16
"""Of a row's BLAKE3: another row for a given digest takes 2^128 attempts."""
MAX_MESSAGES = 256
MAX_METADATA = 64
SALT_BYTES = 32

Column = Annotated[str, Meta(min_length=1, max_length=200)]


class Columns(Wire, frozen=True):
    """Columns of the source that the rows are made of; for people."""

    prompt: Column | None
    messages: Column | None
    answer: Column
    metadata: Annotated[tuple[Column, ...], Meta(max_length=MAX_METADATA)] = ()


class DatasetHeader(Wire, frozen=True):
    """What holds for all rows: the grader of their answers, and the `system` text before each, "" for none.

    Of `rows`, the last `held_out` are never leased. `salt` is random where the operator keeps the answers: without it,
    who knows the prompts could try few or short answers against the file's digest.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
    grader: GraderSpec
    system: Annotated[str, Meta(max_length=16_384)]
    rows: Annotated[int, Meta(ge=1, le=MAX_PROBLEMS)]
    held_out: Annotated[int, Meta(ge=0, le=MAX_PROBLEMS)]
    columns: Columns
    salt: Annotated[bytes, Meta(min_length=SALT_BYTES, max_length=SALT_BYTES)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.held_out >= self.rows:
            raise ValueError("held_out must leave a row to train on")

    @property
    def leased(self) -> int:
        """How many rows slots are drawn from."""
        return self.rows - self.held_out


class Message(Wire, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class DatasetRow(Wire, frozen=True):
    """One problem: either a `prompt`, or `messages` up to the assistant's turn; and the answer to grade against.

    Neither answer nor metadata in a file of prompts.
    """

    prompt: Annotated[str, Meta(min_length=1)] | None
    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MAX_MESSAGES)] | None
    answer: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    metadata: Annotated[dict[str, Argument | None], Meta(max_length=MAX_METADATA)] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a row has either a prompt or messages")
        if self.messages is not None and self.messages[-1].role not in {"user", "tool"}:
            raise ValueError("messages end before the assistant's turn")
        if isinstance(self.answer, UnsetType) and self.metadata:
            raise ValueError("a row without an answer has no metadata")


class Dataset:
    """An open, verified file. Thread-safe; the file is closed with the last reference."""

    def __init__(self, file: _OpenFile, digest: str) -> None:
        """Parse all of `file`, whose digest this is; raises DatasetFault "dataset_malformed" or "dataset_changed"."""
        self.digest = digest
        self.bytes = file.size_bytes
        answered = set[bool]()
        self._file = file
        parsed = _HashedReads(file)
        try:
            self.header, after = _header(parsed)
            self._offsets, self._start = _offsets(parsed, after, rows=self.header.rows)
            self._digests = np.empty((self.header.rows, _ROW_DIGEST_BYTES), np.uint8)
            for index in range(self.header.rows):
                row = parsed.read(*self._place(index))
                answered.add(not isinstance(_decode(row, index).answer, UnsetType))
                self._digests[index] = np.frombuffer(_row_digest(row), np.uint8)
            self.has_answers = _has_answers(self.header, answered)
        except Malformed as error:
            raise DatasetFault(f"the dataset is malformed: {error}", code="dataset_malformed") from error
        if parsed.digest() != digest:
            raise DatasetFault("the dataset's file was changed while it was read", code="dataset_changed")

    @classmethod
    def open(cls, path: Path, spec: FileSpec | None = None) -> Self:
        """Open the file at `path`, the one that `spec` names unless that is None, and verify all of it.

        Raises DatasetFault: "dataset_missing", "dataset_changed" if its size or digest is not the spec's, or
        "dataset_malformed".
        """
        try:
            file = _OpenFile(path)
            size = file.size_bytes
            if spec is not None and size != spec.bytes:
                detail = f"{path} has {size} bytes, and the run's dataset {spec.bytes}"
                raise DatasetFault(detail, code="dataset_changed")
            if not len(MAGIC) + LENGTH_BYTES < size <= MAX_DATASET_BYTES:
                raise DatasetFault(f"{path} has {size} bytes, which no dataset has", code="dataset_malformed")
            digest = file.digest()
        except OSError as error:
            raise DatasetFault(f"{path}: {error.strerror or error}", code="dataset_missing") from error
        if spec is not None and digest != spec.digest:
            raise DatasetFault(
                f"{path} has the digest {digest[:16]}…, and the run's dataset {spec.digest[:16]}…",
                code="dataset_changed",
            )
        return cls(file, digest)

    def row(self, index: int) -> DatasetRow:
        """Return row `index`; raises DatasetFault if there is none, or if the file was changed since it was opened."""
        if not 0 <= index < self.header.rows:
            detail = f"there is no row {index} among the dataset's {self.header.rows}"
            raise DatasetFault(detail, code="dataset_malformed")
        data = self._file.read(*self._place(index))
        if _row_digest(data) != self._digests[index].tobytes():
            detail = f"{self._file.path} was changed: row {index} is not the one that was verified"
            raise DatasetFault(detail, code="dataset_changed")
        return _decode(data, index)

    def prompts(self) -> Iterator[bytes]:
        """Yield the bytes of the file of prompts that follows from this file of answers; raises DatasetFault."""
        count = self.header.rows
        yield preamble(msgspec.structs.replace(self.header, salt=UNSET))
        lengths = np.fromiter((len(self._prompt(index)) for index in range(count)), np.uint64, count)
        yield offsets_of(lengths)
        yield from map(self._prompt, range(count))

    def _prompt(self, index: int) -> bytes:
        return encode(msgspec.structs.replace(self.row(index), answer=UNSET, metadata={}))

    def _place(self, index: int) -> tuple[int, int]:
        """Return where row `index` begins and ends in the file."""
        return self._start + int(self._offsets[index]), self._start + int(self._offsets[index + 1])


def _has_answers(header: DatasetHeader, answered: set[bool]) -> bool:
    """Return whether all rows have answers, none or all of which do (`answered`); raises Malformed."""
    if len(answered) != 1:
        raise Malformed("some of its rows have answers, and others none")
    (has_answers,) = answered
    if header.salt and not has_answers:
        raise Malformed("it has a salt, and no answers")
    return has_answers


def _row_digest(data: bytes) -> bytes:
    return blake3(data).digest(length=_ROW_DIGEST_BYTES)


def _decode(data: bytes, index: int) -> DatasetRow:
    """Parse row `index`; raises Malformed."""
    try:
        return decode(DatasetRow, data, max_bytes=MAX_ROW_BYTES)
    except Malformed as error:
        raise Malformed(f"row {index}: {error}", code=error.code) from error


class _OpenFile:
    """A file that stays open while it is referred to, whatever becomes of its name."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        self.path, self._descriptor = path, descriptor
        self.size_bytes = os.fstat(descriptor).st_size

    def read(self, begin: int, end: int) -> bytes:
        """Return these bytes; raises DatasetFault "dataset_changed" where the file has become shorter or unreadable."""
        pieces, at = [], begin
        while at < end:
            try:
                piece = os.pread(self._descriptor, end - at, at)
            except OSError as error:
                detail = f"{self.path} cannot be read any more: {error.strerror or error}"
                raise DatasetFault(detail, code="dataset_changed") from error
            if not piece:
                detail = f"{self.path} was cut short: it had {self.size_bytes} bytes, and ends before {end}"
                raise DatasetFault(detail, code="dataset_changed")
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    def digest(self) -> str:
        """Return the BLAKE3 digest of all of it; raises DatasetFault as `read` does."""
        hasher = blake3()
        for at in range(0, self.size_bytes, _PIECE_BYTES):
            hasher.update(self.read(at, min(at + _PIECE_BYTES, self.size_bytes)))
        return hasher.hexdigest()


class _HashedReads:
    """Reads of a file from its beginning to its end, and the digest of what was read."""

    def __init__(self, file: _OpenFile) -> None:
        self._file, self._hasher = file, blake3()
        self.size_bytes = file.size_bytes

    def read(self, begin: int, end: int) -> bytes:
        """Return these bytes, the next ones; raises DatasetFault as the file's `read` does."""
        data = self._file.read(begin, end)
        self._hasher.update(data)
        return data

    def digest(self) -> str:
        """Return the BLAKE3 digest of all that was read."""
        return self._hasher.hexdigest()


def _header(file: _HashedReads) -> tuple[DatasetHeader, int]:
    """Return the header, and where it ends."""
    begin = len(MAGIC) + LENGTH_BYTES
    start = file.read(0, begin)
    if start[: len(MAGIC)] != MAGIC:
        raise Malformed("it does not begin as a dataset does")
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if length > MAX_HEADER_BYTES:
        raise Malformed(f"its header has {length} bytes, more than {MAX_HEADER_BYTES}", code="oversized")
    end = begin + length
    if end > file.size_bytes:
        raise Malformed("it ends within its header")
    return decode(DatasetHeader, file.read(begin, end), max_bytes=MAX_HEADER_BYTES), end


def _offsets(file: _HashedReads, begin: int, *, rows: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], int]:
    """Return where each row begins and the last ends, relative to the first, and where that is in the file."""
    start = begin + OFFSET_BYTES * (rows + 1)
    if start > file.size_bytes:
        raise Malformed("it ends within its offsets")
    offsets = np.frombuffer(file.read(begin, start), dtype="<u8")
    lengths = np.diff(offsets)  # unsigned: a descending pair wraps around to an enormous length
    if offsets[0] != 0 or int(offsets[-1]) != file.size_bytes - start or int(lengths.max()) > MAX_ROW_BYTES:
        raise Malformed("its offsets are not those of its rows")
    return offsets, start


def offsets_of(lengths: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> bytes:
    """Return the offsets of rows of these lengths."""
    offsets = np.zeros(len(lengths) + 1, "<u8")
    offsets[1:] = np.cumsum(lengths)
    return offsets.tobytes()


def preamble(header: DatasetHeader) -> bytes:
    """Return what stands before the offsets."""
    text = msgspec.json.encode(header)
    return MAGIC + len(text).to_bytes(LENGTH_BYTES, "little") + text
