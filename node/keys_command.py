"""`veriswarm keys`."""

from __future__ import annotations

from pathlib import Path

import click

from node.identity import create_key, load_key, node_id
from node.protocol.run import run_id_of


@click.group()
def keys() -> None:
    """Make and show keys: a node's identity, or a run's.

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

    Keep a copy in a safe place: nobody can make it again.
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
