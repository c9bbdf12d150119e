"""Options of the operator's commands."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec

from node.commands.options import (
    EXISTING_FILE,
    EXISTING_FOLDER,
    FOLDER,
    Option,
    all_of,
    key_option,
    number_option,
    state_option,
)
from shardcast.wire import is_digest

HOME_WAIT_SECONDS = 60.0
"""How long a process waits for the coordinator to create the run."""


data_options = all_of(
    click.option(
        "--data",
        type=FOLDER,
        required=True,
        help="The run's data folder, shared by coordinator, verifiers and trainer.",
    ),
    click.option(
        "--database-url",
        metavar="URL",
        help="postgresql://USER@HOST/NAME or sqlite:///FILE.  [default: a file in --data]",
    ),
)
"""Where the run is, or will be created."""

existing_run_options = all_of(
    click.option(
        "--data", type=EXISTING_FOLDER, required=True, help="The run's data folder, as its coordinator has it."
    ),
    click.option("--database-url", metavar="URL", help="As the coordinator's, if it has one."),
)
"""Where an existing run is."""

run_key_option = key_option(
    "The run's key file, made by `swarmproof keys new`. Whoever has it is the run.", required=True
)
own_state_option = state_option("This process's own folder; kept across restarts.", required=True)


policy_option = click.option(
    "--policy",
    type=click.Path(path_type=Path, exists=True),
    help="A policy file, or a model's folder in Hugging Face's layout.  [default: the run's first policy]",
)


keep_evidence_option = number_option(
    "--keep-evidence",
    "Days after its verdict from which on the leader removes a submission's files, which audits cannot derive again "
    "then.  [default: none are removed]",
    most=36500,
    metavar="DAYS",
)


def run_file_option(text: str) -> Option:
    """Return `--run`, an existing run.toml, passed as `run_file`; `text` is its help."""
    return click.option("--run", "run_file", type=EXISTING_FILE, required=True, help=text)


def seed_option(text: str) -> Option:
    """Return `--seed`, 0 by default; `text` is its help."""
    return number_option("--seed", text, least=0, most=2**63 - 1, default=0, metavar="NUMBER")


def _limit(name: str, default: int, text: str) -> Option:
    return number_option(name, text, least=int(default > 0), most=10_000_000, default=default)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no IP address") from error


def _server_url(text: str) -> str:
    """Return `text`, the URL of a server that is short enough for a descriptor; raises BadParameter."""
    from node.client.http import checked_url
    from node.errors import ConfigError
    from node.protocol.run import Url

    try:
        return str(msgspec.convert(checked_url(text), Url))
    except (ConfigError, msgspec.ValidationError) as error:
        raise click.BadParameter(f"{error}.") from error


def _multiaddr(text: str) -> str:
    """Return `text`, the multiaddr of a peer; raises BadParameter."""
    from node.protocol.peers import parse_address
    from shardcast.errors import Malformed

    try:
        return str(parse_address(text))
    except Malformed as error:
        raise click.BadParameter(f"{error}.") from error


def _host_and_port(text: str) -> str:
    """Return `text`, HOST:PORT; raises BadParameter."""
    from node.joining.options import host_and_port

    host_and_port(text, hint="--peer-address")
    return text


def _installed_peer(wanted: bool | None) -> bool | None:
    """Return `wanted`; raises UsageError for a peer that cannot be run here."""
    from coordinator.run.peer_child import has_libp2p
    from node.joining.session import NO_LIBP2P

    if wanted and not has_libp2p():
        raise click.UsageError(f"--peer needs {NO_LIBP2P}.")
    return wanted


def _each(check: Callable[[str], str]) -> Callable[[click.Context, click.Parameter, Sequence[str]], tuple[str, ...]]:
    """Return the callback of a repeatable option: what cannot be served is refused before anything is made."""
    return lambda _context, _parameter, given: tuple(map(check, given))


def _public_key(text: str) -> str:
    if not is_digest(text):
        raise click.BadParameter(f"{text!r} is no node's id, which has 64 hexadecimal digits")
    return text


limit_options = all_of(
    click.option(
        "--trust-proxy",
        "proxies",
        multiple=True,
        metavar="ADDRESS",
        callback=_each(_address),
        help="A reverse proxy whose X-Forwarded-For says who asks; nobody else's is believed. Repeatable.",
    ),
    _limit("--leases-per-address", 0, "Leases that all nodes of one address hold together; 0 for any number."),
    _limit("--connections-per-address", 256, "Connections from one address, or one /64 of IPv6."),
    _limit("--max-connections", 1024, "Connections in all."),
    _limit("--node-requests-per-minute", 1200, "Signed requests that one node may send."),
    _limit("--requests-per-minute", 6000, "Requests that one address, or one /64 of IPv6, may send."),
)
"""Limits of requests, connections and leases."""

contact_options = all_of(
    click.option(
        "--endpoint",
        "endpoints",
        multiple=True,
        metavar="URL",
        callback=_each(_server_url),
        help="Where nodes reach a coordinator; repeatable, the same for each one.  [default: --host:--port]",
    ),
    click.option(
        "--peer/--no-peer",
        "with_peer",
        default=None,
        callback=lambda _context, _parameter, wanted: _installed_peer(wanted),
        help="Run a peer beside it.  [default: if libp2p is here]",
    ),
    number_option("--peer-port", "Where the peer listens, on --host.", most=65535, default=8701, metavar="PORT"),
    click.option(
        "--peer-state",
        type=FOLDER,
        metavar="DIRECTORY",
        help="The peer's own folder, with the key that its address names.  [default: peer/ in --data]",
    ),
    click.option(
        "--peer-address",
        "peer_addresses",
        multiple=True,
        metavar="HOST:PORT",
        callback=_each(_host_and_port),
        help="Where others reach the peer, if that is somewhere else; repeatable.",
    ),
    click.option(
        "--introduce",
        "introduced",
        multiple=True,
        metavar="MULTIADDR",
        callback=_each(_multiaddr),
        help="Another peer of the run to name to those who join; repeatable.",
    ),
    click.option(
        "--revoke",
        "revoked",
        multiple=True,
        metavar="NODE",
        callback=_each(_public_key),
        help="A key with which no peer shall deal any more; repeatable.",
    ),
)
"""The contacts in the descriptor, and the coordinator's own peer."""


