"""The worker's datasets: fetched before its first lease, from where its policies come."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from node.client.ssrf import not_nearer
from node.datasets.fetching import DatasetFeed, dataset_feed
from node.datasets.folder import DATASETS
from node.errors import CoordinatorFault
from node.joining.session import RunSession
from node.relay.advice import sources_of
from shardcast.urls import valid_sources


def worker_datasets(
    session: RunSession, *, state: Path, threads: int | None
) -> contextlib.AbstractAsyncContextManager[DatasetFeed]:
    """Return the clients of the run's datasets, a context manager; files are kept in `state`."""
    return dataset_feed(
        session.descriptor.spec,
        run_id=session.join.run_id,
        publisher_key=session.run_key,
        sources=valid_sources(session.descriptor.relays),
        folder=state / DATASETS,
        threads=threads,
        may_connect=not_nearer(lambda: session.client.reach),
    )


async def fetch_datasets(feed: DatasetFeed, session: RunSession) -> Mapping[str, Path]:
    """Fetch the run's datasets as policies: from announced relays, and the operator's where those come to nothing."""
    if session.descriptor.spec.datasets:
        with contextlib.suppress(CoordinatorFault):
            urls, stripes = sources_of(await session.client.relays())
            feed.set_sources(urls, stripes=stripes, last_resort=valid_sources(session.descriptor.relays))
    return await feed.fetch()
