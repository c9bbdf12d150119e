"""Options of joining a run, for `swarmproof worker`, `relay`, `status` and `peer`."""

from __future__ import annotations

import functools
import inspect
import ipaddress
from typing import Any, Final, cast

import click

from node.client.endpoints import MAX_ENDPOINTS
from node.client.http import checked_url
from node.commands.options import F, Option, all_of
from node.joining.options import JoinOptions, host_and_port
from node.protocol.peers import JOIN_SCHEME, Address, parse_address, parse_join
from shardcast.errors import Malformed
from shardcast.wire import is_digest

INTRODUCING: Final = "0.0.0.0:8701"
"""Default of a bootstrap peer; the coordinator's own has the same port."""

_ANY: Final = "0.0.0.0:0"


def check_run_id(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Validate a run id or None; raises BadParameter."""
    if value is not None and not is_digest(value):
        raise click.BadParameter("a run's id has 64 hexadecimal digits; copy it from whoever told you of the run.")
    return value


run_id_option = click.option(
    "--run-id",
    metavar="ID",
    required=True,
    callback=check_run_id,
    help="Which run; all that is trusted follows from it.",
)
"""The run that a command looks at without joining it."""


_OPTIONS = (
    click.option(
        "--join",
        "joins",
        multiple=True,
        metavar="STRING",
        help=f"{JOIN_SCHEME}… as the run's operator gives it, or a peer's address with --run-id; repeatable.",
    ),
    click.option(
        "--coordinator",
        "coordinators",
        metavar="URL",
        multiple=True,
        help="A coordinator's address; repeatable: where one is away, the next is asked.",
    ),
    click.option(
        "--run-id",
        metavar="ID",
        callback=check_run_id,
        help="Which run; all that is trusted follows from it.  [default: the one in --join]",
    ),
)


def _listen_options(default: str) -> tuple[Option, ...]:
    return (
        click.option(
            "--peer-listen",
            metavar="ADDRESS:PORT",
            default=default,
            show_default=True,
            help="Where other peers may call this node; port 0 takes a free one.",
        ),
        click.option(
            "--peer-address",
            "peer_addresses",
            metavar="HOST:PORT",
            multiple=True,
            help="Where others reach --peer-listen, if that is somewhere else; repeatable.",
        ),
    )


def joining_options(command: F) -> F:
    """Add the options of a node that accepts peer connections, passed as `join` (JoinOptions)."""
    return _with_way(command, (*_OPTIONS, *_listen_options(_ANY)))


def introducing_options(command: F) -> F:
    """Add the options of a bootstrap peer, with a fixed port, as `joining_options` does."""
    return _with_way(command, (*_OPTIONS, *_listen_options(INTRODUCING)))


def calling_options(command: F) -> F:
    """Add the options of a client without inbound connections, as `joining_options` does."""
    return _with_way(command, _OPTIONS)


def _with_way(command: F, options: tuple[Option, ...]) -> F:
    @functools.wraps(command)
    def run(**given: Any) -> Any:
        names = inspect.signature(parse_join_options).parameters
        said = {name: given.pop(name) for name in names if name in given}
        return command(join=parse_join_options(**said), **given)

    return all_of(*options)(cast("F", run))


def parse_join_options(
    *,
    joins: tuple[str, ...],
    coordinators: tuple[str, ...],
    run_id: str | None,
    peer_listen: str = _ANY,
    peer_addresses: tuple[str, ...] = (),
) -> JoinOptions:
    """Parse the options; raises UsageError and BadParameter."""
    peers: list[Address] = []
    run_ids = set() if run_id is None else {run_id}
    for text in map(str.strip, joins):
        try:
            if text.startswith(JOIN_SCHEME):
                invitation = parse_join(text)
                run_ids.add(invitation.run_id)
                peers += invitation.peers
            else:
                peers.append(parse_address(text))
        except Malformed as error:
            raise click.BadParameter(f"{error}; copy it whole.", param_hint="--join") from error
    if len(run_ids) > 1:
        raise click.UsageError("What --join and --run-id say names more than one run.")
    if not run_ids:
        raise click.UsageError(f"Say which run: --join {JOIN_SCHEME}…, or --coordinator URL with --run-id ID.")
    if len(coordinators) > MAX_ENDPOINTS:
        raise click.UsageError(f"Give at most {MAX_ENDPOINTS} coordinators.")
    if not peers and not coordinators:
        raise click.UsageError("Say who knows the run: --join, or --coordinator URL.")
    return JoinOptions(
        run_id=run_ids.pop(),
        coordinators=tuple(map(checked_url, coordinators)),
        peers=tuple(dict.fromkeys(peers)),
        listen=_listening(peer_listen),
        reached=tuple(host_and_port(each, hint="--peer-address") for each in peer_addresses),
    )


def _listening(text: str) -> tuple[str, int]:
    """Parse the IP address and port to listen on; a name is refused, as it may have several addresses."""
    host, port = host_and_port(text, hint="--peer-listen")
    try:
        return str(ipaddress.ip_address(host)), port
    except ValueError as error:
        said = f"{host!r} is no IP address of this machine; 0.0.0.0 is all of them."
        raise click.BadParameter(said, param_hint="--peer-listen") from error
