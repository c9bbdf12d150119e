"""The operator's commands: coordinator, verifier, trainer, calibration, and the demonstration."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.calibration.command import calibrate
from coordinator.demo.command import demo
from coordinator.errors import BadConfiguration
from coordinator.home import Home, create_home, open_home
from coordinator.redteam.command import redteam
from coordinator.run_file import read_run_file
from coordinator.stakes_command import stakes
from node.engine_options import check_engine, engine_options, prefills_maker
from node.exchange import checked_url
from node.identity import load_key
from node.protocol.run import HonestSpec, RunSpec, run_id_of
from node.serving_options import server_limits, serving_options
from node.signals import stop_on_signals

log = logging.getLogger(__name__)

HOME_WAIT_SECONDS = 60.0
SWITCH_SECONDS = 0.0005

F = TypeVar("F", bound=Callable[..., object])


def _data_options(function: F) -> F:
    data = click.option(
        "--data",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        help="The run's data folder, shared by coordinator, verifiers and trainer.",
    )
    database = click.option(
        "--database-url", help="Another SQLite file, as an SQLAlchemy URL; this release knows no other database."
    )
    return data(database(function))


def _listen_options(port: int) -> Callable[[F], F]:
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


def _limit_options(function: F) -> F:
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


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no IP address") from error


_KEY = click.option(
    "--key",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The run's key file, made by `veriswarm keys new`. Whoever has it is the run.",
)
_STATE = click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="This process's own folder; kept across restarts.",
)
_THREADS = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="COUNT",
    default=1,
    show_default=True,
    help="CPU threads for torch.",
)


@click.command()
@click.option(
    "--run",
    "run_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="run.toml: the model, the problems, the batch and the limits of the run.",
)
@_KEY
@_data_options
@_listen_options(8700)
@click.option("--relay", "relays", multiple=True, metavar="URL", help="A relay to tell nodes about; repeatable.")
@_limit_options
def coordinator(
    *,
    run_file: Path,
    key: Path,
    data: Path,
    database_url: str | None,
    host: str,
    port: int,
    relays: tuple[str, ...],
    requests_per_minute: int,
    node_requests_per_minute: int,
    max_connections: int,
    connections_per_address: int,
    leases_per_address: int,
    proxies: tuple[str, ...],
) -> None:
    """Serve a run: give out work, take submissions, keep the log.

    \b
    Example, a new run:
      veriswarm keys new run.key
      veriswarm coordinator --run run.toml --key run.key --data run/ --port 8700

    Then start `veriswarm verifier` and `veriswarm trainer` on the same --data.
    """
    import uvicorn

    from coordinator.app import RequestLimits, create_app
    from coordinator.connections import ConnectionLimits, allow_connections, listening_socket, server_config
    from coordinator.service import Coordinator

    _, spec = read_run_file(run_file)
    run_key = load_key(key)
    for url in relays:
        checked_url(url)
    limits = ConnectionLimits(
        connections=max_connections, connections_per_address=connections_per_address, proxies=proxies
    )
    allow_connections(limits)
    listening = listening_socket(host, port)
    public_key = run_key.public_key().public_bytes_raw()
    home = create_home(data, public_key=public_key, spec=spec, database_url=database_url)
    home.blobs.clear_incoming()
    _warn_of_defaults(spec)
    bound = listening.getsockname()[1]
    click.echo(f"run id  {home.run_id}")
    click.echo(f"serving at http://{host}:{bound}; with the address under which others reach it, workers join by")
    click.echo(f"  veriswarm worker --coordinator http://{host}:{bound} --run-id {home.run_id}")
    app = create_app(
        Coordinator(home, key=run_key, relay_urls=relays, leases_per_address=leases_per_address),
        limits=RequestLimits(per_address=requests_per_minute, per_node=node_requests_per_minute),
    )
    config = server_config(app, limits)
    # A thread that has a database connection's lock must not wait 5 ms for the interpreter's after each statement.
    sys.setswitchinterval(SWITCH_SECONDS)
    uvicorn.Server(config).run(sockets=[listening])


def _warn_of_defaults(spec: RunSpec) -> None:
    if spec.limits.honest == HonestSpec():
        log.warning("limits.honest is not set: conservative defaults; run `veriswarm calibrate`")


@click.command()
@_data_options
@_STATE
@click.option("--name", default="verifier-1", show_default=True, help="Unique among the verifiers of a run.")
@click.option(
    "--source", "sources", multiple=True, required=True, metavar="URL", help="An origin or relay; repeatable."
)
@engine_options
def verifier(
    *,
    data: Path,
    database_url: str | None,
    state: Path,
    name: str,
    sources: tuple[str, ...],
    engine: str,
    threads: int | None,
    **settings: Any,
) -> None:
    """Judge submissions by a prefill under their policy.

    \b
    Example:
      veriswarm verifier --data run/ --state verifier-1/ \\
        --source http://127.0.0.1:8710

    Start as many as the queue needs; each wants its own --name and --state. --engine torch prefills with
    transformers, the reference; vllm is for policies that only vLLM can hold.
    """
    check_engine(engine)  # before torch is imported, which takes seconds
    from coordinator.verifier import Verifier, VerifierSettings

    make_prefills = prefills_maker(engine, threads=threads, state=state, **settings)
    home = open_home(data, database_url=database_url, wait_seconds=HOME_WAIT_SECONDS)
    _warn_of_defaults(home.spec)
    chosen = VerifierSettings(
        name=name, state=state, sources=sources, threads=threads or 1, make_prefills=make_prefills
    )

    async def work() -> None:
        await Verifier(home, chosen).run(stop_on_signals())

    asyncio.run(work())


@click.command()
@_data_options
@_KEY
@_STATE
@_listen_options(8710)
@_THREADS
@serving_options
def trainer(
    *,
    data: Path,
    database_url: str | None,
    key: Path,
    state: Path,
    host: str,
    port: int,
    threads: int,
    **serving: Any,
) -> None:
    """Train on what was admitted, and publish each policy.

    \b
    Example:
      veriswarm trainer --data run/ --key run.key --state trainer/ --port 8710

    It serves the policies, too, as the run's origin. Relays take that as their upstream:
    veriswarm relay --upstream http://HOST:8710 ...
    """
    from coordinator.storage.training import newest
    from coordinator.trainer import Trainer, TrainerSettings
    from shardcast import Origin, OriginServer

    home = open_home(data, database_url=database_url, wait_seconds=HOME_WAIT_SECONDS)
    run_key = _run_key(home, key)
    with home.database.read() as connection:
        recorded = newest(connection)
    origin = Origin(
        state / "origin",
        run_key,
        home.run_id,
        # A policy that is stored but not in the log yet must not be heard of.
        announced=-1 if recorded is None else recorded,
    )
    server = OriginServer(origin, host, port, limits=server_limits(**serving))
    click.echo(f"origin  http://{host}:{server.start()}")
    work = Trainer(home, origin=origin, server=server, settings=TrainerSettings(state=state, threads=threads))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: work.stop())
    try:
        work.run()
    finally:
        server.stop()
        origin.close()


def _run_key(home: Home, path: Path) -> Ed25519PrivateKey:
    key = load_key(path)
    if run_id_of(key.public_key().public_bytes_raw()) != home.run_id:
        raise BadConfiguration(f"{path} is not the key of the run in {home.folder}")
    return key


COMMANDS = [coordinator, verifier, trainer, calibrate, demo, redteam, stakes]
"""What the entry point `veriswarm.commands` offers to the command line."""
