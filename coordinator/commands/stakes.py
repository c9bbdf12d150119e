"""`swarmproof stakes`: the operator's ledger of stakes (`coordinator.storage.stakes`)."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import click

from coordinator.commands.options import existing_run_options


@click.group()
def stakes() -> None:
    """Keep the ledger of nodes' stakes.

    A node whose slot is rejected loses all of it. See standing.stake in docs/run-toml.md.
    """


@stakes.command("enter")
@existing_run_options
@click.argument("node")
@click.argument("amount", type=int)
@click.option("--why", required=True, help="The payment's own name, so that none is entered twice.")
def enter(*, data: Path, database_url: str | None, node: str, amount: int, why: str) -> None:
    """Add AMOUNT, which may be negative, to what NODE (its id) has staked.

    \b
    Example:
      swarmproof stakes enter --data data 5f0c…e1 1000 --why "transfer 20417"
    """
    from coordinator.errors import BadConfiguration
    from coordinator.run.home import open_home
    from coordinator.storage import stakes as ledger
    from coordinator.storage.faults import DatabaseConflict
    from shardcast.wire import is_digest

    if not is_digest(node):
        raise click.BadParameter("a node's id has 64 hexadecimal digits", param_hint="NODE")
    home = open_home(data, database_url=database_url)
    try:
        with closing(home.database), home.database.write() as connection:
            held = ledger.held(connection, node)
            if held + amount < 0:
                raise BadConfiguration(f"{node[:16]}… has {held} at stake, of which {-amount} cannot be paid back")
            ledger.enter(connection, node, amount, why=why, now=time.time())
    except DatabaseConflict as error:
        raise BadConfiguration(f"{why!r} was entered for this node before") from error
    click.echo(f"{node[:16]}… has {held + amount} at stake")


@stakes.command("list")
@existing_run_options
def show(*, data: Path, database_url: str | None) -> None:
    """Print what each node has at stake.

    \b
    Example:
      swarmproof stakes list --data data
    """
    from coordinator.run.home import open_home
    from coordinator.storage import stakes as ledger

    home = open_home(data, database_url=database_url)
    with closing(home.database), home.database.read() as connection:
        balances = ledger.balances(connection)
    for node, amount in balances:
        click.echo(f"{node}  {amount}")
    if not balances:
        click.echo("nobody has staked anything")
