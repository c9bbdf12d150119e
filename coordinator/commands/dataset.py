"""`swarmproof dataset`: make and show the canonical file of a dataset (`node.datasets`)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import UNSET

from coordinator.errors import BadConfiguration
from node.commands.options import EXISTING_FILE, FILE, json_line, json_option, number_option
from node.protocol.environment_spec import DATASET, DatasetSpec, FileSpec
from node.protocol.run import parse_run_toml
from shardcast.errors import Malformed
from shardcast.files import write_atomically

if TYPE_CHECKING:
    from node.datasets.convert import Converted
    from node.protocol.grading import GraderSpec

SUFFIX = ".dataset"
MOST_HELD_OUT = 0.5
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@click.group()
def dataset() -> None:
    """Make a run's problems of files of your own."""


def _share(_ctx: click.Context, _param: click.Parameter, given: str) -> float:
    """Read "2%" or "0.02"."""
    try:
        share = float(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= MOST_HELD_OUT:
        raise click.BadParameter(f"{given!r} is no share from 0 to {MOST_HELD_OUT:.0%}")
    return share


@dataset.command()
@click.argument("source", metavar="FILE|FOLDER", type=click.Path(path_type=Path, exists=True))
@click.option("--prompt", metavar="COLUMN", help="The column with the question, as text.")
@click.option("--messages", metavar="COLUMN", help="In its place: a conversation up to the assistant's turn.")
@click.option("--answer", metavar="COLUMN", required=True, help="The column that completions are graded against.")
@click.option("--metadata", multiple=True, metavar="COLUMN", help="A column to keep; repeatable.")
@click.option("--grader", "kind", metavar="KIND", default="exact", show_default=True, help="How answers are graded.")
@click.option(
    "--grader-option", "settings", multiple=True, metavar="KEY=VALUE", help="One of its settings; repeatable."
)
@click.option("--system", metavar="TEXT", default="", help="What stands before each problem.")
@click.option(
    "--held-out", callback=_share, metavar="SHARE", default="0", show_default=True, help="Rows to evaluate on: 2%."
)
@click.option(
    "--answers",
    type=click.Choice(["operator"]),
    help="Who alone has the answers: they get a file of their own, which reaches no worker.  [default: everybody]",
)
@click.option("--name", metavar="NAME", help="The dataset's name in the run.  [default: the file's or folder's]")
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DATA|FILE",
    help="The run's data folder, or a file whose name ends in .dataset.",
)
@click.option("--write", "run_file", type=FILE, metavar="RUN.TOML", help="Add it to this run.toml, made if missing.")
@json_option("One line of JSON instead of text.")
def add(
    *,
    source: Path,
    prompt: str | None,
    messages: str | None,
    answer: str,
    metadata: tuple[str, ...],
    kind: str,
    settings: tuple[str, ...],
    system: str,
    held_out: float,
    answers: str | None,
    name: str | None,
    to: Path,
    run_file: Path | None,
    as_json: bool,
) -> None:
    """Make a dataset of JSONL, CSV or Parquet files.

    \b
    Example:
      swarmproof dataset add capitals.csv --prompt question --answer capital \\
        --held-out 2% --to run/ --write run.toml

    A dot in a column's name leads into an object. Rows that no problem can be made of are left out, and counted by
    reason; so is every question after its first time.
    """
    if (prompt is None) == (messages is None):
        raise click.UsageError("Give --prompt or --messages, and not both.")
    from node.datasets.convert import ConvertSettings, convert
    from node.datasets.folder import DATASETS
    from node.datasets.format import SALT_BYTES, Columns
    from node.datasets.sources import read_rows, source_files
    from node.graders import check_answer

    chosen = name or re.sub(r"[^a-z0-9._-]+", "-", source.absolute().stem.lower()).strip("-._")[:64]
    if _NAME.fullmatch(chosen) is None:
        raise click.UsageError(f"{chosen!r} is no name of a dataset: --name takes a-z, 0-9, dot, - and _.")
    wanted = ConvertSettings(
        name=chosen,
        columns=Columns(prompt=prompt, messages=messages, answer=answer, metadata=tuple(sorted(set(metadata)))),
        grader=_grader(kind, settings),
        system=system,
        held_out=held_out,
        salt=UNSET if answers is None else secrets.token_bytes(SALT_BYTES),
    )
    if run_file is not None:  # before anything is made
        _with_lines(run_file, chosen, _lines(chosen, DatasetSpec(digest="0" * 64, bytes=1), count=1))
    if to.suffix != SUFFIX:
        to /= DATASETS
        to.mkdir(parents=True, exist_ok=True)
    rows = chain.from_iterable(read_rows(file) for file in source_files(source))
    made = convert(rows, wanted, to=to, check_answer=check_answer)
    lines = _lines(chosen, made.spec, count=made.header.leased)
    if run_file is not None:
        write_atomically(run_file, _with_lines(run_file, chosen, lines))
    if as_json:
        click.echo(json_line(_described(made, chosen)))
    else:
        _show_made(made)
        in_file = f"\nIn run.toml:\n\n{lines}" if run_file is None else f"{run_file} has it as {DATASET}{chosen}\n"
        click.echo(in_file, nl=False)


