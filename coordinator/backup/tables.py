"""Table rows as JSON lines, streamed in both directions in bounded memory.

A row is an array, since its columns are in the manifest. Bytes are base64, and the floats that JSON lacks are text:
"inf", "-inf", "nan". Numbers are written and read by msgspec, without loss.
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

from coordinator.backup.manifest import BackupError, HashingFile, TableFile, table_path
from coordinator.storage.database import Connection
from coordinator.storage.faults import DatabaseFault
from coordinator.storage.whole_tables import WholeTable, keeps_nul

MAX_ROW_BYTES: Final = 16 * 1024 * 1024
"""Per line. The longest is a policy's, whose manifest has up to 6 MiB."""

_MAX_INTEGER: Final = 2**63 - 1
_PIECE_BYTES: Final = 128 * 1024
_MAX_WINDOW_BYTES: Final = 2**23
_LEVEL: Final = 3
_INSERTED_ROWS: Final = 500
_INSERTED_BYTES: Final = 4 * 1024 * 1024

Scalar = None | bool | int | float | str
Row = list[Scalar]
_ROW: Final = msgspec.json.Decoder(list[Scalar])


def write_table(
    connection: Connection,
    table: WholeTable,
    folder: Path,
    generation: str,
    *,
    on_row: Callable[[Sequence[object]], None],
) -> TableFile:
    """Write all rows of `table` durably, ordered by primary key, calling `on_row` for each; return its file entry."""
    encoder = msgspec.json.Encoder()
    with table_path(folder, generation, table.name).open("xb") as file:
        hashed, rows = HashingFile(file), 0
        with zstandard.ZstdCompressor(_LEVEL).stream_writer(hashed.as_file(), closefd=False) as packed:
            for row in table.rows(connection):
                on_row(row)
                packed.write(encoder.encode([_json_value(value) for value in row]) + b"\n")
                rows += 1
        file.flush()
        os.fsync(file.fileno())
    return TableFile(
        name=table.name, columns=tuple(table.kinds), rows=rows, size_bytes=hashed.size_bytes, digest=hashed.digest
    )


def _json_value(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(folder: Path, generation: str, table: TableFile) -> Iterator[Row]:
    """Yield the rows of `table`. Raises BackupError for a changed file, at the latest after the last row."""
    path = table_path(folder, generation, table.name)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != table.size_bytes:
                raise BackupError(f"{path} is damaged: its size is not {table.size_bytes} bytes")
            hashed, rows = HashingFile(file), 0
            for row in _decompressed_rows(hashed, table):
                rows += 1
                yield row
            while hashed.read(_PIECE_BYTES):
                pass
            if rows != table.rows or hashed.digest != table.digest:
                raise BackupError(f"{path} is damaged: its content does not match the manifest")
    except FileNotFoundError as error:
        raise BackupError(f"{path} is missing") from error
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackupError(f"{path} is damaged: {error}") from error


def _decompressed_rows(file: HashingFile, table: TableFile) -> Iterator[Row]:
    unpacked = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(
        file.as_file(), closefd=False
    )
    partial_line, rows = b"", 0
    while data := unpacked.read(_PIECE_BYTES):
        *lines, partial_line = (partial_line + data).split(b"\n")
        rows += len(lines)
        if rows > table.rows or max(map(len, (partial_line, *lines))) > MAX_ROW_BYTES:
            raise zstandard.ZstdError("more or longer rows than the manifest allows")
        for line in lines:
            row = _ROW.decode(line)
            if len(row) != len(table.columns):
                raise msgspec.DecodeError(f"row has {len(row)} values, expected {len(table.columns)}")
            yield row
    if partial_line:
        raise zstandard.ZstdError("last row is truncated")


def load_table(connection: Connection, table: WholeTable, columns: Sequence[str], rows: Iterator[Row]) -> None:
    """Insert `rows`; raises BackupError for wrong types, or what the database refuses."""
    kinds = table.kinds
    if set(columns) != set(kinds):
        raise BackupError(f"backup table {table.name} does not have its schema's columns")
    batch: list[dict[str, object]] = []
    size = 0
    replace_nul = not keeps_nul(connection)
    for row in rows:
        batch.append(
            {
                name: _column_value(value, kinds[name], replace_nul=replace_nul)
                for name, value in zip(columns, row, strict=True)
            }
        )
        size += sum(len(value) for value in row if isinstance(value, str))
        if len(batch) >= _INSERTED_ROWS or size >= _INSERTED_BYTES:
            _insert(connection, table, batch)
            batch, size = [], 0
    _insert(connection, table, batch)


def _insert(connection: Connection, table: WholeTable, rows: list[dict[str, object]]) -> None:
    try:
        table.insert(connection, rows)
    except DatabaseFault as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise BackupError(f"database refused backup table {table.name}: {reason}") from error


def _column_value(value: Scalar, kind: type, *, replace_nul: bool) -> object:
    """Convert `value` back to the type `kind` of its column; raises BackupError for another type.

    PostgreSQL text cannot hold NUL characters, which SQLite's can: they become U+FFFD, in names that users chose.
    """
    try:
        if value is None:
            return None
        if kind is bytes and isinstance(value, str):
            return base64.b64decode(value, validate=True)
        if kind is float and value in ("inf", "-inf", "nan"):
            return float(value)
    except binascii.Error as error:
        raise BackupError("backup row has invalid base64") from error
    if type(value) is not kind or (isinstance(value, int) and abs(value) > _MAX_INTEGER):
        raise BackupError(f"backup row has a value that is not of type {kind.__name__}")
    return value.replace("\x00", "\ufffd") if replace_nul and isinstance(value, str) else value
