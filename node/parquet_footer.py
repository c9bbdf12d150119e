"""The columns in a Parquet footer, looked at before the library does (parquet.thrift, Thrift's compact protocol).

pyarrow's accessors of a column's metadata let C++ exceptions escape, which end the process: for a codec that it does
not know, for encrypted metadata, and for histograms of levels that do not fit the schema. The child process exists for
that, but its end costs hundreds of times what a refusal does. So what would end it is refused here, where only Python
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from node.protocol.reasons import Reason, Refusal

MAX_VALUES = 4096
MAX_DEPTH = 8
MAX_VARINT_BYTES = 10

CODECS = frozenset({0, 1, 6})
"""None, Snappy and Zstandard, by their numbers in parquet.thrift."""

# Field ids of parquet.thrift: of FileMetaData, RowGroup, ColumnChunk, ColumnMetaData and SizeStatistics.
_ROW_GROUPS = 4
_COLUMNS = 1
_META_DATA = 3
_CODEC, _SIZE_STATISTICS = 4, 16
_UNENCODED_BYTES, _REPETITION_HISTOGRAM, _DEFINITION_HISTOGRAM = 1, 2, 3

_CHUNK_FIELDS = frozenset(range(2, 8))
"""A chunk's offset, metadata and indexes; no other file, and nothing encrypted."""
_COLUMN_FIELDS = frozenset(range(1, 17))


@dataclass(frozen=True, slots=True)
class Levels:
    """What the schema says of a column: its highest levels, and whether its values are byte strings of any length."""

    repetition: int
    definition: int
    is_bytes: bool


def check_columns(footer: bytes, *, levels: Sequence[Levels]) -> None:
    """Raise Refusal (NOT_PARQUET) unless each row group has a column for each of `levels` that can be described."""
    try:
        for group in read_struct(footer)[_ROW_GROUPS]:
            for index, (chunk, level) in enumerate(zip(group[_COLUMNS], levels, strict=True)):
                _check_column(index, chunk, level)
    except (LookupError, ValueError, AttributeError, TypeError) as error:  # a field that is missing, or of another type
        raise Refusal(Reason.NOT_PARQUET, "Its footer is not that of a Parquet file.") from error


def _check_column(index: int, chunk: dict[int, Any], level: Levels) -> None:
    column = chunk[_META_DATA]
    if not (chunk.keys() <= _CHUNK_FIELDS and column.keys() <= _COLUMN_FIELDS):
        raise Refusal(Reason.NOT_PARQUET, f"Column {index} lies elsewhere, is encrypted, or has unknown metadata.")
    if column[_CODEC] not in CODECS:
        raise Refusal(Reason.NOT_PARQUET, f"Column {index} is not plain, snappy or zstd.")
    sizes = column.get(_SIZE_STATISTICS, {})
    histograms = ((_REPETITION_HISTOGRAM, level.repetition), (_DEFINITION_HISTOGRAM, level.definition))
    fits = all(len(sizes.get(histogram, ())) in (0, highest + 1) for histogram, highest in histograms)
    if not fits or (_UNENCODED_BYTES in sizes and not level.is_bytes):
        raise Refusal(Reason.NOT_PARQUET, f"Column {index} has statistics of another schema.")


def read_struct(data: bytes) -> dict[int, Any]:
    """The fields by id of the struct that `data` is from its first byte to its last; ValueError if it is none."""
    reader = _Reader(data)
    fields = reader.struct(MAX_DEPTH)
    if reader.at != len(data):
        raise ValueError("bytes after the struct")
    return fields


class _Kind(IntEnum):
    """Types of Thrift's compact protocol; maps are left out, since parquet.thrift has none."""

    TRUE = 1
    FALSE = 2
    BYTE = 3
    I16 = 4
    I32 = 5
    I64 = 6
    DOUBLE = 7
    BINARY = 8
    LIST = 9
    SET = 10
    STRUCT = 12


class _Reader:
    """Reads values one after the other; at most MAX_VALUES of them."""

    def __init__(self, data: bytes) -> None:
        self.at = 0
        self._data = data
        self._left = MAX_VALUES

    def struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 0x0F
            number = number + step if step else self._integer()
            if number in fields:
                raise ValueError("a field twice")
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth == 0:
            raise ValueError("too many values, or nested too deep")
        if kind in (_Kind.LIST, _Kind.SET):
            return self._list(depth - 1)
        return self.struct(depth - 1) if kind == _Kind.STRUCT else self._scalar(kind)

    def _scalar(self, kind: int) -> int | bytes:
        match kind:
            case _Kind.TRUE | _Kind.FALSE:
                return kind == _Kind.TRUE
            case _Kind.BYTE:
                return self._byte()
            case _Kind.I16 | _Kind.I32 | _Kind.I64:
                return self._integer()
            case _Kind.DOUBLE | _Kind.BINARY:
                return self._bytes(8 if kind == _Kind.DOUBLE else self._varint())
        raise ValueError("a value of no known type")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        size, kind = head >> 4, head & 0x0F
        if size == 0x0F:
            size = self._varint()
        if size > MAX_VALUES:
            raise ValueError("a list that is too long")
        if kind in (_Kind.TRUE, _Kind.FALSE):  # each takes a byte of its own in a list
            kind = _Kind.BYTE
        return [self._value(kind, depth) for _ in range(size)]

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a number that is too long")

    def _bytes(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise ValueError("it ends inside a value")
        return self._data[start : self.at]

    def _byte(self) -> int:
        return self._bytes(1)[0]
