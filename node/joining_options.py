"""What `veriswarm worker`, `relay`, `status` and `peer` let a person say about the way to a run, and what follows."""

from __future__ import annotations

import functools
import inspect
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.endpoints import MAX_ENDPOINTS
from node.exchange import checked_url
from node.joining import Entry
from node.protocol.peers import JOIN_SCHEME, Address, parse_address, parse_join
from shardcast.errors import Malformed

F = TypeVar("F", bound=Callable[..., Any])

RUN_ID: Final = re.compile(r"[0-9a-f]{64}")
INTRODUCING: Final = "0.0.0.0:8701"
"""Where a peer listens that others shall find; the coordinator's own has the same port."""

_HOST_AND_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+)):([0-9]{1,5})")
_ANY: Final = "0.0.0.0:0"


def check_run_id(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """A run's id, or nothing."""
    if value is not None and RUN_ID.fullmatch(value) is None:
        raise click.BadParameter("a run's id has 64 hexadecimal digits; copy it from whoever told you of the run.")
    return value


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


def _listen_options(default: str) -> tuple[Callable[[F], F], ...]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What was said of the way to a run; `reached` is where others reach this node, as host and port."""

    run_id: str
    coordinators: tuple[str, ...]
    peers: tuple[Address, ...]
    listen: tuple[str, int]
    reached: tuple[tuple[str, int], ...]

    def entry(self, key: Ed25519PrivateKey) -> Entry:
        """The way of the node with this key; raises BadParameter."""
        node = key.public_key().public_bytes_raw()
        return Entry(
            run_id=self.run_id,
            coordinators=self.coordinators,
            peers=self.peers,
            host=self.listen[0],
            port=self.listen[1],
            addresses=tuple(address_at(host, port, node) for host, port in self.reached),
        )


def joining_options(command: F) -> F:
    """Give a command the options of a node that peers may call, and the argument `way` that they amount to."""
    return _with_way(command, (*_OPTIONS, *_listen_options(_ANY)))


def introducing_options(command: F) -> F:
    """The same for a peer that others begin with, and which therefore keeps its port."""
    return _with_way(command, (*_OPTIONS, *_listen_options(INTRODUCING)))


def calling_options(command: F) -> F:
    """The same for a command that nobody calls."""
    return _with_way(command, _OPTIONS)


def _with_way(command: F, options: tuple[Callable[[F], F], ...]) -> F:
    @functools.wraps(command)
    def run(**given: Any) -> Any:
        names = inspect.signature(way_of).parameters
        said = {name: given.pop(name) for name in names if name in given}
        return command(way=way_of(**said), **given)

    wrapped = cast("F", run)
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def way_of(
    *,
    joins: tuple[str, ...],
    coordinators: tuple[str, ...],
    run_id: str | None,
    peer_listen: str = _ANY,
    peer_addresses: tuple[str, ...] = (),
) -> Way:
    """Which run, and by whom; raises UsageError and BadParameter."""
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
    return Way(
        run_id=run_ids.pop(),
        coordinators=tuple(map(checked_url, coordinators)),
        peers=tuple(dict.fromkeys(peers)),
        listen=_listening(peer_listen),
        reached=tuple(host_and_port(each, hint="--peer-address") for each in peer_addresses),
    )


def host_and_port(text: str, *, hint: str) -> tuple[str, int]:
    """Of HOST:PORT, with brackets around an IPv6 address; raises BadParameter."""
    found = _HOST_AND_PORT.fullmatch(text)
    if found is None or int(found[3]) >= 2**16:
        raise click.BadParameter("give HOST:PORT, such as 192.0.2.7:8701 or [2001:db8::7]:8701.", param_hint=hint)
    return found[1] or found[2], int(found[3])


def _listening(text: str) -> tuple[str, int]:
    """A name would have to be looked up, and may be several addresses."""
    host, port = host_and_port(text, hint="--peer-listen")
    try:
        return str(ipaddress.ip_address(host)), port
    except ValueError as error:
        said = f"{host!r} is no IP address of this machine; 0.0.0.0 is all of them."
        raise click.BadParameter(said, param_hint="--peer-listen") from error


def address_at(host: str, port: int, node: bytes) -> Address:
    """The address of the peer with this public key (32 bytes) at a host; raises BadParameter."""
    numeric = re.fullmatch(r"[0-9.]+", host) is not None
    address = Address("ip6" if ":" in host else "ip4" if numeric else "dns", host, port, node)
    try:
        return parse_address(str(address))
    except Malformed as error:
        raise click.BadParameter(f"{host}:{port} cannot be called: {error}.", param_hint="--peer-address") from error
