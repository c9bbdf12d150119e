"""`swarmproof problems`: offline filtering by measured pass rate (`coordinator.training.filtering`)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from coordinator.commands.evaluate import policy_file, print_table
from coordinator.commands.options import policy_option, run_file_option, seed_option
from coordinator.errors import BadConfiguration
from node.commands.dataset_options import datasets_folder, datasets_option
from node.commands.engine_options import check_engine, engine_maker, engine_options, import_models, refuse_vllm_options
from node.commands.options import FILE, json_line, json_option, number_option
from node.runtime.extras import install_hint
from shardcast.files import write_atomically

if TYPE_CHECKING:  # imports torch, too slow for --help
    from coordinator.training.filtering import Filtered
    from node.protocol.run import RunSpec


@click.command()
@run_file_option("The run.toml whose environments are filtered.")
@policy_option
@number_option("--count", "Problems of each environment that are measured, from index 0 on.", most=2**20, default=512)
@number_option("--samples", "Completions of each problem.", most=1024, default=8)
@click.option(
    "--min",
    "lowest",
    type=click.FloatRange(0, 1),
    metavar="RATE",
    default=0.1,
    show_default=True,
    help="The lowest pass rate (mean reward) of a problem that is kept.",
)
@click.option(
    "--max",
    "highest",
    type=click.FloatRange(0, 1),
    metavar="RATE",
    default=0.9,
    show_default=True,
    help="The highest.",
)
@seed_option("Draws the completions: the same seed, the same problems are kept.")
@datasets_option
@engine_options
@click.option(
    "--out",
    type=FILE,
    help="The file to write.  [default: beside --run, with .filtered before .toml]",
)
@json_option("One line of JSON instead of a table.")
def problems(
    *,
    run_file: Path,
    policy: Path | None,
    count: int,
    samples: int,
    lowest: float,
    highest: float,
    seed: int,
    datasets: Path | None,
    engine: str,
    out: Path | None,
    as_json: bool,
    **compute: Any,
) -> None:
    """Keep the problems that the first policy solves now and then.

    \b
    Example:
      swarmproof problems --run run.toml --count 2048 --samples 8 --min 0.1 --max 0.9

    It measures the pass rate of each environment's first problems, and writes a copy of run.toml, comments included,
    whose slots use the kept ones only. Start the run with that copy: problems cannot change later.

    What is measured is kept beside --out, with .measured behind it. The same command goes on after a kill, and a larger
    --count or other bounds measure only what is new.
    """
    if find_spec("tomlkit") is None:
        raise BadConfiguration(f"tomlkit is not installed here: {install_hint('operator')}")
    refuse_vllm_options(engine)
    check_engine(engine, compute["device"])
    import_models()
    from coordinator.run.chat import resolve_chat
    from coordinator.run.definition import read_run_file
    from coordinator.training.filtering import FilterSettings, filter_problems, filtered_spec, measured_digest
    from coordinator.training.measured import MeasuredFile
    from node.datasets.folder import find_datasets

    with tempfile.TemporaryDirectory(prefix="problems-") as folder:
        make_engine = engine_maker(engine, state=Path(folder), **compute)
        try:
            settings = FilterSettings(
                count=count, samples=samples, lowest=lowest, highest=highest, seed=seed, make_engine=make_engine
            )
        except ValueError as error:
            raise click.UsageError(f"{error}.") from error
        folder_of_datasets = datasets_folder(run_file, datasets)
        text, spec = read_run_file(run_file, datasets=folder_of_datasets)
        out = out or run_file.with_name(f"{run_file.stem}.filtered.toml")
        _check_result(text, spec, count=count, out=out)
        first = policy_file(spec, policy, Path(folder))
        files = find_datasets(folder_of_datasets, spec.dataset_files)
        drawn = resolve_chat(spec)
        belongs = measured_digest(first, spec=drawn, settings=settings, engine=f"{engine} {sorted(compute.items())}")
        with MeasuredFile(out.with_name(f"{out.name}.measured"), of=belongs) as measured:
            found = filter_problems(first, spec=drawn, settings=settings, datasets=files, measurements=measured)
    if not as_json:
        _show(found)
    if empty := [one.name for one in found if not one.kept]:
        raise BadConfiguration(
            f"no problem of {', '.join(empty)} has a pass rate from {lowest:g} to {highest:g}; measure more of them, "
            "widen the bounds, or leave the environment out"
        )
    try:
        wanted = filtered_spec(spec, found)
    except ValueError as error:
        raise BadConfiguration(f"so many problems make no run: {error}") from error
    write_atomically(out, filtered_text(text, wanted).encode())
    if as_json:
        click.echo(json_line({"environments": found, "out": str(out)}))
    else:
        click.echo(f"written: {out}")


def _check_result(text: str, spec: RunSpec, *, count: int, out: Path) -> None:
    """Raise BadConfiguration, before measuring, if the result could not be written."""
    from node.protocol.run import ProblemsSpec

    bitmap = bytes([255] * (count // 8)) + bytes([2 ** (count % 8) - 1] if count % 8 else [])
    kept = ProblemsSpec(count=count, kept=bitmap)
    try:
        every = tuple(msgspec.structs.replace(one, problems=kept) for one in spec.environments)
        filtered_text(text, msgspec.structs.replace(spec, environments=every))
    except ValueError as error:
        raise BadConfiguration(f"so many problems make no run: {error}") from error
    if not out.parent.is_dir():
        raise BadConfiguration(f"{out.parent} is no folder")


def filtered_text(text: str, wanted: RunSpec) -> str:
    """Return `text`, a run.toml, with the problems of `wanted`; raises BadConfiguration if that is not the result."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    from node.protocol.run import parse_run_toml
    from shardcast.errors import Malformed

    try:
        document: Any = tomlkit.parse(text)
        for entry, environment in zip(document["environments"], wanted.environments, strict=True):
            entry["problems"] = tomlkit.table()
            entry["problems"].update(msgspec.to_builtins(environment.problems))
        result = tomlkit.dumps(document)
        same = parse_run_toml(result) == wanted
    except (TOMLKitError, Malformed, KeyError, TypeError, ValueError) as error:
        raise BadConfiguration(f"the problems cannot be written into this run.toml: {error}") from error
    if not same:
        raise BadConfiguration("the problems cannot be written into this run.toml: write [[environments]] as tables")
    return result


def _show(found: Sequence[Filtered]) -> None:
    rows = []
    for one in found:
        rate = "unknown" if one.rate is None else f"{one.rate:.3f}"
        counts = (one.kept, one.below, one.above, one.unjudged or "")
        rows.append((one.name, str(one.count), rate, *map(str, counts)))
    print_table(("problems", "pass rate", "kept", "too hard", "too easy", "unjudged"), rows)
