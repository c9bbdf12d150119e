"""A hostile relay: passes on what its upstream has, with a bit flipped in every chunk of every policy.

It announces itself like any other relay: whoever asks it learns that a chunk is not the one that the run signed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import aiohttp
import click
from aiohttp import web

from coordinator.lab.processes.journal import Journal
from coordinator.lab.processes.layout import WORKER_KEY
from node.client.api import CoordinatorClient
from node.commands.options import state_option
from node.errors import CoordinatorFault
from node.keys.identity import load_or_create_key, node_id
from node.protocol.messages import RelayAnnouncement
from node.runtime.signals import Stopped, race, stop_on_signals
from shardcast import listen

log = logging.getLogger(__name__)

NAME = "corrupt-relay"
SERVED = "served"
ANNOUNCE_SECONDS = 10.0
REPLY_SECONDS = 90.0
MAX_BODY_BYTES = 64 * 1024 * 1024
_FORGED = ("/v1/payloads/",)


class CorruptRelay:
    """A proxy of `upstream` that tells the truth about everything but the weights."""

    def __init__(self, upstream: str, *, session: aiohttp.ClientSession, journal: Journal, node: str) -> None:
        self._upstream = upstream
        self._session = session
        self._journal = journal
        self._node = node

    def app(self) -> web.Application:
        """Build the aiohttp application that it serves."""
        app = web.Application()
        app.add_routes([web.get("/health", self._health), web.get("/{rest:.*}", self._pass_on)])
        return app

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        try:
            async with self._session.get(self._upstream + request.path_qs) as answer:
                body = await answer.content.read(MAX_BODY_BYTES)
                while piece := await answer.content.read(MAX_BODY_BYTES - len(body)):
                    body += piece
                status = answer.status
        except (aiohttp.ClientError, TimeoutError):
            return web.Response(status=503)
        if status == 200 and body and request.path.startswith(_FORGED):
            self._journal.write(NAME, self._node, code=SERVED)
            body = bytes([body[0] ^ 1, *body[1:]])
        return web.Response(status=status, body=body)


@click.command()
@click.option("--coordinator", required=True, help="The coordinator's URL.")
@click.option("--run-id", required=True, help="The run to attack.")
@click.option("--upstream", required=True, help="Whom to pass on.")
@state_option("This process's folder.", required=True)
@click.option("--host", default="127.0.0.1", help="Where to serve.")
@click.option("--port", type=int, required=True, help="Where to serve.")
def main(*, coordinator: str, run_id: str, upstream: str, state: Path, host: str, port: int) -> None:
    """Relay a run's policies wrongly."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    key = load_or_create_key(state / WORKER_KEY)
    url = f"http://{host}:{port}"

    async def serve() -> None:
        stop = stop_on_signals()
        timeout = aiohttp.ClientTimeout(total=REPLY_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            journal = Journal(state)
            journal.introduce(node_id(key))
            relay = CorruptRelay(upstream, session=session, journal=journal, node=node_id(key))
            listener = await listen(relay.app(), host=host, port=port)
            try:
                async with CoordinatorClient(coordinator, run_id=run_id, key=key) as client:
                    with contextlib.suppress(Stopped):
                        await race(_announce(client, url), stop)
            finally:
                await listener.stop()
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
