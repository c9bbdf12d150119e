"""The command line of an export. What it runs is imported when it runs: every other command loads this."""

from __future__ import annotations

from pathlib import Path

import click

_LATEST = "latest"


@click.command()
@click.argument("what", metavar="VERSION|latest|FILE")
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    required=True,
    help="Where to write it; made if missing, and empty otherwise.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder of a trainer, worker, relay or verifier that holds the version; it may be running.",
)
def export(*, what: str, to: Path, state: Path | None) -> None:
    """Write a policy as a folder that transformers and vLLM load.

    \b
    Examples:
      veriswarm export latest --state trainer/ --to policy/
      veriswarm export policy.safetensors --to policy/

    Weights are the policy's, bit for bit. A trainer's folder has every version, those of others the last few. A file
    whose name is a number is ./NUMBER.
    """
    by_number = what == _LATEST or (what.isascii() and what.isdigit())
    if by_number and state is None:
        raise click.UsageError("A version is taken from a folder: name it with --state.")
    if state is not None and not by_number:
        raise click.UsageError("--state is for a version's number, or latest; a file needs none.")
    from coordinator.export import export_file, export_version

    if state is None:
        done = export_file(Path(what), to)
    else:
        done = export_version(state, None if what == _LATEST else int(what), to)
    named = "the policy" if done.version is None else f"policy {done.version}"
    click.echo(f"{named}, {done.parameters:,} parameters in {str(done.dtype).removeprefix('torch.')}, is in {to}")
