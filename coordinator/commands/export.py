"""`swarmproof export`, with deferred imports: every command loads this module."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from node.commands.engine_options import import_models
from node.commands.options import EXISTING_FOLDER, state_option
from node.runtime.extras import install_hint

_LATEST = "latest"


_to_option = click.option(
    "-o",
    "--to",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    required=True,
    help="Where to write it; made if missing, and empty otherwise.",
)


@click.group()
def export() -> None:
    """Write a run's policies or rollouts for other programs."""


@export.command()
@click.argument("what", metavar="VERSION|latest|FILE")
@_to_option
@state_option(
    "The folder of a trainer, worker, relay or verifier that holds the version; it may be running.",
    kind=EXISTING_FOLDER,
)
@click.option(
    "--model",
    type=EXISTING_FOLDER,
    metavar="FOLDER",
    help="Where chat template and generation settings come from, such as the run's model.initial.  [default: what the "
    "trainer kept in --state]",
)
@click.option(
    "--adapter",
    is_flag=True,
    help="Of a run with [training.lora], or of sft --lora, the adapters alone, as a folder that PEFT loads. They are "
    "in the checkpoints in --state, and latest is the newest of these.",
)
def policy(*, what: str, to: Path, state: Path | None, model: Path | None, adapter: bool) -> None:
    """Write a policy as a folder that transformers and vLLM load.

    \b
    Examples:
      swarmproof export policy latest --state trainer/ --to policy/
      swarmproof export policy policy.safetensors --to policy/
      swarmproof export policy latest --adapter --state trainer/ --to adapter/

    Weights are the policy's, bit for bit. A trainer's folder has every version, those of others the last few. A file
    whose name is a number is ./NUMBER.
    """
    by_number = what == _LATEST or (what.isascii() and what.isdigit())
    if by_number and state is None:
        raise click.UsageError("A version is taken from a folder: name it with --state.")
    if state is not None and not by_number:
        raise click.UsageError("--state is for a version's number, or latest; a file needs none.")
    version = None if what == _LATEST or not by_number else int(what)
    if adapter:
        if state is None or model is not None:
            raise click.UsageError("--adapter takes a version from --state, and nothing of --model.")
        _adapter(version, state, to)
        return
    import_models()
    from coordinator.training.companion import read_companion
    from coordinator.training.export import export_file, export_version

    companion = None if model is None else read_companion(model)
    if state is None:
        done = export_file(Path(what), to, companion=companion)
    else:
        done = export_version(state, version, to, companion=companion)
    named = "the policy" if done.version is None else f"policy {done.version}"
    click.echo(f"{named}, {done.parameters:,} parameters in {str(done.dtype).removeprefix('torch.')}, is in {to}")


def _adapter(version: int | None, state: Path, to: Path) -> None:
    import_models()
    from coordinator.training.adapter_export import export_adapter

    done = export_adapter(state, version, to)
    click.echo(
        f"the adapters of policy {done.version}, {done.parameters:,} parameters of rank {done.lora.rank}, are in {to}"
    )


@export.command()
@click.argument("data", metavar="RUN", type=EXISTING_FOLDER)
@_to_option
@click.option("--database-url", metavar="URL", help="As the coordinator's, if it has one.")
@click.option("--rejected", is_flag=True, help="Rejected rollouts, too, as they were submitted.")
def rollouts(*, data: Path, to: Path, database_url: str | None, rejected: bool) -> None:
    """Write the rollouts of a run as Parquet files, which `datasets.load_dataset` opens.

    \b
    Examples:
      swarmproof export rollouts run/ -o rollouts/
      swarmproof export rollouts run/ -o everything/ --rejected

    RUN is the run's data folder, as its coordinator has it; the run may go on. One row is one completion.
    """
    from coordinator.errors import BadConfiguration
    from coordinator.run.home import open_home

    try:
        from coordinator.training.rollouts import export_rollouts
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "pyarrow":
            raise
        raise BadConfiguration(f"`export rollouts` needs pyarrow: {install_hint('export')}") from error

    home = open_home(data, database_url=database_url)
    with closing(home.database):
        done = export_rollouts(home, to, rejected=rejected)
    files = "file" if done.files == 1 else "files"
    click.echo(f"{done.rollouts:,} rollouts of {done.submissions:,} submissions are in {to}, in {done.files} {files}")
    if done.unreadable:
        click.echo(f"left out: {done.unreadable:,} rejected submissions whose files cannot be read", err=True)
    if done.expired:
        click.echo(f"left out: {done.expired:,} submissions whose files were removed (--keep-evidence)", err=True)
    if done.missing:
        click.echo(f"warning: {done.missing:,} submissions are missing: their blobs are gone or damaged", err=True)
