"""`swarmproof witness`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from node.commands.options import key_option, listen_options, number_option, state_option
from node.errors import ConfigError
from node.keys.identity import load_or_create_key
from node.runtime.signals import stop_on_signals


@click.command()
@click.option("--name", metavar="NAME", required=True, help="The witness's name, such as witness.example.org/w1.")
@click.option(
    "--log",
    "logs",
    metavar="VKEY",
    multiple=True,
    required=True,
    help="The verifier key of a log to witness; repeatable. A run's is on its audit page.",
)
@state_option("What was signed; never go back to an older copy of it.  [default: under ~/.swarmproof/witness]")
@key_option("The witness's key file, made if missing.  [default: key in the state folder]")
@listen_options(8740)
@number_option("--requests-per-minute", "Most requests of one address.", default=600)
def witness(
    *,
    name: str,
    logs: tuple[str, ...],
    state: Path | None,
    key: Path | None,
    host: str,
    port: int,
    requests_per_minute: int,
) -> None:
    """Sign what a run's log shows, as long as it only grows.

    \b
    Example:
      swarmproof witness --name witness.example.org/w1 --host 0.0.0.0 \\
        --log swarmproof/5f3c...+8b47d4cd+AQOh...

    It prints its own verifier key: give it to the run's operator, with the address, and to auditors. A log that
    shows others another history than this witness has seen does not get its signature for both. Any log of the
    form c2sp.org/tlog-checkpoint will do.
    """
    from node.protocol.notes import KeyKind, is_key_name, parse_key
    from node.witness.server import WitnessSettings, run_witness
    from node.witness.state import WitnessState
    from shardcast.errors import Malformed

    if not is_key_name(name) or not name.isprintable():
        raise click.BadParameter("a name has no spaces and no plus.", param_hint="--name")
    try:
        known = [parse_key(log, KeyKind.LOG) for log in logs]
    except Malformed as error:
        raise ConfigError(f"--log: {error}; copy it whole from the run's audit page.") from error
    if len({log.name for log in known}) < len(known):
        raise click.UsageError("Give each --log once: a log has one key.")
    folder = state or Path.home() / ".swarmproof" / "witness"
    own = WitnessState(folder, name=name, key=load_or_create_key(key or folder / "key"), logs=known)
    click.echo(f"witness key  {own.verifier}")
    settings = WitnessSettings(host=host, port=port, requests_per_minute=requests_per_minute)

    async def serve() -> None:
        await run_witness(
            own, settings, stop=stop_on_signals(), serving=lambda bound: click.echo(f"serving at http://{host}:{bound}")
        )

    try:
        asyncio.run(serve())
    finally:
        own.close()
