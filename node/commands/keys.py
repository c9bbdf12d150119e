"""`swarmproof keys`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from node.commands.options import FILE
from node.errors import IdentityError
from node.keys.identity import check_absent, create_key, load_key, node_id, write_key
from node.protocol.run import run_id_of


@click.group()
def keys() -> None:
    """Make, show, back up and restore keys: a node's identity, or a run's.

    \b
    Example:
      swarmproof keys new run.key
    """


_KEY_FILE = click.argument("file", type=FILE)


@keys.command()
@_KEY_FILE
def new(file: Path) -> None:
    """Make a key in FILE, readable by you alone, and print its public part.

    \b
    Example:
      swarmproof keys new run.key

    Back it up on paper, with swarmproof keys backup: nobody can make it again.
    """
    click.echo(node_id(create_key(file)))


@keys.command()
@_KEY_FILE
def show(file: Path) -> None:
    """Print the public part of the key in FILE: the node's id.

    \b
    Example:
      swarmproof keys show ~/.swarmproof/5f3c.../worker/key
    """
    click.echo(node_id(load_key(file)))


@keys.command("run-id")
@_KEY_FILE
def show_run_id(file: Path) -> None:
    """Print the id of the run whose key is in FILE; this is what contributors need to be told.

    \b
    Example:
      swarmproof keys run-id run.key
    """
    click.echo(run_id_of(load_key(file).public_key().public_bytes_raw()))


@keys.command()
@_KEY_FILE
def backup(file: Path) -> None:
    """Print the key in FILE as 24 words.

    \b
    Example:
      swarmproof keys backup ~/.swarmproof/5f3c.../worker/key

    Write them on paper. They are the key itself: whoever reads them has the node, or the run if FILE is a run's key.
    """
    from node.keys.backup import phrase_of

    key = load_key(file)
    click.echo(phrase_of(key))
    click.echo(
        f"The line above is the key of {node_id(key)} itself: write it on paper, keep it where nobody reads it, and "
        "clear the terminal.",
        err=True,
    )


@keys.command()
@_KEY_FILE
@click.option(
    "--phrase-file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Read the words from this file, or from standard input if -.  [default: ask for them]",
)
def restore(file: Path, phrase_file: Path | None) -> None:
    """Make the key file FILE again from its 24 words, and print its public part.

    \b
    Example:
      swarmproof keys restore ~/.swarmproof/5f3c.../worker/key

    It asks for the words on one line; capitals and spaces do not matter. Nothing is replaced: FILE must not exist.
    Compare the id with the old node's: one slip in 256 makes another key. Stop the old node first, if it still runs.
    """
    from node.keys.backup import key_of

    check_absent(file)
    key = key_of(_read_phrase(phrase_file))
    write_key(file, key)
    click.echo(node_id(key))


def _read_phrase(file: Path | None) -> str:
    """Read the phrase from `file` or the keyboard, never from the command line, which other users see."""
    from node.keys.backup import MAX_PHRASE_BYTES, decode_phrase

    if file is None:
        if not sys.stdin.isatty():
            raise click.UsageError("There is no terminal to ask for the phrase on; give --phrase-file, a file or -.")
        return str(click.prompt("The key's 24 words (not shown)", hide_input=True, err=True))
    try:
        with click.open_file(str(file), "rb") as stream:
            return decode_phrase(stream.read(MAX_PHRASE_BYTES + 1))
    except OSError as error:
        raise IdentityError(f"The phrase file {file} cannot be read: {error.strerror}.", code="phrase_path") from error
