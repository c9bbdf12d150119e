"""Fetch a run's datasets by SHARDCAST before they are needed, and offer them to others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path

from node.protocol.run import RunSpec
from shardcast import ContentClient, ServedState
from shardcast.errors import LocalFault, ShardcastError, TooSlow
from shardcast.fetch.raw_http import MayConnect, anywhere

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 10.0


class DatasetFeed:
    """Clients of all datasets of one run, bound to one event loop; make it with `dataset_feed`."""

    def __init__(self, clients: Iterable[ContentClient]) -> None:
        self._clients = tuple(clients)

    def offer(self) -> dict[str, ServedState]:
        """Return what is served of each dataset while it arrives, for the `contents` of a server."""
        return {client.digest: client.offer() for client in self._clients}

    def set_sources(
        self, urls: Sequence[str], *, stripes: Sequence[Sequence[str]] = (), last_resort: Sequence[str] = ()
    ) -> None:
        """Replace the sources of every dataset, as those of policies are."""
        for client in self._clients:
            client.set_sources(urls, stripes=stripes, last_resort=last_resort)

    async def fetch(self, *, timeout_s: float | None = None) -> Mapping[str, Path]:
        """Return the verified file of each dataset by its digest, once all are here.

        Retries while no source has it, or all of them lie; raises LocalFault for this machine's own, and TooSlow after
        `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return {client.digest: await _fetch(client) for client in self._clients}
        except TimeoutError as error:
            raise TooSlow(f"no source sent the run's datasets within {timeout_s} s") from error


async def _fetch(client: ContentClient) -> Path:
    pause, said = FIRST_PAUSE_SECONDS, False
    while True:
        try:
            path = await client.fetch()
        except LocalFault:
            raise
        except ShardcastError as error:
            level = logging.DEBUG if said else logging.WARNING
            log.log(level, "dataset %s… is not to be had (%s); still trying", client.digest[:16], error)
            said = True
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
        else:
            log.info("dataset %s… is here: %.1f MB", client.digest[:16], path.stat().st_size / 1e6)
            return path


@contextlib.asynccontextmanager
async def dataset_feed(
    spec: RunSpec,
    *,
    run_id: str,
    publisher_key: bytes,
    sources: Iterable[str],
    folder: Path,
    threads: int | None = None,
    may_connect: MayConnect = anywhere,
) -> AsyncIterator[DatasetFeed]:
    """Context manager around the clients of the datasets that `spec` names, which keep their files in `folder`."""
    sources = tuple(sources)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for dataset in spec.datasets:
            client = ContentClient(
                dataset.digest,
                size_bytes=dataset.bytes,
                run_id=run_id,
                publisher_key=publisher_key,
                sources=sources,
                folder=folder,
                threads=threads,
                may_connect=may_connect,
            )
            clients.append(await stack.enter_async_context(client))
        yield DatasetFeed(clients)
