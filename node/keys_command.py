"""`veriswarm keys`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from node.errors import IdentityError
from node.identity import create_key, load_key, node_id
from node.protocol.run import run_id_of


@click.group()
def keys() -> None:
    """Make, show, back up and restore keys: a node's identity, or a run's.

    \b
    Example:
      veriswarm keys new run.key
    """


_KEY_FILE = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))


@keys.command()
@_KEY_FILE
def new(file: Path) -> None:
    """Make a key in FILE, readable by you alone, and print its public part.

    \b
    Example:
      veriswarm keys new run.key

    Back it up, with veriswarm keys backup: nobody can make it again.
    """
    click.echo(node_id(create_key(file)))


@keys.command()
@_KEY_FILE
def show(file: Path) -> None:
    """Print the public part of the key in FILE: the node's id.

    \b
    Example:
      veriswarm keys show ~/.veriswarm/5f3c.../worker/key
    """
    click.echo(node_id(load_key(file)))


@keys.command("run-id")
@_KEY_FILE
def show_run_id(file: Path) -> None:
    """Print the id of the run whose key is in FILE; this is what contributors need to be told.

    \b
    Example:
      veriswarm keys run-id run.key
    """
    click.echo(run_id_of(load_key(file).public_key().public_bytes_raw()))


@keys.command()
@click.argument("key", type=click.Path(path_type=Path, dir_okay=False))
@_KEY_FILE
def backup(key: Path, file: Path) -> None:
    """Seal the key in KEY into FILE, and print the phrase that opens it, once.

    \b
    Example:
      veriswarm keys backup ~/.veriswarm/5f3c.../worker/key /media/stick/worker.backup

    Write the 12 words on paper and keep them apart from FILE. Either alone is of no use: without one of them the
    backup is lost, and whoever has both has the node, or the run if KEY is a run's. Each backup has a phrase of its
    own.
    """
    from node.keys_backup import seal, write_backup

    loaded = load_key(key)
    sealed, phrase = seal(loaded)
    write_backup(file, sealed)
    try:
        click.echo(phrase)
    except OSError as error:
        file.unlink()  # a file that nobody can open would pass for a backup
        raise IdentityError(
            f"The phrase could not be printed ({error.strerror}), so there is no backup; run again.",
            code="phrase_not_printed",
        ) from error
    click.echo(
        f"{file} is the backup of {node_id(loaded)}. The line above is its phrase, which is not shown again: "
        "write it on paper, and clear the terminal.",
        err=True,
    )


@keys.command()
@_KEY_FILE
@click.argument("key", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--phrase-file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Read the phrase from this file, or from standard input if -.  [default: ask for it]",
)
def restore(file: Path, key: Path, phrase_file: Path | None) -> None:
    """Restore into KEY the key that is sealed in FILE, and print its public part.

    \b
    Example:
      veriswarm keys restore /media/stick/worker.backup ~/.veriswarm/5f3c.../worker/key

    It asks for the 12 words of the phrase, on one line; capitals and spaces do not matter. Nothing is replaced: KEY
    must not exist. Stop the old node first, if it still runs.
    """
    from node.keys_backup import check_absent, read_backup, restore_key, unseal

    check_absent(key)
    sealed = read_backup(file)
    loaded = unseal(sealed, _read_phrase(phrase_file))
    restore_key(key, loaded)
    click.echo(node_id(loaded))


def _read_phrase(file: Path | None) -> str:
    """The phrase from `file` or the keyboard, never from the command line, which other users see."""
    from node.keys_backup import MAX_PHRASE_BYTES, decode_phrase

    if file is None:
        if not sys.stdin.isatty():
            raise click.UsageError("There is no terminal to ask for the phrase on; give --phrase-file, a file or -.")
        return str(click.prompt("Recovery phrase, 12 words (not shown)", hide_input=True, err=True))
    try:
        with click.open_file(str(file), "rb") as stream:
            return decode_phrase(stream.read(MAX_PHRASE_BYTES + 1))
    except OSError as error:
        raise IdentityError(f"The phrase file {file} cannot be read: {error.strerror}.", code="phrase_path") from error
