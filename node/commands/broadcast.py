"""`swarmproof publish` and `swarmproof fetch`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import click

from node.client.http import printable
from node.commands.click_ext import CouldNotRun, reported
from node.commands.options import (
    EXISTING_FILE,
    FILE,
    json_option,
    key_option,
    listen_options,
    number_option,
    state_option,
)
from node.commands.serving_options import server_limits, serving_options
from node.keys.identity import load_or_create_key
from node.protocol.run import run_id_of
from node.runtime.signals import EXIT_AT_ONCE, Stopped, stop_on_signals
from shardcast.wire import is_digest


@click.command()
@click.argument("file", type=EXISTING_FILE)
@number_option(
    "--version",
    "The version's number, for one that must go on elsewhere.  [default: the next]",
    least=0,
    metavar="NUMBER",
)
@state_option(
    "The versions and the key; name it to publish another file as the next version.  "
    "[default: under ~/.swarmproof/publish, by the file's path]"
)
@key_option("The publisher's key file, made if missing.  [default: key in the state folder]")
@listen_options(8710)
@number_option("--keep", "Versions that stay on disk whole; older ones can no longer be fetched.  [default: 3]")
@number_option(
    "--keep-versions",
    "Instead of --keep: versions that stay on disk whole; older ones stay as deltas, and can be fetched.",
)
@click.option("--watch", is_flag=True, help="Publish the file again whenever it is replaced.")
@serving_options
@click.pass_context
def publish(
    ctx: click.Context,
    *,
    file: Path,
    version: int | None,
    state: Path | None,
    key: Path | None,
    host: str,
    port: int,
    keep: int | None,
    keep_versions: int | None,
    watch: bool,
    max_rate: float | None,
    connections_per_address: int,
) -> None:
    """Serve FILE, signed, to whoever asks: SHARDCAST alone, without a coordinator.

    \b
    Example:
      swarmproof publish model.safetensors --host 0.0.0.0 --watch

    It prints the command for the other side. A file that has changed since the last time is a new version, and a
    delta where it has the same size; one that has not is served as it was. Replace a file that is watched at
    once (write another, then rename it): what has not changed for a second is taken to be whole.
    """
    if keep is not None and keep_versions is not None:
        raise click.UsageError("Give --keep or --keep-versions, not both.")
    from node.broadcast.publishing import KEPT_VERSIONS, PublishSettings, default_state, run_publish

    _calm_logs(ctx)
    folder = state or default_state(file)
    settings = PublishSettings(
        file=file,
        state=folder,
        host=host,
        port=port,
        version=version,
        keep=None if keep_versions is not None else keep or KEPT_VERSIONS,
        keep_whole=keep_versions,
        watch=watch,
        limits=server_limits(max_rate=max_rate, connections_per_address=connections_per_address),
    )
    publisher_key = load_or_create_key(key or folder / "key")

    async def serve() -> None:
        await run_publish(settings, key=publisher_key, stop=stop_on_signals(), say=click.echo)

    with _rephrased():
        asyncio.run(serve())


def _check_hex(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not is_digest(value):
        raise click.BadParameter("it has 64 hexadecimal digits; copy it from what `swarmproof publish` printed.")
    return value


@click.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option("--run-id", metavar="ID", required=True, callback=_check_hex, help="Whose versions: the publisher's run.")
@click.option("--key", metavar="HEX", required=True, callback=_check_hex, help="The publisher's public key.")
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="Where to put the file, whole or not at all.  [default: it stays in the state folder]",
)
@state_option("Keeps the version for the next delta, and what was interrupted.  [default: under ~/.swarmproof]")
@click.option("--follow", is_flag=True, help="Go on with every new version; waits when no source is there.")
@json_option("One JSON object for each version instead of a sentence.")
@click.pass_context
def fetch(
    ctx: click.Context,
    *,
    sources: tuple[str, ...],
    run_id: str,
    key: str,
    output: Path | None,
    state: Path | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Fetch the newest version of what `swarmproof publish` serves, from any number of sources at once.

    \b
    Example:
      swarmproof fetch http://192.0.2.1:8710 http://198.51.100.7:8720 \\
        --run-id 5f3c... --key 7a19... -o model.safetensors

    Sources are publishers and relays; none has to be trusted, since every byte is checked. What is interrupted
    goes on where it stopped. Exit code 0: the file is here. 1: what the sources serve is not the publisher's
    newest version. 2: it could not be fetched.
    """
    from node.broadcast.fetching import FetchSettings, run_fetch
    from node.broadcast.view import FetchView

    public_key = bytes.fromhex(key)
    if run_id_of(public_key) != run_id:
        raise click.UsageError(
            "--run-id and --key do not belong together; copy both from what one `swarmproof publish` printed."
        )
    _calm_logs(ctx, but_warnings=follow)
    settings = FetchSettings(
        sources=sources,
        run_id=run_id,
        publisher_key=public_key,
        state=state or Path.home() / ".swarmproof" / run_id[:16] / "fetch",
        output=output,
        follow=follow,
    )

    async def get() -> None:
        await run_fetch(settings, view=FetchView(as_json=as_json), stop=stop_on_signals())

    with reported(CouldNotRun):
        try:
            with _rephrased():
                asyncio.run(get())
        except Stopped:
            ctx.exit(_stopped(follow=follow))


def _stopped(*, follow: bool) -> int:
    if follow:
        return 0
    click.echo("stopped; the same command goes on from here", err=True)
    return EXIT_AT_ONCE


def _calm_logs(ctx: click.Context, *, but_warnings: bool = True) -> None:
    """Without --verbose, say what shardcast does in this package's words only."""
    if not ctx.find_root().params.get("verbose"):
        logging.getLogger("shardcast").setLevel(logging.WARNING if but_warnings else logging.ERROR)


@contextlib.contextmanager
def _rephrased() -> Iterator[None]:
    """Shorten a broadcast failure for a person; what must not be trusted has an exit code of its own."""
    from shardcast.errors import PeerFault, ShardcastError, Unreachable

    try:
        yield
    except ShardcastError as error:
        # The addresses were given by whoever reads this; --verbose says what each of them did.
        what = "No source can be reached" if isinstance(error, Unreachable) else printable(str(error))
        said = type(error)(f"{what}.", code=error.code)
        if not isinstance(error, PeerFault):
            raise said from error
        with reported():
            raise said from error
