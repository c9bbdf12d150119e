"""`swarmproof join-string`: the line by which workers join, again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Final

import click

from coordinator.commands.options import existing_run_options

LOOPBACK: Final = (
    "This address is this machine's own (loopback): workers elsewhere cannot reach it. Start the coordinator with "
    "--host 0.0.0.0, or with --endpoint and the URL by which others reach it."
)


@click.command("join-string")
@existing_run_options
def join_string(*, data: Path, database_url: str | None) -> None:
    """Print the line by which workers join a run, as its coordinator last published it.

    \b
    Example:
      swarmproof join-string --data run/
    """
    from coordinator.errors import BadConfiguration
    from coordinator.run.home import open_home
    from coordinator.run.joining import logged_joining

    home = open_home(data, database_url=database_url)
    with closing(home.database), home.database.read() as connection:
        joining = logged_joining(connection, home.run_id)
    if joining is None:
        raise BadConfiguration(f"no coordinator of the run in {data} has been asked by anybody yet: start it first")
    click.echo(joining.command)
    if joining.is_loopback:
        click.echo(LOOPBACK, err=True)
