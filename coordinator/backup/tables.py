"""The rows of a table as lines of JSON, there and back, a few at a time however long the table is.

A row is an array, because its columns are in the manifest. Bytes are base64, and the floats that JSON lacks are text:
"inf", "-inf", "nan". Nothing else is converted: integers and floats are what msgspec writes, which is what it reads.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import zstandard
from sqlalchemy import Connection, Table, insert, select
from sqlalchemy.exc import DBAPIError

from coordinator.backup.manifest import BackupError, Summed, TableFile, table_path

MAX_ROW_BYTES: Final = 16 * 1024 * 1024
"""Of a line. The longest is a policy's, whose manifest has up to 6 MiB."""

_MAX_INTEGER: Final = 2**63 - 1
_PIECE_BYTES: Final = 128 * 1024
_MAX_WINDOW_BYTES: Final = 2**23
_LEVEL: Final = 3
_ROWS_AT_ONCE: Final = 200
_LARGE_ROWS_AT_ONCE: Final = 20
_INSERTED_ROWS: Final = 500
_INSERTED_BYTES: Final = 4 * 1024 * 1024

Scalar = None | bool | int | float | str
Row = list[Scalar]
_ROW: Final = msgspec.json.Decoder(list[Scalar])


def write_table(
    connection: Connection, table: Table, folder: Path, generation: str, *, look: Callable[[Sequence[object]], None]
) -> TableFile:
    """Write all rows of `table`, in the order of its primary key, and have `look` see each; on disk when it returns."""
    columns = tuple(str(column.name) for column in table.columns)
    large = any(column.type.python_type is bytes for column in table.columns)
    query = select(table).order_by(*table.primary_key)
    fetched = query.execution_options(yield_per=_LARGE_ROWS_AT_ONCE if large else _ROWS_AT_ONCE)
    encoder = msgspec.json.Encoder()
    with table_path(folder, generation, table.name).open("xb") as file:
        summed, rows = Summed(file), 0
        with zstandard.ZstdCompressor(_LEVEL).stream_writer(summed.as_file(), closefd=False) as packed:
            for row in connection.execute(fetched):
                look(row)
                packed.write(encoder.encode([_plain(value) for value in row]) + b"\n")
                rows += 1
        file.flush()
        os.fsync(file.fileno())
    return TableFile(
        name=str(table.name), columns=columns, rows=rows, size_bytes=summed.size_bytes, digest=summed.digest
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(folder: Path, generation: str, table: TableFile) -> Iterator[Row]:
    """The rows of `table`. Raises BackupError, at the latest after the last one, for a file that is not as it was."""
    path = table_path(folder, generation, table.name)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != table.size_bytes:
                raise BackupError(f"{path} is damaged: it does not have {table.size_bytes} bytes")
            summed, rows = Summed(file), 0
            for row in _unpacked(summed, table):
                rows += 1
                yield row
            while summed.read(_PIECE_BYTES):
                pass
            if rows != table.rows or summed.digest != table.digest:
                raise BackupError(f"{path} is damaged: its content is not what was written")
    except FileNotFoundError as error:
        raise BackupError(f"{path} is missing") from error
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackupError(f"{path} is damaged: {error}") from error


def _unpacked(file: Summed, table: TableFile) -> Iterator[Row]:
    unpacked = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(
        file.as_file(), closefd=False
    )
    begun, rows = b"", 0
    while piece := unpacked.read(_PIECE_BYTES):
        *lines, begun = (begun + piece).split(b"\n")
        rows += len(lines)
        if rows > table.rows or max(map(len, (begun, *lines))) > MAX_ROW_BYTES:
            raise zstandard.ZstdError("more rows, or longer ones, than were written")
        for line in lines:
            row = _ROW.decode(line)
            if len(row) != len(table.columns):
                raise msgspec.DecodeError(f"a row of {len(row)} values")
            yield row
    if begun:
        raise zstandard.ZstdError("the last row has no end")


def load_table(connection: Connection, table: Table, columns: Sequence[str], rows: Iterator[Row]) -> None:
    """Insert `rows`; raises BackupError for what is not of the columns' types, or what the database refuses."""
    kinds = {column.name: column.type.python_type for column in table.columns}
    if set(columns) != set(kinds):
        raise BackupError(f"the backup's table {table.name} has other columns than its schema")
    taken: list[dict[str, object]] = []
    size = 0
    nul = connection.dialect.name == "postgresql"
    for row in rows:
        taken.append({name: _value(value, kinds[name], nul=nul) for name, value in zip(columns, row, strict=True)})
        size += sum(len(value) for value in row if isinstance(value, str))
        if len(taken) >= _INSERTED_ROWS or size >= _INSERTED_BYTES:
            insert_rows(connection, table, taken)
            taken, size = [], 0
    insert_rows(connection, table, taken)


def insert_rows(connection: Connection, table: Table, rows: list[dict[str, object]]) -> None:
    """Insert `rows`, if there are any; raises BackupError for what the database refuses."""
    try:
        if rows:
            connection.execute(insert(table), rows)
    except DBAPIError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise BackupError(f"the database does not take the backup's table {table.name}: {reason}") from error


def _value(value: Scalar, kind: type, *, nul: bool) -> object:
    """`value` for a column of `kind`, as it was before `write_table`. PostgreSQL has no text with NUL characters, which
    SQLite has: they become U+FFFD, in names that somebody gave himself."""
    try:
        if value is None:
            return None
        if kind is bytes and isinstance(value, str):
            return base64.b64decode(value, validate=True)
        if kind is float and value in ("inf", "-inf", "nan"):
            return float(value)
    except binascii.Error as error:
        raise BackupError("a row of the backup has bytes that are no base64") from error
    if type(value) is not kind or (isinstance(value, int) and abs(value) > _MAX_INTEGER):
        raise BackupError(f"a row of the backup has a value that is no {kind.__name__}")
    return value.replace("\x00", "\ufffd") if nul and isinstance(value, str) else value
