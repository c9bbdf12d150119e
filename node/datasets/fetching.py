"""Fetch a run's datasets by SHARDCAST before they are needed, and offer them to others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path

from node.datasets.folder import dataset_name
from node.protocol.run import FileSpec, RunSpec
from node.runtime.signals import root_failure
from shardcast import ContentClient, ServedState
from shardcast.errors import LocalFault, ShardcastError, TooSlow
from shardcast.fetch.raw_http import MayConnect, anywhere

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 10.0
MAX_COSTLY_PAUSE_SECONDS = 300.0
"""Between attempts of which each may download the whole file, or that wait for a person (a full disk)."""

MAX_AT_ONCE = 4
"""Datasets that are fetched side by side."""


class DatasetFeed:
    """Clients of all datasets of one run, bound to one event loop; make it with `dataset_feed`."""

    def __init__(self, clients: Mapping[str, ContentClient]) -> None:
        """`clients` by what the log calls each dataset."""
        self._clients = clients

    def offer(self) -> dict[str, ServedState]:
        """Return what is served of each dataset while it arrives, for the `contents` of a server."""
        return {client.digest: client.offer() for client in self._clients.values()}

    def set_sources(
        self, urls: Sequence[str], *, stripes: Sequence[Sequence[str]] = (), last_resort: Sequence[str] = ()
    ) -> None:
        """Replace the sources of every dataset, as those of policies are."""
        for client in self._clients.values():
            client.set_sources(urls, stripes=stripes, last_resort=last_resort)

    async def fetch(self, *, timeout_s: float | None = None, outlast_local_faults: bool = False) -> Mapping[str, Path]:
        """Return the verified file of each dataset by its digest, once all are here; none waits for another.

        Retries while no source has it, or all of them lie; with `outlast_local_faults` also while this machine cannot
        keep it, and otherwise raises LocalFault. Raises TooSlow after `timeout_s`.
        """
        at_once = asyncio.Semaphore(MAX_AT_ONCE)
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                tasks = {
                    client.digest: group.create_task(
                        _fetch(name, client, at_once=at_once, outlast_local_faults=outlast_local_faults)
                    )
                    for name, client in self._clients.items()
                }
        except TimeoutError as error:
            raise TooSlow(f"no source sent the run's datasets within {timeout_s} s") from error
        except BaseExceptionGroup as failures:
            raise root_failure(failures) from failures
        return {digest: task.result() for digest, task in tasks.items()}


def pause_after(error: ShardcastError, *, last_s: float) -> float:
    """Return how many seconds to wait after `error`: twice the last pause (0 at first), within what suits its kind."""
    if isinstance(error, LocalFault) or error.code == "wrong_content":
        return min(max(2 * last_s, MAX_PAUSE_SECONDS), MAX_COSTLY_PAUSE_SECONDS)
    return min(max(2 * last_s, FIRST_PAUSE_SECONDS), MAX_PAUSE_SECONDS)


async def _fetch(name: str, client: ContentClient, *, at_once: asyncio.Semaphore, outlast_local_faults: bool) -> Path:
    pause, said = 0.0, set[str]()
    while True:
        try:
            async with at_once:
                path = await client.fetch()
        except ShardcastError as error:
            is_local = isinstance(error, LocalFault)
            if is_local and not outlast_local_faults:
                raise
            level = logging.DEBUG if error.code in said else logging.WARNING
            what = "cannot be kept" if is_local else "is not to be had"
            log.log(level, "%s %s (%s); waiting for it, and still trying", name, what, error)
            said.add(error.code)
            pause = pause_after(error, last_s=pause)
            await asyncio.sleep(pause)
        else:
            log.info("%s is here: %.1f MB", name, client.size_bytes / 1e6)
            return path


@contextlib.asynccontextmanager
async def dataset_feed(
    spec: RunSpec,
    *,
    run_id: str,
    publisher_key: bytes,
    sources: Iterable[str],
    folder: Path,
    files: Iterable[FileSpec],
    threads: int | None = None,
    may_connect: MayConnect = anywhere,
) -> AsyncIterator[DatasetFeed]:
    """Context manager around the clients of `files` of the run of `spec`, which are kept in `folder`."""
    sources = tuple(sources)
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, ContentClient] = {}
        for dataset in files:
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
            name = f"{dataset_name(spec, dataset.digest)} ({dataset.digest[:16]}…)"
            clients[name] = await stack.enter_async_context(client)
        yield DatasetFeed(clients)