tracker_options = all_of(
    click.option(
        "--tensorboard",
        type=FOLDER,
        metavar="FOLDER",
        help="Where each step's statistics go for TensorBoard.  [default: tensorboard/ in --state]",
    ),
    click.option("--no-tensorboard", is_flag=True, help="Write nothing for TensorBoard."),
    click.option(
        "--wandb", metavar="PROJECT", help="Send each step's statistics to this project of Weights & Biases, too."
    ),
)
"""Where the trainer's statistics go, see `coordinator.training.trackers.tracker_settings`."""


evaluation_options = all_of(
    number_option(
        "--evaluate-every",
        "Measure the policy on held-out problems after so many steps; 0 never does. Training waits meanwhile.",
        least=0,
        default=0,
        metavar="STEPS",
    ),
    number_option("--evaluate-problems", "Of each environment, one completion each.", most=4096, default=64),
)
"""The trainer's evaluations on held-out problems."""


execution_options = all_of(
    number_option(
        "--row-tokens",
        "Samples are packed into rows of so many tokens; memory grows with it.",
        most=2**20,
        default=512,
        metavar="TOKENS",
    ),
    click.option(
        "--recompute",
        is_flag=True,
        help="Compute activations again in the backward pass instead of keeping them: less memory, a third more work.",
    ),
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the model is."
    ),
    click.option(
        "--autocast",
        type=click.Choice(["bfloat16"]),
        help="The dtype of matrix products; weights and optimizer stay float32.  [default: float32]",
    ),
)
"""How the trainer computes; affects rounding only."""
