"""Rows of the files that an operator has: JSONL, CSV and Parquet, each with its line.

These are the operator's own files. Limits are against mistakes: one line is held in memory at a time.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from node.errors import ConfigError
from node.runtime.extras import install_hint

MAX_LINE_BYTES = 16 * 2**20
_PARQUET_ROWS = 256
SUFFIXES = (".jsonl", ".ndjson", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row and where it stands; `fields` None where the line is none, with `complaint`, a reason code."""

    file: Path
    line: int
    fields: Mapping[str, Any] | None
    complaint: str = ""


def source_files(path: Path) -> list[Path]:
    """Return the files at `path`, of a folder all that can be read here, by name; raises ConfigError without any."""
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.suffix.lower() in SUFFIXES and one.is_file())
    else:
        files = [path] if path.suffix.lower() in SUFFIXES else []
    if not files:
        raise ConfigError(f"There is no data in {path}: a file's name ends in {', '.join(SUFFIXES)}.")
    return files


def read_rows(file: Path) -> Iterator[SourceRow]:
    """Yield every row of a file in order, bad lines included; raises ConfigError, OSError."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return _parquet(file)
    return _csv(file) if suffix == ".csv" else _jsonl(file)


def _jsonl(file: Path) -> Iterator[SourceRow]:
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                yield SourceRow(file, number, None, "line_too_long")
                while line and not line.endswith(b"\n"):
                    line = stream.readline(MAX_LINE_BYTES)
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                fields = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                yield SourceRow(file, number, None, "not_json")
                continue
            is_object = isinstance(fields, dict)
            yield SourceRow(file, number, fields if is_object else None, "" if is_object else "not_an_object")


def _csv(file: Path) -> Iterator[SourceRow]:
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, restkey=None, restval=None)
            _check_names(file, reader.fieldnames or ())
            for fields in reader:
                is_whole = None not in fields and None not in fields.values()
                yield SourceRow(
                    file, reader.line_num, fields if is_whole else None, "" if is_whole else "wrong_columns"
                )
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not in UTF-8 ({error.reason}): save it as that, or convert it (iconv)."
        ) from error
    except csv.Error as error:
        raise ConfigError(f"{file} is not CSV: {error}.") from error
    finally:
        csv.field_size_limit(limit)


def _check_names(file: Path, names: Sequence[str]) -> None:
    """Refuse two columns of one name, of which the last would be taken unsaid; those without one are no columns."""
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise ConfigError(f"{file} has two columns {twice[0]!r}: rename one of them.")


def _parquet(file: Path) -> Iterator[SourceRow]:
    try:
        import pyarrow as arrow  # noqa: PLC0415  (optional)
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(f"Parquet files need pyarrow: {install_hint('export')}") from error
    try:
        number = 0
        with ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield SourceRow(file, number, fields)
    except arrow.ArrowException as error:
        raise ConfigError(f"{file} cannot be read as Parquet: {error}.") from error
