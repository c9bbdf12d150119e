"""A hostile relay: passes on what its upstream has, but for what its behaviour spoils, by default every chunk.

It announces itself like any other relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import click

from coordinator.lab.processes.journal import Journal
from coordinator.lab.processes.layout import WORKER_KEY
from coordinator.lab.redteam.relay_behaviours import BEHAVIOURS, HostileRelay
from node.client.api import CoordinatorClient
from node.commands.options import state_option
from node.errors import CoordinatorFault
from node.keys.identity import load_or_create_key, node_id
from node.protocol.messages import RelayAnnouncement
from node.runtime.signals import Stopped, race, stop_on_signals

log = logging.getLogger(__name__)

NAME = "corrupt-relay"
SERVED = "served"
ANNOUNCE_SECONDS = 10.0
LYING = "a flipped bit in chunks"


@click.command()
@click.option("--coordinator", required=True, help="The coordinator's URL.")
@click.option("--run-id", required=True, help="The run to attack.")
@click.option("--upstream", required=True, help="Whom to pass on.")
@state_option("This process's folder.", required=True)
@click.option("--host", default="127.0.0.1", help="Where to serve.")
@click.option("--port", type=int, required=True, help="Where to serve.")
@click.option("--behaviour", type=click.Choice(list(BEHAVIOURS)), default=LYING, help="What it does.")
def main(*, coordinator: str, run_id: str, upstream: str, state: Path, host: str, port: int, behaviour: str) -> None:
    """Relay a run's policies wrongly."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    key = load_or_create_key(state / WORKER_KEY)

    async def serve() -> None:
        stop = stop_on_signals()
        journal = Journal(state)
        journal.introduce(node_id(key))
        relay = HostileRelay(
            upstream,
            BEHAVIOURS[behaviour],
            on_spoiled=lambda: journal.write(NAME, node_id(key), code=SERVED),
        )
        url = await relay.start(host, port)
        try:
            async with CoordinatorClient(coordinator, run_id=run_id, key=key) as client:
                with contextlib.suppress(Stopped):
                    await race(_announce(client, url), stop)
        finally:
            await relay.stop()
            journal.close()

    asyncio.run(serve())


async def _announce(client: CoordinatorClient, url: str) -> None:
    while True:
        try:
            await client.announce(RelayAnnouncement(url=url), patience_seconds=float("inf"))
        except CoordinatorFault as error:
            log.warning("relay not announced (%s); retrying in %.0f s", error, ANNOUNCE_SECONDS)
        await asyncio.sleep(ANNOUNCE_SECONDS)


if __name__ == "__main__":
    main()
