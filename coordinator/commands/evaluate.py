"""`swarmproof evaluate`: the reward of a policy on held-out problems (`coordinator.training.evaluation`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.commands.options import policy_option, run_file_option, seed_option
from coordinator.errors import BadConfiguration
from node.commands.dataset_options import datasets_folder, datasets_option
from node.commands.engine_options import check_engine, engine_maker, engine_options, import_models, refuse_vllm_options
from node.commands.options import EXISTING_FOLDER, json_line, json_option, number_option

if TYPE_CHECKING:  # imports torch, too slow for --help
    from coordinator.training.evaluation import Evaluation
    from node.protocol.run import RunSpec


@click.command()
@run_file_option("The run.toml whose environments, lengths and dtype count.")
@policy_option
@click.option(
    "--trainer",
    type=EXISTING_FOLDER,
    help="The trainer's --state, to measure a --version that it published.",
)
@number_option("--version", "Which.  [default: the newest]", metavar="NUMBER", least=0)
@number_option("--problems", "Held-out problems of each environment.", most=100_000, default=128)
@number_option("--samples", "Completions of each problem.", most=1024, default=1)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 10),
    metavar="T",
    help="0 takes the likeliest token always.  [default: the run's]",
)
@seed_option("Draws the problems and the completions: the same seed, the same both.")
@datasets_option
@engine_options
@json_option("One line of JSON instead of a table.")
def evaluate(
    *,
    run_file: Path,
    policy: Path | None,
    trainer: Path | None,
    version: int | None,
    problems: int,
    samples: int,
    temperature: float | None,
    seed: int,
    datasets: Path | None,
    engine: str,
    as_json: bool,
    **compute: Any,
) -> None:
    """Measure what a policy earns on problems that were held out.

    \b
    Example:
      swarmproof evaluate --run run.toml --trainer trainer/ --version 30

    It prints the mean reward of each environment with a 95 % confidence interval, and how long completions are. Nothing
    of a run is changed or asked; repeat it with other policies and the same --seed to compare them.
    """
    if trainer is not None and policy is not None:
        raise click.UsageError("Give --policy or --trainer, not both.")
    if version is not None and trainer is None:
        raise click.UsageError("--version is one of the --trainer's.")
    if temperature is not None and 0 < temperature <= 0.01:
        raise click.UsageError("--temperature is 0 or above 0.01.")
    refuse_vllm_options(engine)
    check_engine(engine, compute["device"])
    import_models()
    from coordinator.run.chat import resolve_chat
    from coordinator.run.definition import read_run_file
    from coordinator.training.evaluation import EvaluationSettings, evaluate_policy
    from node.datasets.folder import find_datasets

    with tempfile.TemporaryDirectory(prefix="evaluate-") as folder:
        make_engine = engine_maker(engine, state=Path(folder), **compute)
        try:
            settings = EvaluationSettings(
                problems=problems, samples=samples, temperature=temperature, seed=seed, make_engine=make_engine
            )
        except ValueError as error:
            raise click.UsageError(f"{error}.") from error
        folder_of_datasets = datasets_folder(run_file, datasets)
        spec = resolve_chat(read_run_file(run_file, datasets=folder_of_datasets)[1])
        file = _published(trainer, version) if trainer is not None else policy_file(spec, policy, Path(folder))
        files = find_datasets(folder_of_datasets, spec.dataset_files)
        found = evaluate_policy(file, spec=spec, settings=settings, datasets=files)
    if as_json:
        click.echo(json_line(found))
    else:
        _show(found)


def _published(trainer: Path, version: int | None) -> Path:
    """Return the file of a published version, the newest by default, in a trainer's folder; takes no lock."""
    found = {
        int(number): path
        for path in (trainer / "origin" / "versions").glob("*-*.bin")
        if (number := path.name.partition("-")[0]).isdecimal()
    }
    if not found:
        raise BadConfiguration(f"{trainer} holds no published policy: name the --state of a run's trainer")
    chosen = max(found) if version is None else version
    if chosen not in found:
        raise BadConfiguration(f"{trainer} holds policies {min(found)} to {max(found)}, not {chosen}")
    return found[chosen]


def check_is_policy(file: Path) -> None:
    """Raise BadConfiguration unless `file` begins as a policy file does, which a run.toml does not."""
    with file.open("rb") as opened:
        size, mark = int.from_bytes(opened.read(8), "little"), opened.read(1)
    if mark != b"{" or size > file.stat().st_size:
        raise BadConfiguration(f"--policy {file} is no policy file (safetensors), and no model's folder")


def policy_file(spec: RunSpec, policy: Path | None, folder: Path) -> Path:
    """Return `policy` as a policy file, converted into `folder` if it is a model's folder or None (the run's first)."""
    if policy is not None and policy.is_file():
        check_is_policy(policy)
        return policy
    import msgspec
    import torch

    from coordinator.training.initial import initial_policy
    from node.policy.file import write_policy

    if policy is not None:
        spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, initial=str(policy)))
    source = initial_policy(spec)
    file = folder / "policy.safetensors"
    try:
        write_policy(source, file, dtype=getattr(torch, spec.model.dtype))
    except ValueError as error:
        raise BadConfiguration(f"{policy or spec.model.initial} cannot be a policy here: {error}") from error
    return file


def _show(found: Evaluation) -> None:
    how = "greedy" if found.temperature == 0 else f"temperature {found.temperature:g}"
    drawn = "1 completion" if found.samples == 1 else f"{found.samples} completions"
    rows = []
    for one in found.environments:
        interval = "" if one.low is None or one.high is None else f"{one.low:.3f} .. {one.high:.3f}"
        lengths = (f"{one.tokens_mean:.1f}", f"{one.tokens_median:g}", str(one.tokens_most), f"{one.cut_off:.0%}")
        rows.append((one.name, str(one.problems), _reward(one.reward), interval, *lengths, str(one.unjudged or "")))
    columns = ("problems", "reward", "95 % interval", "tokens", "median", "most", "cut off", "unjudged")
    print_table(columns, rows, title=f"Held-out problems, seed {found.seed}, {drawn} of each, {how}")
    if len(found.environments) > 1:
        click.echo(f"by the run's weights: {_reward(found.reward)}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print one row per environment, its name first, then right-aligned `columns`; 100 wide unless on a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    table.box, table.pad_edge = box.SIMPLE_HEAD, False
    table.add_column("environment", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if os.isatty(1) else 100).print(table)


def _reward(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
