"""Options that the operator's commands share, or that one has many of."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from shardcast.wire import is_digest

F = TypeVar("F", bound=Callable[..., object])

HOME_WAIT_SECONDS = 60.0
"""How long a process waits for a run's data folder or database to be made."""


def data_options(function: F) -> F:
    """Where a run is."""
    data = click.option(
        "--data",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        help="The run's data folder, shared by coordinator, verifiers and trainer.",
    )
    database = click.option(
        "--database-url",
        metavar="URL",
        help="postgresql://USER@HOST/NAME or sqlite:///FILE.  [default: a file in --data]",
    )
    return data(database(function))


def listen_options(port: int) -> Callable[[F], F]:
    """Where a process listens, by default on `port`."""

    def add(function: F) -> F:
        host = click.option(
            "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all."
        )
        return host(
            click.option(
                "--port",
                type=click.IntRange(0, 65535),
                metavar="PORT",
                default=port,
                show_default=True,
                help="0 takes a free one.",
            )(function)
        )

    return add


def limit_options(function: F) -> F:
    """What one address, one node and all together may take of a coordinator."""
    options = [
        ("--requests-per-minute", 6000, "Requests that one address, or one /64 of IPv6, may send."),
        ("--node-requests-per-minute", 1200, "Signed requests that one node may send."),
        ("--max-connections", 1024, "Connections in all."),
        ("--connections-per-address", 256, "Connections from one address, or one /64 of IPv6."),
        ("--leases-per-address", 0, "Leases that all nodes of one address hold together; 0 for any number."),
    ]
    for name, default, said in options:
        kind = click.IntRange(int(default > 0), 10_000_000)
        function = click.option(name, type=kind, metavar="COUNT", default=default, show_default=True, help=said)(
            function
        )
    return click.option(
        "--trust-proxy",
        "proxies",
        multiple=True,
        metavar="ADDRESS",
        callback=lambda _context, _parameter, given: tuple(map(_address, given)),
        help="A reverse proxy whose X-Forwarded-For says who asks; nobody else's is believed. Repeatable.",
    )(function)


def contact_options(function: F) -> F:
    """Where others find the run, and the peer that introduces them."""
    options = [
        click.option(
            "--endpoint",
            "endpoints",
            multiple=True,
            metavar="URL",
            help="Where nodes reach a coordinator; repeatable, the same for each one.  [default: --host:--port]",
        ),
        click.option(
            "--peer/--no-peer", "with_peer", default=None, help="Run a peer beside it.  [default: if libp2p is here]"
        ),
        click.option(
            "--peer-port",
            type=click.IntRange(1, 65535),
            metavar="PORT",
            default=8701,
            show_default=True,
            help="Where the peer listens, on --host.",
        ),
        click.option(
            "--peer-state",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIRECTORY",
            help="The peer's own folder, with the key that its address names.  [default: peer/ in --data]",
        ),
        click.option(
            "--peer-address",
            "peer_addresses",
            multiple=True,
            metavar="HOST:PORT",
            help="Where others reach the peer, if that is somewhere else; repeatable.",
        ),
        click.option(
            "--introduce",
            "introduced",
            multiple=True,
            metavar="MULTIADDR",
            help="Another peer of the run to name to those who join; repeatable.",
        ),
        click.option(
            "--revoke",
            "revoked",
            multiple=True,
            metavar="NODE",
            callback=lambda _context, _parameter, given: tuple(map(_public_key, given)),
            help="A key with which no peer shall deal any more; repeatable.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def watching_options(function: F) -> F:
    """Where the trainer's statistics go; `coordinator.training.watching.chosen_watchers` takes them."""
    options = [
        click.option(
            "--tensorboard",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="FOLDER",
            help="Where each step's statistics go for TensorBoard.  [default: tensorboard/ in --state]",
        ),
        click.option("--no-tensorboard", is_flag=True, help="Write nothing for TensorBoard."),
        click.option(
            "--wandb", metavar="PROJECT", help="Send each step's statistics to this project of Weights & Biases, too."
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def evaluation_options(function: F) -> F:
    """How often the trainer measures its policies on held-out problems."""
    every = click.option(
        "--evaluate-every",
        type=click.IntRange(0),
        metavar="STEPS",
        default=0,
        show_default=True,
        help="Measure the policy on held-out problems after so many steps; 0 never does. Training waits meanwhile.",
    )
    problems = click.option(
        "--evaluate-problems",
        type=click.IntRange(1, 4096),
        metavar="COUNT",
        default=64,
        show_default=True,
        help="Of each environment, one completion each.",
    )
    return every(problems(function))


def _public_key(text: str) -> str:
    if not is_digest(text):
        raise click.BadParameter(f"{text!r} is no node's id, which has 64 hexadecimal digits")
    return text


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no IP address") from error


key_option = click.option(
    "--key",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The run's key file, made by `veriswarm keys new`. Whoever has it is the run.",
)
state_option = click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="This process's own folder; kept across restarts.",
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="COUNT",
    default=1,
    show_default=True,
    help="CPU threads for torch.",
)


def execution_options(function: F) -> F:
    """How the trainer computes; a run does not depend on it, but for rounding."""
    row_tokens = click.option(
        "--row-tokens",
        type=click.IntRange(1, 2**20),
        metavar="TOKENS",
        default=512,
        show_default=True,
        help="Samples are packed into rows of so many tokens; memory grows with it.",
    )
    recompute = click.option(
        "--recompute",
        is_flag=True,
        help="Compute activations again in the backward pass instead of keeping them: less memory, a third more work.",
    )
    device = click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the model is."
    )
    autocast = click.option(
        "--autocast",
        type=click.Choice(["bfloat16"]),
        help="The dtype of matrix products; weights and optimizer stay float32.  [default: float32]",
    )
    return row_tokens(recompute(device(autocast(function))))
