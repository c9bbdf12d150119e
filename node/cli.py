"""The `swarmproof` command: what every participant runs, and the operator's commands where they are installed.

Settings come from flags, then the environment (SWARMPROOF_<COMMAND>_<FLAG>), then the TOML file of --config,
then defaults. Whatever goes wrong is one sentence and, below it, what to do. Exit code 2 is for a wrong command line
(and for a command that could not run, where 1 is an answer), 70 for a defect of this program, 141 where nobody reads
its output any more, and 1 for everything else; --debug or SWARMPROOF_DEBUG=1 shows the traceback.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from node.commands.audit import audit
from node.commands.broadcast import fetch, publish
from node.commands.click_ext import ENVIRONMENT, Commands
from node.commands.completion import completion
from node.commands.config import check_variables, default_map, load_config
from node.commands.control import authority, control, control_options
from node.commands.doctor import doctor
from node.commands.engine_options import (
    check_engine,
    engine_maker,
    engine_options,
    import_models,
    refuse_vllm_options,
)
from node.commands.environments import env
from node.commands.invite import invite, invite_option
from node.commands.joining_options import joining_options
from node.commands.keys import keys
from node.commands.models import models
from node.commands.options import (
    FILE,
    json_option,
    key_option,
    listen_options,
    metrics_options,
    number_option,
    state_folder,
    state_option,
    threads_option,
)
from node.commands.peer import peer
from node.commands.profile_options import profile_options
from node.commands.receipt import receipt
from node.commands.serving_options import server_limits, serving, serving_options, worker_serving_options
from node.commands.status import status
from node.commands.witness import witness
from node.joining.options import JoinOptions
from node.keys.identity import load_or_create_key, node_id
from node.protocol.control import Purpose
from node.runtime.logs import FORMATS, LEVELS, Format, Level, name_process, set_up_logging
from node.runtime.signals import stop_on_signals

# vLLM's processes import this module before vLLM, which speaks before it has read how much it may say.
logging.getLogger("vllm").setLevel(logging.ERROR)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    type=FILE,
    envvar=f"{ENVIRONMENT}_CONFIG",
    help="TOML file with a table per command.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log every detail, as --log-level debug does.")
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    envvar=f"{ENVIRONMENT}_LOG_LEVEL",
    default="info",
    show_default=True,
    help="The least that is logged.",
)
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    envvar=f"{ENVIRONMENT}_LOG_FORMAT",
    default="text",
    show_default=True,
    help="Lines for people, or a JSON object a line.",
)
@click.option("--debug", is_flag=True, envvar=f"{ENVIRONMENT}_DEBUG", help="Show tracebacks.")
@click.version_option(package_name="swarmproof")
@click.pass_context
def main(
    ctx: click.Context,
    *,
    config: Path | None,
    verbose: bool,
    log_level: Level,
    log_format: Format,
    debug: bool,  # noqa: ARG001  (`reported` looks for it)
) -> None:
    """Train a language model on machines that nobody vouches for.

    \b
    Contribute:   swarmproof worker --join swarmproof://...
    Help others:  swarmproof relay --join swarmproof://...
    How it goes:  swarmproof status --coordinator URL --run-id ID
    Check a run:  swarmproof audit URL --run-id ID
    Any file:     swarmproof publish FILE

    Every flag can also be an environment variable, such as SWARMPROOF_WORKER_SLOTS=8, or a key in the
    TOML file of --config, such as `slots = 8` under [worker]. The flag wins, then the environment.
    """
    set_up_logging(level="debug" if verbose else log_level, log_format=log_format)
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # what an extension module's crash stood in, instead of no word
    check_variables(main, ctx, os.environ, prefix=ENVIRONMENT)
    if config is not None:
        ctx.default_map = default_map(load_config(config), main, ctx)


_KEY = key_option()
_STATE = state_option()


@main.command()
@joining_options
@_KEY
@_STATE
@engine_options
@number_option(
    "--slots",
    "Most slots whose completions are generated together; fewer where this machine is slow.",
    most=1024,
    default=4,
)
@click.option(
    "--grace",
    type=click.FloatRange(0, 3600),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="How long Ctrl-C and SIGTERM wait for slots; those that take longer are handed back.",
)
@click.option("--once", is_flag=True, help="Do the first slots, wait for their receipts, and end.")
@click.option(
    "--allow-environments",
    is_flag=True,
    help="Install the packages of the run's environments where they are missing; they run in a sandbox.",
)
@json_option("Events on stdout, one JSON object a line, instead of a view.")
@invite_option
@profile_options
@control_options
@worker_serving_options
@metrics_options
def worker(
    *,
    join: JoinOptions,
    key: Path | None,
    state: Path | None,
    engine: str,
    slots: int,
    grace: float,
    once: bool,
    allow_environments: bool,
    as_json: bool,
    invite: bytes | None,
    nickname: str | None,
    hardware: bool,
    control: frozenset[Purpose],
    serve: str | None,
    public_url: str | None,
    max_rate: float | None,
    connections_per_address: int,
    metrics_host: str,
    metrics_port: int | None,
    **options: Any,
) -> None:
    """Generate rollouts for a run and earn receipts for them.

    \b
    Example:
      swarmproof worker --join swarmproof://5f3c.../ip4/192.0.2.1/tcp/8701/p2p/12D3...

    The run's operator gives the string to join by; with a coordinator's URL and the run's id it works as well.
    It makes its key, fetches the policy, works, and waits whenever the coordinator or the relays are away.
    A terminal shows what it does; status.json in its state folder says it, too. Ctrl-C finishes its slots or hands
    them back, and ends with what came of all of them; a second one ends at once.
    """
    refuse_vllm_options(engine)
    check_engine(engine, options["device"])
    from node.runtime.metrics import StatusCollector, process_registry, serving_metrics
    from node.worker.metrics import WORKER, StatusProbe
    from node.worker.view.watching import WorkerIdentity, observe_worker
    from shardcast.serve.metrics import DiskCollector

    folder = state_folder(state, join.run_id, "worker")
    node_key = load_or_create_key(key or folder / "key")
    identity = WorkerIdentity(run_id=join.run_id, node=node_id(node_key), coordinators=join.coordinators)
    join_settings, own = join.settings(node_key), None if serve is None else serving(serve, public_url)
    limits = server_limits(max_rate=max_rate, connections_per_address=connections_per_address)

    async def work() -> None:
        stop = stop_on_signals()
        async with observe_worker(identity, as_json=as_json, stop=stop) as observer:
            import_models()
            from node.worker.daemon import WorkerSettings, run_worker

            settings = WorkerSettings(
                join=join_settings,
                state=folder,
                slots=slots,
                threads=options["threads"],
                grace_seconds=grace,
                once=once,
                allow_environments=allow_environments,
                serving=own,
                server_limits=limits,
                control=control,
                invite=invite,
                nickname=nickname,
                shows_hardware=hardware,
            )
            make_engine = engine_maker(engine, state=folder, **options)
            probe = StatusProbe(observer)
            registry.register(StatusCollector(WORKER, probe))
            registry.register(DiskCollector(folder / "shardcast"))
            await run_worker(settings, key=node_key, make_engine=make_engine, stop=stop, observer=probe)

    name_process(run=join.run_id, node=node_id(node_key))
    registry = process_registry("worker", folders={"state": folder})
    with serving_metrics(registry, metrics_host, metrics_port):
        asyncio.run(work())


@main.command()
@joining_options
@_KEY
@_STATE
@listen_options(8720)
@click.option("--public-url", metavar="URL", help="Where others find this relay.  [default: http://HOST:PORT]")
@click.option(
    "--upstream",
    "upstreams",
    metavar="URL",
    multiple=True,
    help="An origin or relay to fetch from; repeatable.  [default: the run's relays]",
)
@click.option(
    "--quota-gb", type=click.FloatRange(min=0, min_open=True), metavar="GB", help="Most disk to use, else any."
)
@threads_option("CPU threads that check and compute policies.  [default: every core]")
@serving_options
@metrics_options
def relay(
    *,
    join: JoinOptions,
    key: Path | None,
    state: Path | None,
    host: str,
    port: int,
    public_url: str | None,
    upstreams: tuple[str, ...],
    quota_gb: float | None,
    threads: int | None,
    max_rate: float | None,
    connections_per_address: int,
    metrics_host: str,
    metrics_port: int | None,
) -> None:
    """Serve the run's policies to workers and other relays.

    \b
    Example, reachable by others:
      swarmproof relay --join swarmproof://5f3c.../ip4/192.0.2.1/tcp/8701/p2p/12D3... \\
        --host 0.0.0.0 --public-url http://198.51.100.7:8720

    Nobody has to trust a relay: whoever fetches from it checks every byte.
    """
    from node.broadcast.progress import FetchProgress
    from node.relay.daemon import RelaySettings, run_relay
    from node.runtime.metrics import process_registry, serving_metrics

    folder = state_folder(state, join.run_id, "relay")
    node_key = load_or_create_key(key or folder / "key")
    settings = RelaySettings(
        join=join.settings(node_key),
        state=folder,
        host=host,
        port=port,
        public_url=public_url,
        upstreams=upstreams,
        quota_bytes=None if quota_gb is None else int(quota_gb * 1e9),
        threads=threads,
        server_limits=server_limits(max_rate=max_rate, connections_per_address=connections_per_address),
    )

    async def serve() -> None:
        await run_relay(settings, key=node_key, stop=stop_on_signals(), watch=FetchProgress().fetching)

    name_process(run=join.run_id, node=node_id(node_key))
    registry = process_registry("relay", folders={"state": folder})
    with serving_metrics(registry, metrics_host, metrics_port):
        asyncio.run(serve())


main.add_command(audit)
main.add_command(authority)
main.add_command(completion)
main.add_command(control)
main.add_command(doctor)
main.add_command(env)
main.add_command(publish)
main.add_command(fetch)
main.add_command(invite)
main.add_command(keys)
main.add_command(models)
main.add_command(peer)
main.add_command(receipt)
main.add_command(status)
main.add_command(witness)


if __name__ == "__main__":
    main()
