"""A relay of a run: shardcast's relay, told by the coordinator whose policies to serve and from whom.

It trusts neither: the run's key comes from a descriptor that matches the run's id, and every byte served is
checked against that key's signature first. It announces itself while it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.coordinator_client import CoordinatorClient
from node.errors import ConfigError, CoordinatorFault
from node.exchange import checked_url, sound_urls
from node.protocol.messages import RelayAnnouncement
from shardcast import Relay

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 15.0
"""The coordinator forgets a relay after 60 s."""

FOR_EVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """One relay. Without `upstreams` it follows every relay that the coordinator knows."""

    coordinator: str
    run_id: str
    state: Path
    host: str
    port: int
    public_url: str | None = None
    upstreams: tuple[str, ...] = ()
    quota_bytes: int | None = None


async def run_relay(settings: RelaySettings, *, key: Ed25519PrivateKey, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; raises NodeError or ShardcastError for what waiting does not heal."""
    if settings.public_url is None and _is_wildcard(settings.host):
        raise ConfigError(
            f"Others cannot reach {settings.host}; say with --public-url where they find this relay.",
            code="no_public_url",
        )
    async with CoordinatorClient(settings.coordinator, run_id=settings.run_id, key=key) as client:
        serving = asyncio.create_task(_serve(settings, client))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _serve(settings: RelaySettings, client: CoordinatorClient) -> None:
    descriptor = await client.descriptor(patience_seconds=FOR_EVER)
    if client.run_key is None:
        raise RuntimeError("a verified descriptor leaves the run's key")
    relay = Relay(
        settings.upstreams,
        store_dir=settings.state / "shardcast",
        run_id=settings.run_id,
        publisher_key=client.run_key,
        keep=descriptor.spec.broadcast.keep_versions,
        quota_bytes=settings.quota_bytes,
    )
    port = await relay.start(settings.host, settings.port)
    try:
        url = checked_url(settings.public_url or _url_of(settings.host, port))
        log.info("relaying run %s… at %s", settings.run_id[:16], url)
        if not settings.upstreams:
            relay.set_upstreams(_others(sound_urls(descriptor.relays), url))
        while True:
            await _keep_in_touch(client, relay, url, follow_all=not settings.upstreams)
            await asyncio.sleep(ANNOUNCE_SECONDS)
    finally:
        await relay.stop()


async def _keep_in_touch(client: CoordinatorClient, relay: Relay, url: str, *, follow_all: bool) -> None:
    """Announce this relay, and learn of others; a relay goes on serving whatever the coordinator says."""
    try:
        await client.announce(RelayAnnouncement(url=url), patience_seconds=FOR_EVER)
        if follow_all:
            relay.set_upstreams(_others(await client.relays(patience_seconds=FOR_EVER), url))
    except CoordinatorFault as error:
        log.warning("this relay is not announced: %s", error)


def _others(urls: tuple[str, ...], own: str) -> list[str]:
    return [url for url in urls if url != own]


def _url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_wildcard(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return host == ""
