"""Serving options of `swarmproof publish`, `relay` and `worker`."""

from __future__ import annotations

import math

import click

from node.commands.options import all_of, number_option
from node.relay.advice import Serving, serving_url
from shardcast import ServerLimits

LEAST_MB_PER_S = 0.1
"""At this rate a chunk of 4 MiB takes 42 s; readers time out after 120 s."""


def _check_finite(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("give a number; without this option there is no limit.")
    return value


serving_options = all_of(
    click.option(
        "--max-rate",
        type=click.FloatRange(min=LEAST_MB_PER_S),
        callback=_check_finite,
        metavar="MB/S",
        help="Most that is served, to all together, in megabytes per second.  [default: what the line carries]",
    ),
    number_option(
        "--connections-per-address",
        "Most connections that one address, or one /64 of IPv6, may have; 0 for any number, behind a proxy.",
        least=0,
        default=ServerLimits().max_connections_per_address,
    ),
)
"""The options that `server_limits` takes."""

worker_serving_options = all_of(
    click.option(
        "--serve",
        metavar="HOST:PORT",
        help="Serve the policies that this worker fetches to others, as a relay does; port 0 takes a free one.",
    ),
    click.option("--public-url", metavar="URL", help="Where others find what --serve serves, if not at HOST:PORT."),
    serving_options,
)
"""The options that `serving` and `server_limits` take: serving is off by default."""


def server_limits(*, max_rate: float | None, connections_per_address: int) -> ServerLimits:
    """Return the server's limits; `max_rate` in MB/s, 0 connections for unlimited."""
    return ServerLimits(
        max_bytes_per_s=None if max_rate is None else max_rate * 1e6,
        max_connections_per_address=connections_per_address or None,
    )


def serving(address: str, public_url: str | None) -> Serving:
    """Parse where a worker serves. Raises BadParameter, or ConfigError for an address that others cannot reach."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise click.BadParameter("give HOST:PORT, such as 192.0.2.7:8730", param_hint="--serve")
    if public_url is None:
        serving_url(host.strip("[]"), int(port))
    return Serving(host=host.strip("[]"), port=int(port), public_url=public_url)
