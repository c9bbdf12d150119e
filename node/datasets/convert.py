"""`swarmproof dataset add`: make the canonical file of an operator's own files."""

from __future__ import annotations

import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from node.datasets.folder import dataset_file
from node.datasets.format import (
    MAX_HEADER_BYTES,
    MAX_ROW_BYTES,
    OFFSET_BYTES,
    Columns,
    Dataset,
    DatasetHeader,
    DatasetRow,
    offsets_of,
    preamble,
)
from node.datasets.sources import SourceRow
from node.errors import ConfigError, NodeError
from node.protocol.environment_spec import MAX_DATASET_BYTES, MAX_PROBLEMS, DatasetSpec, FileSpec
from node.protocol.grading import GraderSpec
from shardcast.content import file_digest
from shardcast.files import sync_folder
from shardcast.wire import derive, encode

NAMED_LINES = 5
"""How many lines of each kind of skipped row are named."""

MAX_NAMES = 400
"""Characters of the names of columns in a message."""

CheckAnswer = Callable[[GraderSpec, str], None]


class Unfit(Exception):
    """A source's row that cannot be one of the dataset; `code` says why, and `detail` more where there is more."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(code)
        self.code, self.detail = code, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """What is made of the columns.

    `held_out` is the share of rows, by digest of the question, 0 .. 0.5. `salt`: 32 random bytes
    where answers get a file of their own, which the operator keeps.
    """

    name: str
    columns: Columns
    grader: GraderSpec
    system: str = ""
    held_out: float = 0.0
    salt: bytes | UnsetType = UNSET


@dataclass(slots=True)
class Skipped:
    """Rows of one kind that were left out: how many, where the first of them stand, and what the first one lacks."""

    detail: str = ""
    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Converted:
    """A finished file, and what was left out of it, by reason code. `answers` is the file that the operator keeps."""

    path: Path
    spec: DatasetSpec
    header: DatasetHeader
    skipped: Mapping[str, Skipped]
    answers: Path | None = None


def convert(rows: Iterable[SourceRow], settings: ConvertSettings, *, to: Path, check_answer: CheckAnswer) -> Converted:
    """Write the dataset of `rows` to the file `to`, or into the folder `to` under its digest.

    With a salt that is the file of prompts; the file of answers is beside it, NAME.answers.dataset for a file
    NAME.dataset. Rows that are unfit, and those whose question came before, are left out and counted. The same rows and
    settings make the same bytes. Raises ConfigError where nothing is left, or too much.
    """
    folder = to if to.is_dir() else to.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".dataset-", dir=folder) as work:
        leased, held_out = _Spool(Path(work) / "leased"), _Spool(Path(work) / "held-out")
        with leased.file, held_out.file:
            skipped = _sort_rows(rows, settings, leased, held_out, check_answer)
            if not leased.lengths:
                raise ConfigError("No row is left to train on." + _advice(skipped))
            header = DatasetHeader(
                name=settings.name,
                grader=settings.grader,
                system=settings.system,
                rows=len(leased.lengths) + len(held_out.lengths),
                held_out=len(held_out.lengths),
                columns=settings.columns,
                salt=settings.salt,
            )
            made = Path(work) / "dataset"
            _assemble(made, header, leased, held_out)
        answers: FileSpec | UnsetType = UNSET
        answers_path = None
        if settings.salt:
            secret, answers, made = made, _file_spec(made), _separate(made)
            target = to / dataset_file(answers.digest) if to.is_dir() else to.with_suffix(f".answers{to.suffix}")
            answers_path = _put(secret, target, mode=0o600)
        public = _file_spec(made)
        path = _put(made, to / dataset_file(public.digest) if to.is_dir() else to, mode=0o644)
    spec = DatasetSpec(digest=public.digest, bytes=public.bytes, answers=answers)
    return Converted(path, spec, header, skipped, answers_path)


class _Spool:
    """Rows on their way, and the length of each in bytes."""

    def __init__(self, path: Path) -> None:
        self.file: IO[bytes] = path.open("w+b")
        self.lengths = array("Q")
        self.bytes = 0

    def add(self, data: bytes) -> None:
        self.file.write(data)
        self.lengths.append(len(data))
        self.bytes += len(data)


def _sort_rows(
    rows: Iterable[SourceRow], settings: ConvertSettings, leased: _Spool, held_out: _Spool, check_answer: CheckAnswer
) -> dict[str, Skipped]:
    skipped: dict[str, Skipped] = {}
    known = set[bytes]()
    for source in rows:
        try:
            data, question = _fit(source, settings, known, check_answer)
        except Unfit as unfit:
            kind = skipped.setdefault(unfit.code, Skipped(unfit.detail))
            kind.count += 1
            if len(kind.first) < NAMED_LINES:
                kind.first.append(f"{source.file.name}:{source.line}")
            continue
        known.add(question)
        (held_out if is_held_out(question, settings.held_out) else leased).add(data)
        if len(known) > MAX_PROBLEMS or leased.bytes + held_out.bytes > MAX_DATASET_BYTES - _overhead(len(known)):
            raise ConfigError(
                f"A dataset has at most {MAX_PROBLEMS:,} rows and {MAX_DATASET_BYTES:,} bytes; make several of it."
            )
    return skipped


def _fit(
    source: SourceRow, settings: ConvertSettings, known: Container[bytes], check_answer: CheckAnswer
) -> tuple[bytes, bytes]:
    """Return a row's bytes and the digest of its question, none of the `known` ones; raises Unfit."""
    row, answer = _row(source, settings.columns)
    try:
        check_answer(settings.grader, answer)
    except NodeError as error:
        raise Unfit("bad_answer") from error
    data, question = encode(row), question_digest(row)
    if len(data) > MAX_ROW_BYTES:
        raise Unfit("too_large")
    if question in known:
        raise Unfit("duplicate")
    return data, question


