"""`swarmproof invite` makes an invite, and `--invite` takes one."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import click

from node.commands.control import parse_node
from node.commands.options import key_option, number_option
from node.keys.identity import load_key
from node.protocol.membership import (
    MAX_INVITE_SECONDS,
    MAX_INVITED_KEYS,
    Invite,
    invite_token,
    parse_invite_token,
    sign_invite,
)
from node.protocol.run import run_id_of
from shardcast.errors import Malformed


@click.command()
@key_option("The run's key file: only the run invites.", required=True)
@number_option("--keys", "How many new nodes it lets in.", most=MAX_INVITED_KEYS, default=1)
@click.option(
    "--days",
    type=click.FloatRange(min=0, min_open=True, max=MAX_INVITE_SECONDS / 86_400),
    metavar="DAYS",
    default=7.0,
    show_default=True,
    help="For how long; whoever is in stays in.",
)
@click.option("--node", metavar="NODE", callback=parse_node, help="Only this node.  [default: whoever has it]")
def invite(*, key: Path, keys: int, days: float, node: bytes | None) -> None:
    """Make an invite to a run whose membership.policy is "invite".

    \b
    Example, for ten machines of one contributor:
      swarmproof invite --key run.key --keys 10 --days 30

    It prints one line, for swarmproof worker --invite or SWARMPROOF_WORKER_INVITE. Whoever reads it can use it up:
    send it as you would a password, or bind it with --node.
    """
    if node is not None and keys != 1:
        raise click.UsageError("--node is one node; make one invite for each.")
    run_key, now = load_key(key), int(time.time())
    made = Invite(
        run_id=run_id_of(run_key.public_key().public_bytes_raw()),
        id=secrets.token_hex(32),
        keys=keys,
        node=None if node is None else node.hex(),
        issued_at=now,
        expires_at=now + max(1, int(days * 86_400)),
    )
    click.echo(invite_token(sign_invite(made, key=run_key)))


def _read_invite(_ctx: click.Context, _param: click.Parameter, value: str | None) -> bytes | None:
    """Return the envelope in the token; raises BadParameter without quoting it."""
    try:
        return None if value is None else parse_invite_token(value.strip())
    except Malformed as error:
        raise click.BadParameter(
            "it is not an invite; copy it whole, from what `swarmproof invite` printed."
        ) from error


invite_option = click.option(
    "--invite",
    metavar="TOKEN",
    callback=_read_invite,
    help="The invite to a run that asks for one; SWARMPROOF_WORKER_INVITE keeps it out of the list of processes.",
)
