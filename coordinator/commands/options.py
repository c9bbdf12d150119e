"""Options that the operator's commands share, or that one has many of."""

from __future__ import annotations

import ipaddress

import click

from node.commands.options import EXISTING_FOLDER, FOLDER, Option, all_of, key_option, state_option
from shardcast.wire import is_digest

HOME_WAIT_SECONDS = 60.0
"""How long a process waits for a run's data folder or database to be made."""


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
"""Where a run is, or is to be made."""

existing_run_options = all_of(
    click.option(
        "--data", type=EXISTING_FOLDER, required=True, help="The run's data folder, as its coordinator has it."
    ),
    click.option("--database-url", metavar="URL", help="As the coordinator's, if it has one."),
)
"""Where a run is that must exist."""

run_key_option = key_option(
    "The run's key file, made by `swarmproof keys new`. Whoever has it is the run.", required=True
)
own_state_option = state_option("This process's own folder; kept across restarts.", required=True)


def _limit(name: str, default: int, said: str) -> Option:
    kind = click.IntRange(int(default > 0), 10_000_000)
    return click.option(name, type=kind, metavar="COUNT", default=default, show_default=True, help=said)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no IP address") from error


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
        callback=lambda _context, _parameter, given: tuple(map(_address, given)),
        help="A reverse proxy whose X-Forwarded-For says who asks; nobody else's is believed. Repeatable.",
    ),
    _limit("--leases-per-address", 0, "Leases that all nodes of one address hold together; 0 for any number."),
    _limit("--connections-per-address", 256, "Connections from one address, or one /64 of IPv6."),
    _limit("--max-connections", 1024, "Connections in all."),
    _limit("--node-requests-per-minute", 1200, "Signed requests that one node may send."),
    _limit("--requests-per-minute", 6000, "Requests that one address, or one /64 of IPv6, may send."),
)
"""What one address, one node and all together may take of a coordinator."""

contact_options = all_of(
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
        type=FOLDER,
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
)
"""Where others find the run, and the peer that introduces them."""


watching_options = all_of(
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
"""Where the trainer's statistics go; `coordinator.training.trackers.tracker_settings` takes them."""


evaluation_options = all_of(
    click.option(
        "--evaluate-every",
        type=click.IntRange(0),
        metavar="STEPS",
        default=0,
        show_default=True,
        help="Measure the policy on held-out problems after so many steps; 0 never does. Training waits meanwhile.",
    ),
    click.option(
        "--evaluate-problems",
        type=click.IntRange(1, 4096),
        metavar="COUNT",
        default=64,
        show_default=True,
        help="Of each environment, one completion each.",
    ),
)
"""How often the trainer measures its policies on held-out problems."""


execution_options = all_of(
    click.option(
        "--row-tokens",
        type=click.IntRange(1, 2**20),
        metavar="TOKENS",
        default=512,
        show_default=True,
        help="Samples are packed into rows of so many tokens; memory grows with it.",
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
"""How the trainer computes; a run does not depend on it, but for rounding."""
