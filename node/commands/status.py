"""`swarmproof status`: a node's standing, its reasons, and its local worker."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from node.client.api import CoordinatorClient
from node.client.http import Backoff, page_of
from node.commands.joining_options import parse_join_options
from node.commands.options import json_line, json_option, key_option, state_option
from node.commands.status_report import LocalWorker, StatusLine, deciding, health_lines, line_of, lines_of, show
from node.errors import CoordinatorFault, NetworkDown
from node.joining.options import JoinOptions
from node.joining.session import join_run
from node.keys.identity import load_key, node_id
from node.protocol import endpoints
from node.protocol.messages import NodeStanding
from node.protocol.run import RunSpec
from shardcast.errors import Malformed
from shardcast.files import read_bounded
from shardcast.wire import is_digest

MAX_STATUS_BYTES: Final = 4 * 1024 * 1024
MAX_STATUS_OF_RUN_BYTES: Final = 4 * 1024 * 1024
SECONDS: Final = 20.0
_ONCE: Final = Backoff(first_seconds=2 * SECONDS + 1, max_seconds=2 * SECONDS + 1)
"""No retries within SECONDS: each coordinator is tried once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """A worker's state folder with its status.json, parsed and raw, if any."""

    folder: Path | None
    worker: LocalWorker | None = None
    raw: Any = None