def _overhead(rows: int) -> int:
    return MAX_HEADER_BYTES + OFFSET_BYTES * (rows + 2)


def question_digest(row: DatasetRow) -> bytes:
    """Return the digest of what is asked: prompt or messages, and neither answer nor metadata."""
    return derive("swarmproof/1 dataset question", msgspec.json.encode((row.prompt, row.messages)))


def is_held_out(question: bytes, share: float) -> bool:
    """Return whether a row is held out of training where a `share` of them is.

    By its own digest alone: a row stays on its side when others come and go, or its answer is corrected.
    """
    return int.from_bytes(question[:8], "big") < int(share * 2**64)


def _assemble(path: Path, header: DatasetHeader, *spools: _Spool) -> None:
    lengths = np.concatenate([np.array(spool.lengths, dtype=np.uint64) for spool in spools])
    with path.open("wb") as file:
        file.write(preamble(header))
        file.write(offsets_of(lengths))
        for spool in spools:
            spool.file.seek(0)
            shutil.copyfileobj(spool.file, file, 2**20)


def _separate(answers: Path) -> Path:
    """Write the file of prompts that follows from a file of answers beside it, and return it."""
    prompts = answers.with_name("prompts")
    with prompts.open("wb") as file:
        file.writelines(Dataset.open(answers).prompts())
    return prompts


def _file_spec(path: Path) -> FileSpec:
    return FileSpec(digest=file_digest(path), bytes=path.stat().st_size)


def _put(made: Path, target: Path, *, mode: int) -> Path:
    """Move a finished file to its place, durably, and return that."""
    made.chmod(mode)
    with made.open("rb") as file:
        os.fsync(file.fileno())
    made.replace(target)
    sync_folder(target.parent)
    return target


def _row(source: SourceRow, columns: Columns) -> tuple[DatasetRow, str]:
    """Return the row that `source` becomes, and its answer; raises Unfit."""
    if source.fields is None:
        raise Unfit(source.complaint)
    answer = _text(_column(source.fields, columns.answer))
    if not answer.strip():
        raise Unfit("empty_answer")
    prompt = messages = None
    if columns.messages is not None:
        messages = _column(source.fields, columns.messages)
        if isinstance(messages, str):
            messages = _decoded(messages)
    if columns.prompt is not None:
        prompt = _text(_column(source.fields, columns.prompt))
        if not prompt.strip():
            raise Unfit("empty_prompt")
    metadata = {name: _scalar(_column(source.fields, name)) for name in sorted(columns.metadata)}
    try:
        fields = {"prompt": prompt, "messages": messages, "answer": answer, "metadata": metadata}
        return msgspec.convert(fields, DatasetRow), answer
    except msgspec.ValidationError as error:
        raise Unfit("bad_messages" if columns.messages is not None else "bad_row") from error


def _column(fields: Mapping[str, Any], name: str) -> Any:
    """Return a column's value; a dot in a name that is no column's leads into objects."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise Unfit("missing_column", f"no {name!r} among {_listed(fields)}")
        value = value[part]
    return value


def _listed(fields: Mapping[str, Any]) -> str:
    """Return the names of a row's columns, as many as fit a message."""
    names = ", ".join(map(repr, fields))
    return names if len(names) <= MAX_NAMES else f"{names[:MAX_NAMES]} …"


def _text(value: Any) -> str:
    """Return a value as text: what is neither text nor missing as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else _json(value)


def _scalar(value: Any) -> Any:
    return value if value is None or isinstance(value, str | bool | int | float) else _json(value)


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Unfit("bad_value") from error


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unfit("bad_messages") from error


def _advice(skipped: Mapping[str, Skipped]) -> str:
    if not skipped:
        return ""
    code, most = max(skipped.items(), key=lambda item: item[1].count)
    detail = f" ({most.detail})" if most.detail else ""
    return f" {most.count:,} were left out: {code}, first at {most.first[0]}{detail}."


__all__ = ["ConvertSettings", "Converted", "Skipped", "convert", "is_held_out"]
