"""The relay daemon: shardcast's relay, with its upstreams planned by the coordinator.

It trusts neither upstreams nor coordinator: the run's key follows from the run id, and every byte is verified against
its signature before it is served. It announces itself while it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.client.ssrf import not_nearer
from node.datasets.fetching import DatasetFeed, dataset_feed
from node.datasets.folder import DATASETS
from node.errors import ConfigError, CoordinatorFault
from node.joining.session import JoinSettings, RunSession, join_run
from node.protocol.run import RunSpec
from node.relay.advice import ANNOUNCE_SECONDS, Announcer, announcement, serving_url, source_url, sources_of
from node.runtime.service_manager import report_serving
from node.runtime.signals import root_failure
from shardcast import Relay, ServerLimits, Watch, no_watch
from shardcast.fetch.raw_http import anywhere
from shardcast.store.versions import KEPT_DELTAS
from shardcast.urls import valid_sources

log = logging.getLogger(__name__)

WHOLE_VERSIONS = 2
"""Newcomers ask for the newest, and the base of the newest folded delta outlives it; all others ask for deltas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Settings of one relay; without `upstreams` it follows the coordinator's plan."""

    join: JoinSettings
    state: Path
    host: str
    port: int
    public_url: str | None = None
    upstreams: tuple[str, ...] = ()
    quota_bytes: int | None = None
    threads: int | None = None
    server_limits: ServerLimits = field(default_factory=ServerLimits)


async def run_relay(
    settings: RelaySettings, *, key: Ed25519PrivateKey, stop: asyncio.Event, watch: Watch = no_watch
) -> None:
    """Serve until `stop` is set; raises NodeError or ShardcastError for permanent failures.

    `watch` observes each fetch.
    """
    if settings.public_url is None:
        serving_url(settings.host, settings.port)
    serving = asyncio.create_task(_join(settings, key, watch))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _join(settings: RelaySettings, key: Ed25519PrivateKey, watch: Watch) -> None:
    async with join_run(settings.join, key=key, state=settings.state) as session:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(session.follow())
                group.create_task(_serve(settings, session, watch))
        except BaseExceptionGroup as failures:
            raise root_failure(failures) from failures


async def _serve(settings: RelaySettings, session: RunSession, watch: Watch) -> None:
    descriptor, client = session.descriptor, session.client
    quota_bytes = _policies_quota(settings.quota_bytes, descriptor.spec)
    may_connect = anywhere if settings.upstreams else not_nearer(lambda: client.reach)
    relay = Relay(
        settings.upstreams,
        store_dir=settings.state / "shardcast",
        run_id=settings.join.run_id,
        publisher_key=session.run_key,
        keep=WHOLE_VERSIONS,
        keep_deltas=max(KEPT_DELTAS, descriptor.spec.broadcast.keep_versions),
        threads=settings.threads,
        quota_bytes=quota_bytes,
        server_limits=settings.server_limits,
        watch=watch,
        may_connect=may_connect,
    )
    async with dataset_feed(
        descriptor.spec,
        run_id=settings.join.run_id,
        publisher_key=session.run_key,
        sources=settings.upstreams,
        folder=settings.state / DATASETS,
        files=descriptor.spec.files,
        threads=settings.threads,
        may_connect=may_connect,
    ) as datasets:
        await _follow(settings, session, relay, datasets)


def _policies_quota(quota_bytes: int | None, spec: RunSpec) -> int | None:
    """Return what the run's datasets leave of `quota_bytes` for its policies; raises ConfigError for nothing."""
    datasets_bytes = sum(dataset.bytes for dataset in spec.files)
    if quota_bytes is None:
        return None
    if datasets_bytes < quota_bytes:
        left = quota_bytes - datasets_bytes
        log.info("quota: %.3g GB, of which %.3g are for policies, after the datasets", quota_bytes / 1e9, left / 1e9)
        return left
    raise ConfigError(
        f"The run's datasets take {datasets_bytes / 1e9:.3g} GB, and the quota for them and the policies is "
        f"{quota_bytes / 1e9:.3g} GB: raise --quota-gb.",
        code="quota",
    )


async def _follow(settings: RelaySettings, session: RunSession, relay: Relay, datasets: DatasetFeed) -> None:
    """Serve, announced, until cancelled."""
    descriptor, client = session.descriptor, session.client
    port = await relay.start(settings.host, settings.port, contents=datasets.offer())
    try:
        url = source_url(settings.public_url or serving_url(settings.host, port))
        log.info("relaying run %s… at %s", settings.join.run_id[:16], url)
        operators = [known for known in valid_sources(descriptor.relays) if known != url]
        if not settings.upstreams:
            relay.set_upstreams(operators)
            datasets.set_sources(operators)
        announcer = Announcer(client)
        async with asyncio.TaskGroup() as group:
            group.create_task(report_serving())
            group.create_task(datasets.fetch(outlast_local_faults=True))
            while True:
                await _keep_in_touch(announcer, relay, datasets, url, None if settings.upstreams else operators)
                await asyncio.sleep(max(ANNOUNCE_SECONDS, announcer.pause_seconds))
    finally:
        await relay.stop()


async def _keep_in_touch(
    announcer: Announcer, relay: Relay, datasets: DatasetFeed, url: str, operators: Sequence[str] | None
) -> None:
    """Announce this relay and, unless `operators` is None, update its upstreams, with those for a last resort.

    Failures are logged.
    """
    try:
        said = announcement(url, relay.upstreams(), version=await asyncio.to_thread(relay.newest_whole))
        advice = await announcer.announce(said)
    except CoordinatorFault as error:
        log.warning("this relay is not announced: %s", error)
        return
    if operators is not None:
        urls, stripes = sources_of(advice, own=url)
        relay.set_upstreams(urls, stripes=stripes, last_resort=operators)
        datasets.set_sources(urls, stripes=stripes, last_resort=operators)
