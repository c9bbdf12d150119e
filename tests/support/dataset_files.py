"""Datasets of sums for tests, and what is around them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from node.datasets.convert import Converted, ConvertSettings, convert
from node.datasets.format import Columns
from node.datasets.sources import SourceRow
from node.graders import check_answer
from node.protocol.grading import ExactGrader
from node.protocol.run import EnvironmentSpec, ProblemsSpec

SALT = bytes(range(32))
COLUMNS = Columns(prompt="question", messages=None, answer="answer")


def sums(count: int) -> list[dict[str, Any]]:
    """Rows that the tiny policy's alphabet can spell."""
    return [{"question": f"Q:{10 + at}+{at % 7}=?\nA:", "answer": 10 + at + at % 7} for at in range(count)]


def source_rows(rows: Iterable[Any]) -> list[SourceRow]:
    """`rows` as the lines of a file."""
    return [SourceRow(Path("rows.jsonl"), line, row) for line, row in enumerate(rows, 1)]


def made(to: Path, rows: Iterable[Any] | None = None, **changes: Any) -> Converted:
    """A dataset in the file or folder `to`: of `rows`, or of thirty sums. With a `salt`, its answers are apart."""
    settings: dict[str, Any] = {"name": "sums", "columns": COLUMNS, "grader": ExactGrader()} | changes
    lines = source_rows(sums(30) if rows is None else rows)
    if not to.suffix:
        to.mkdir(parents=True, exist_ok=True)
    return convert(lines, ConvertSettings(**settings), to=to, check_answer=check_answer)


def damage(path: Path) -> None:
    """Change every row's prompt where the file lies, as a disk or another program may."""
    data = path.read_bytes()
    assert b"Q:" in data
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(data.replace(b"Q:", b"R:"))


def environment_of(dataset: Converted, **changes: Any) -> EnvironmentSpec:
    """An environment over all rows of `dataset` that are not held out."""
    fields: dict[str, Any] = {"problems": ProblemsSpec(count=dataset.header.leased)} | changes
    if dataset.spec.answers:
        fields["answers"] = "operator"
    return EnvironmentSpec(name="dataset:sums", dataset=dataset.spec, **fields)