@dataset.command()
@click.argument("file", type=EXISTING_FILE)
@number_option("--rows", "First rows that are shown.", least=0, most=1000, default=3)
@json_option("One line of JSON instead of text.")
def show(*, file: Path, rows: int, as_json: bool) -> None:
    """Verify a dataset's file, and show what is in it.

    \b
    Example:
      swarmproof dataset show run/datasets/3700b3a3….dataset
    """
    from node.client.http import printable
    from node.datasets.format import Dataset

    opened = Dataset.open(file)
    header = opened.header
    first = [opened.row(index) for index in range(min(rows, header.rows))]
    if as_json:
        about = {"digest": opened.digest, "bytes": opened.bytes, "header": header, "rows": first}
        click.echo(json_line(about))
        return
    click.echo(f"{header.name}: {header.rows:,} rows, {header.held_out:,} of them held out")
    click.echo(f"digest  {opened.digest}, {opened.bytes:,} bytes")
    click.echo(f"grader  {msgspec.json.encode(header.grader).decode()}")
    if header.system:
        click.echo(f"system  {printable(header.system)}")
    for index, row in enumerate(first):
        click.echo(f"row {index}   {printable(msgspec.json.encode(row).decode())}")


def _grader(kind: str, settings: Sequence[str]) -> GraderSpec:
    """Return the grader of a name, "math" or "math/1", with its settings; raises click.UsageError."""
    from node.protocol.grading import GraderSpec as Graders

    fields: dict[str, Any] = {"kind": kind if "/" in kind else f"{kind}/1"}
    for setting in settings:
        key, mark, value = setting.partition("=")
        if not mark:
            raise click.UsageError(f"--grader-option takes KEY=VALUE, not {setting!r}.")
        try:
            fields[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            fields[key] = value
    try:
        grader: GraderSpec = msgspec.convert(fields, Graders)
    except msgspec.ValidationError as error:
        raise click.UsageError(f"--grader {kind}: {error}.") from error
    return grader


def _lines(name: str, spec: DatasetSpec, *, count: int) -> str:
    """Return the lines of run.toml that name a dataset."""
    file, who = f'digest = "{spec.digest}", bytes = {spec.bytes}', ""
    if isinstance(spec.answers, FileSpec):
        file += f', answers = {{ digest = "{spec.answers.digest}", bytes = {spec.answers.bytes} }}'
        who = 'answers = "operator"\n'
    return (
        f'[[environments]]\nname = "{DATASET}{name}"\ndataset = {{ {file} }}\n{who}problems = {{ count = {count} }}\n'
    )


def _with_lines(run_file: Path, name: str, lines: str) -> bytes:
    """Return a run.toml, or the beginning of one, with `lines` behind it; raises BadConfiguration if that is no run."""
    try:
        before = run_file.read_text(encoding="utf-8") if run_file.exists() else f'name = "{name}"\n'
        text = f"{before.rstrip()}\n\n{lines}"
        spec = parse_run_toml(text)
    except (Malformed, UnicodeDecodeError) as error:
        raise BadConfiguration(f"the dataset cannot be added to {run_file}: {error}") from error
    if [one.name for one in spec.environments].count(DATASET + name) > 1:
        raise BadConfiguration(f"{run_file} has an environment {DATASET}{name} already; take it out, or give --name")
    return text.encode()


def _described(made: Converted, name: str) -> dict[str, Any]:
    skipped = {
        code: {"count": one.count, "first": one.first, "detail": one.detail} for code, one in made.skipped.items()
    }
    return {
        "path": str(made.path),
        "answers": None if made.answers is None else str(made.answers),
        "environment": DATASET + name,
        "dataset": made.spec,
        "rows": made.header.rows,
        "held_out": made.header.held_out,
        "skipped": skipped,
    }


def _show_made(made: Converted) -> None:
    click.echo(
        f"{made.path}: {made.header.rows:,} rows, {made.header.held_out:,} of them held out, {made.spec.bytes:,} bytes"
    )
    if made.answers is not None:
        click.echo(f"{made.answers}: its answers; keep this file, as no command makes the same again")
    for line in _skipped_lines(made):
        click.echo(line, err=True)


def _skipped_lines(made: Converted) -> Iterator[str]:
    for code, one in sorted(made.skipped.items()):
        more = f" and {one.count - len(one.first):,} more" if one.count > len(one.first) else ""
        detail = f" ({one.detail})" if one.detail else ""
        yield f"left out, {code}: {', '.join(one.first)}{more}{detail}"
