"""`swarmproof init`, with deferred imports: every command loads this module."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from node.commands.options import FILE


@click.command()
@click.option("--name", metavar="TEXT", help="What people call the run.  [default: asked for, or this folder's name]")
@click.option(
    "--model",
    metavar="FOLDER",
    help="The model's folder; tiny, which learns within minutes; or random-tiny, which is there at once.  "
    "[default: asked for, or tiny]",
)
@click.option(
    "--gpus", metavar="4x80GB", help="With a FOLDER: the operator's GPUs, how many and the memory of each, to plan for."
)
@click.option(
    "--environment",
    "environments",
    metavar="NAME",
    multiple=True,
    help="What the model is trained on; repeatable.  [default: asked for, or arithmetic]",
)
@click.option("--run", "run_file", type=FILE, default="run.toml", show_default=True, help="The file to write.")
@click.option("--key", type=FILE, default="run.key", show_default=True, help="The key file to make.")
def init(
    *,
    name: str | None,
    model: str | None,
    gpus: str | None,
    environments: tuple[str, ...],
    run_file: Path,
    key: Path,
) -> None:
    """Make a run: write its run.toml and its key, and say what to do next.

    \b
    Example:
      swarmproof init
      swarmproof init --name sums --model Qwen3-4B/ --gpus 4x80GB --environment arithmetic

    What no option says is asked for on a terminal. Nothing is overwritten. For a model's folder the values are those of
    `swarmproof plan`. Problems of your own come into the file with `swarmproof dataset add`.
    """
    from coordinator.commands.starting import new_run_toml
    from coordinator.errors import BadConfiguration
    from node.keys.identity import check_absent, create_key
    from node.policy.inspection import tiny_policy
    from node.protocol.run import run_id_of

    check_absent(key)
    if run_file.exists():
        raise click.UsageError(f"{run_file} exists, and nothing is overwritten: name another file with --run.")
    name = name or _asked("What is the run called?", Path.cwd().name or "run")
    model = model or _asked("Which model does it begin with: a folder, tiny or random-tiny?", "tiny")
    folder = None if tiny_policy(model) is not None else Path(model)
    if folder is None and gpus is not None:
        raise click.UsageError(f"--gpus is for a model's folder, and {model} needs none.")
    if folder is not None and not folder.is_dir():
        raise click.UsageError(f"--model {model} is no folder here, and no tiny policy such as tiny or random-tiny.")
    if folder is not None and gpus is None:
        gpus = _asked("Which GPUs has the operator, such as 4x80GB?", "")
    if folder is not None and not gpus:
        raise click.UsageError("A model's folder is planned for GPUs: name them with --gpus, such as 4x80GB.")
    environments = environments or tuple(_asked("Which environments, with spaces between?", "arithmetic").split())
    text = new_run_toml(name, folder or model, environments=environments, gpus=gpus)
    try:
        with run_file.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise BadConfiguration(f"{run_file} cannot be written: {error.strerror}") from error
    made = create_key(key)
    click.echo(f"{run_file} has the rules of the run {name!r}; docs/run-toml.md explains every key of it.")
    click.echo(f"{key} is the run: whoever has it speaks for it. Back it up: swarmproof keys backup {key}")
    click.echo(f"run id  {run_id_of(made.public_key().public_bytes_raw())}")
    start = f"--run {run_file.with_suffix('')}.calibrated.toml --key {key} --data run/"
    click.echo("Next:")
    click.echo(f"  swarmproof calibrate --run {run_file}")
    click.echo(f"  swarmproof coordinator --check {start}")
    click.echo(f"  swarmproof coordinator {start}")


def _asked(question: str, default: str) -> str:
    """Return the answer on the terminal; `default` where there is none."""
    return str(click.prompt(question, default=default, err=True)) if sys.stdin.isatty() else default