@click.command()
@click.option(
    "--join",
    "joins",
    multiple=True,
    metavar="STRING",
    help="swarmproof://… as the run's operator gives it, instead of --coordinator and --run-id.",
)
@click.option(
    "--coordinator",
    "coordinators",
    metavar="URL",
    multiple=True,
    help="A coordinator's address; repeatable.  [default: the local worker's]",
)
@click.option("--run-id", metavar="ID", help="Which run.  [default: the local worker's]")
@key_option("The key file of the node to ask about.  [default: key in the state folder]")
@click.option("--node", metavar="HEX", help="Ask about any node, by its id.")
@state_option("A worker's state folder.  [default: under ~/.swarmproof]")
@json_option()
@click.pass_context
def status(
    ctx: click.Context,
    *,
    joins: tuple[str, ...],
    coordinators: tuple[str, ...],
    run_id: str | None,
    key: Path | None,
    node: str | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Say how a run is, what a node's standing is, why, and what its worker is doing.

    \b
    Examples:
      swarmproof status                                    # of the only worker under ~/.swarmproof
      swarmproof status --coordinator http://192.0.2.1:8700 --run-id 5f3c...    # where no worker is: the run alone
      swarmproof status --coordinator http://192.0.2.1:8700 --run-id 5f3c... --node 8a1e...

    Exit code 0: the node is not banned, or there is none. 1: it is, or no coordinator answers. 2: it is not clear which
    node is meant.
    """
    _check(run_id=run_id, node=node, key=key)
    if joins:
        coordinators, run_id = _introduced(parse_join_options(joins=joins, coordinators=coordinators, run_id=run_id))
    local = _local(state, run_id)
    urls, run_id = _where(coordinators, run_id, local)
    if node is None and (file := _key_file(key, state, local)) is not None:
        node = node_id(load_key(file))
    console = Console()
    try:
        standing, spec, url, health = asyncio.run(_ask(urls, run_id, node))
    except CoordinatorFault:
        if local.worker is not None and not as_json:
            show([line_of(local.worker, now=time.time())], (), console)
        raise
    banned = standing is not None and standing.banned
    if as_json:
        said = {"exit_code": int(banned), "run_id": run_id, "standing": standing, "worker": local.raw}
        click.echo(json_line(said))
    else:
        lines = [StatusLine("run", f"{spec.name}, {run_id[:16]}…, at {url}"), *health]
        if standing is None:
            lines.append(StatusLine("node", "None has worked for it here: name one by --node, --key or --state."))
            lines.append(StatusLine("page", f"{url}/"))
        else:
            lines += [*lines_of(standing, spec.standing), StatusLine("page", page_of(url, standing.node))]
        if local.worker is not None:
            lines.append(line_of(local.worker, now=time.time()))
        show(lines, () if standing is None else deciding(standing), console)
    ctx.exit(int(banned))


def _check(*, run_id: str | None, node: str | None, key: Path | None) -> None:
    if run_id is not None and not is_digest(run_id):
        raise click.UsageError("A run's id has 64 hexadecimal digits; copy it from whoever told you of the run.")
    if node is not None and not is_digest(node):
        raise click.UsageError("A node's id has 64 hexadecimal digits; `swarmproof keys show FILE` prints a key's.")
    if node is not None and key is not None:
        raise click.UsageError("Give --node or --key, not both.")


def _introduced(join: JoinOptions) -> tuple[tuple[str, ...], str]:
    """Ask the run's peers, under a throwaway key, for the coordinators and the run id; raises NetworkDown."""

    async def ask() -> tuple[str, ...]:
        nobody = Ed25519PrivateKey.generate()
        with tempfile.TemporaryDirectory() as folder:
            try:
                async with (
                    asyncio.timeout(SECONDS),
                    join_run(join.settings(nobody), key=nobody, state=Path(folder)) as at,
                ):
                    return at.client.urls
            except TimeoutError as error:
                raise NetworkDown(
                    f"None of the run's peers named a coordinator within {SECONDS:.0f} s; ask for a newer string.",
                    code="not_found",
                ) from error

    return asyncio.run(ask()), join.run_id


def _where(coordinators: tuple[str, ...], run_id: str | None, local: _Local) -> tuple[tuple[str, ...], str]:
    """Return coordinators and run id from the options, else from the local worker."""
    if local.worker is not None:
        run_id = run_id or local.worker.run_id
        coordinators = coordinators or (local.worker.coordinator,)
    if run_id is None or not is_digest(run_id) or not coordinators:
        raise click.UsageError(
            "Give --join, or --coordinator and --run-id, or with --state the folder of a worker that has joined a run"
            f"{_known_folders()}."
        )
    return coordinators, run_id


def _known_folders() -> str:
    """List the state folders of this machine's workers, for the error message."""
    found = sorted(str(status.parent) for status in (Path.home() / ".swarmproof").glob("*/worker/status.json"))
    return f". On this machine there are {', '.join(found)}" if len(found) > 1 else ""


def _key_file(key: Path | None, state: Path | None, local: _Local) -> Path | None:
    """Return the named key, else the worker's; None where no worker has worked for the run in the default folder."""
    if key is not None or local.folder is None:
        return key
    file = local.folder / "key"
    if file.exists():
        return file
    if local.worker is not None:
        raise click.UsageError(
            f"The key of the worker in {local.folder} is elsewhere: name it by --key, or --node HEX."
        )
    if state is not None:
        raise click.UsageError(f"No worker has worked in {state}: name another --state, or --node HEX.")
    return None


def _local(state: Path | None, run_id: str | None) -> _Local:
    """Find the state folder: the given one, the run's default, or the only one there is."""
    base = Path.home() / ".swarmproof"
    if state is None and run_id is not None:
        state = base / run_id[:16] / "worker"
    if state is None:
        found = list(base.glob("*/worker/status.json"))
        if len(found) != 1:
            return _Local(folder=None)
        state = found[0].parent
    try:
        data = read_bounded(state / "status.json", max_bytes=MAX_STATUS_BYTES)
        worker, raw = msgspec.json.decode(data, type=LocalWorker), msgspec.json.decode(data)
    except (OSError, Malformed, msgspec.DecodeError, UnicodeDecodeError):
        return _Local(folder=state)
    return _Local(folder=state) if run_id not in (None, worker.run_id) else _Local(folder=state, worker=worker, raw=raw)


async def _ask(
    urls: tuple[str, ...], run_id: str, node: str | None
) -> tuple[NodeStanding | None, RunSpec, str, Sequence[StatusLine]]:
    """Return the node's standing if one is named, the run's rules, the coordinator's URL, which proves to be the run's,
    and how it says that the run is.

    Raises CoordinatorFault.
    """
    async with CoordinatorClient(urls, run_id=run_id, backoff=_ONCE) as client:
        descriptor = await client.descriptor(patience_seconds=SECONDS)
        standing = None if node is None else await client.standing(node, patience_seconds=SECONDS)
        said = await client.fetch(endpoints.STATUS_OF_RUN, max_bytes=MAX_STATUS_OF_RUN_BYTES, patience_seconds=SECONDS)
        return standing, descriptor.spec, client.url, health_lines(said)
