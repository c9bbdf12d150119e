"""The worker's datasets: fetched before its first lease, from where its policies come, and again once one changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from node.client.api import FOREVER
from node.client.ssrf import not_nearer
from node.datasets.fetching import DatasetFeed, dataset_feed
from node.datasets.folder import DATASETS
from node.errors import BadReply, Refused
from node.joining.session import RunSession
from node.protocol.messages import RelayList
from node.relay.advice import sources_of
from node.runtime.signals import root_failure
from node.worker.complaints import WarnOnce
from node.worker.environments import missing_locks
from node.worker.leases import REFUSED_PAUSE_SECONDS
from shardcast.urls import valid_sources


def worker_datasets(
    session: RunSession, *, state: Path, threads: int | None
) -> contextlib.AbstractAsyncContextManager[DatasetFeed]:
    """Return the clients of the run's datasets, and of the locks of environments that are not installed here, a context
    manager; files are kept in `state`.
    """
    spec = session.descriptor.spec
    return dataset_feed(
        spec,
        run_id=session.join.run_id,
        publisher_key=session.run_key,
        sources=valid_sources(session.descriptor.relays),
        folder=state / DATASETS,
        files=(*spec.datasets, *missing_locks(spec)),
        threads=threads,
        may_connect=not_nearer(lambda: session.client.reach),
    )


async def fetch_datasets(feed: DatasetFeed, session: RunSession) -> Mapping[str, Path]:
    """Fetch the run's datasets as policies: from announced relays, and the operator's where those come to nothing.

    Asks who those are for as long as a dataset is missing. Raises LocalFault, and StateError for changed rules.
    """
    return await _fetch(feed, session, session.follow()) if session.descriptor.spec.files else {}


async def fetch_changed(feed: DatasetFeed, session: RunSession) -> Mapping[str, Path]:
    """Verify every dataset once more and fetch those that were changed, while others follow the session.

    Raises LocalFault.
    """
    return await _fetch(feed, session)


async def _fetch(feed: DatasetFeed, session: RunSession, *beside: Coroutine[Any, Any, None]) -> Mapping[str, Path]:
    try:
        async with asyncio.TaskGroup() as group:
            following = [group.create_task(work) for work in (_follow_relays(feed, session), *beside)]
            files = await feed.fetch()
            for task in following:
                task.cancel()
    except BaseExceptionGroup as failures:
        raise root_failure(failures) from failures
    return files


async def _follow_relays(feed: DatasetFeed, session: RunSession) -> None:
    """Keep the sources of `feed` current; never returns. Waits for a coordinator that is away."""
    warn_once, used = WarnOnce(), None
    while True:
        try:
            advice = await session.client.relays(patience_seconds=FOREVER)
        except (Refused, BadReply) as error:
            warn_once.note("no list of relays", error)
        else:
            operators = valid_sources(session.descriptor.relays)
            if (advice, operators) != used:
                urls, stripes = sources_of(advice if advice.relays else RelayList(relays=operators))
                feed.set_sources(urls, stripes=stripes, last_resort=operators)
                used = advice, operators
        await asyncio.sleep(REFUSED_PAUSE_SECONDS)
