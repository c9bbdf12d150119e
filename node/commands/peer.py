"""`swarmproof peer`: run a bootstrap peer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from node.commands.joining_options import introducing_options
from node.commands.options import key_option, metrics_options, state_option
from node.joining.options import JoinOptions
from node.keys.identity import load_or_create_key, node_id
from node.runtime.logs import name_process
from node.runtime.signals import stop_on_signals


@click.command()
@introducing_options
@key_option("This peer's key file, made if missing: its address names the key.  [default: key in the state folder]")
@state_option("This peer's own folder, kept across restarts.  [default: under ~/.swarmproof]")
@click.option("--until-parent-ends", is_flag=True, hidden=True, help="End when standard input does.")
@metrics_options
def peer(
    *,
    join: JoinOptions,
    key: Path | None,
    state: Path | None,
    until_parent_ends: bool,
    metrics_host: str,
    metrics_port: int | None,
) -> None:
    """Introduce those who join a run to each other.

    \b
    Example, on a machine that others reach at 198.51.100.7:
      swarmproof peer --coordinator http://192.0.2.1:8700 --run-id 5f3c... --peer-address 198.51.100.7:8701

    It prints the string by which others join. It holds no key of the run, and nobody has to trust it: what it passes
    on is signed by the run. Start as many as you like; those who joined find each other without any of them.
    """
    from node.joining.metrics import PEER, LatestStatus
    from node.joining.peer import PeerDaemonSettings, run_peer
    from node.joining.peer import until_parent_ends as parent_ends
    from node.runtime.metrics import StatusCollector, process_registry, serving_metrics

    folder = state or Path.home() / ".swarmproof" / join.run_id[:16] / "peer"
    node_key = load_or_create_key(key or folder / "key")
    latest = LatestStatus()
    settings = PeerDaemonSettings(join=join.settings(node_key), state=folder, watch=latest.note)
    name_process(run=join.run_id, node=node_id(node_key))
    registry = process_registry("peer", folders={"state": folder})
    registry.register(StatusCollector(PEER, latest))

    async def serve() -> None:
        stop = stop_on_signals()
        watching = asyncio.create_task(parent_ends(stop)) if until_parent_ends else None
        await run_peer(settings, key=node_key, stop=stop)
        if watching is not None:
            await watching

    with serving_metrics(registry, metrics_host, metrics_port):
        asyncio.run(serve())
