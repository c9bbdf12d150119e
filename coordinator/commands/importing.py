"""`swarmproof import`, with deferred imports: every command loads this module."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from node.commands.engine_options import import_models
from node.commands.options import EXISTING_FILE

_VOCABULARY = "rwkv_vocab_v20230424.txt"


@click.group("import")
def importing() -> None:
    """Write weights that were published in another format as a folder that a run can begin with."""


@importing.command()
@click.argument("checkpoint", metavar="FILE", type=EXISTING_FILE)
@click.option(
    "-o",
    "--to",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    required=True,
    help="Where to write it; made if missing, and empty otherwise.",
)
@click.option(
    "--vocabulary",
    type=EXISTING_FILE,
    help=f"The World tokenizer's {_VOCABULARY}.  [default: that of the installed package rwkv]",
)
def rwkv(*, checkpoint: Path, to: Path, vocabulary: Path | None) -> None:
    """Import an Eagle (RWKV-5.2) or Finch (RWKV-6) from its authors' .pth.

    \b
    Example:
      swarmproof import rwkv RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth -o finch/

    FILE is read without unpickling it. `model.initial` of a run.toml may name FOLDER. Memory for a few MiB is enough.
    """
    if vocabulary is None:
        vocabulary = packaged_vocabulary()
    import_models()
    from coordinator.importing.rwkv import VERSIONS, import_rwkv

    done = import_rwkv(checkpoint, vocabulary, to)
    click.echo(
        f"an RWKV-{VERSIONS[done.family]} ({done.family}) of {done.layers} layers, {done.hidden:,} hidden units and "
        f"{done.parameters:,} parameters in {str(done.dtype).removeprefix('torch.')} is in {to}"
    )


def packaged_vocabulary() -> Path:
    """Find the file in the package `rwkv`, none of whose code runs."""
    spec = find_spec("rwkv")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(folder) / _VOCABULARY).is_file():
            return path
    raise click.UsageError(f"No package rwkv is installed: name its {_VOCABULARY} with --vocabulary.")
