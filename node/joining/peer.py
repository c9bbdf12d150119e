"""The bootstrap peer: gossips the run's newest descriptor and peer records.

It holds no key of the run and is trusted for nothing. With a coordinator's URL it long-polls there for each new
descriptor; without one it is an ordinary peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.client.api import FOREVER, CoordinatorClient
from node.client.http import Backoff
from node.discovery.addresses import check_port
from node.discovery.descriptor import DescriptorStore, OfferResult
from node.errors import ConfigError, CoordinatorFault, NetworkDown
from node.joining.session import INSTALL, JoinSettings, endpoints_of
from node.protocol.endpoints import RUN
from node.protocol.peers import Invitation
from node.runtime.signals import Stopped, race
from shardcast.errors import PeerFault
from shardcast.files import FolderLock

if TYPE_CHECKING:
    from node.p2p import PeerNetwork

log = logging.getLogger(__name__)

WAIT_SECONDS = 25.0
PAUSE_SECONDS = 1.0
"""Pause before polling again a coordinator that does not long-poll."""

STATUS_SECONDS = 1.0
BACKOFF = Backoff(first_seconds=0.1, max_seconds=5.0)
MOST_NEIGHBOURS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDaemonSettings:
    """Settings of one bootstrap peer; `watch` gets its status each second."""

    join: JoinSettings
    state: Path
    watch: Callable[[dict[str, Any]], None] = lambda _status: None


async def run_peer(settings: PeerDaemonSettings, *, key: Ed25519PrivateKey, stop: asyncio.Event) -> None:
    """Run a bootstrap peer until `stop` is set; print the join string once it is reachable.

    Raises ConfigError, NetworkDown, and LocalFault if another process uses the folder.
    """
    try:
        from node.p2p import HostLimits, LinkLimits, PeerNetwork, PeerSettings, RelayLimits  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise ConfigError(INSTALL, code="no_libp2p") from error
    join = settings.join
    check_port(join.host, join.port)
    lock = FolderLock(settings.state)
    store = DescriptorStore(join.run_id, state=settings.state)
    chosen = PeerSettings(
        bootstrap=join.peers,
        state=settings.state / "peers",
        host=join.host,
        port=join.port,
        addresses=join.addresses,
        links=LinkLimits(most=MOST_NEIGHBOURS),
        limits=HostLimits(connections=2 * MOST_NEIGHBOURS),
        relay=RelayLimits(),
    )
    try:
        async with PeerNetwork(chosen, key=key, store=store) as network:
            with contextlib.suppress(Stopped):
                await _introduce(settings, network, store, stop)
    finally:
        lock.release()


async def _introduce(
    settings: PeerDaemonSettings, network: PeerNetwork, store: DescriptorStore, stop: asyncio.Event
) -> None:
    """Serve until `stop` is set; raises Stopped and NetworkDown."""
    try:
        addresses = await race(network.ready(), stop)
    except TimeoutError as error:
        raise NetworkDown("The peer-to-peer network does not start; --verbose says more.") from error
    print(Invitation(settings.join.run_id, addresses), flush=True)  # noqa: T201  (what this command is for)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_write_status(settings, store, network))]
        if settings.join.coordinators:
            tasks.append(group.create_task(_follow(settings.join, store)))
        await stop.wait()
        for task in tasks:
            task.cancel()


async def _follow(join: JoinSettings, store: DescriptorStore) -> None:
    """Long-poll a coordinator for each new descriptor."""
    failures = 0
    async with CoordinatorClient(join.coordinators, run_id=join.run_id) as client:
        while True:
            last, asked = store.last, time.monotonic()
            client.set_urls((*join.coordinators, *endpoints_of(store)))
            try:
                query = {} if last is None else {"after": str(last.descriptor.version), "wait": f"{WAIT_SECONDS:g}"}
                envelope = await client.fetch(RUN, query=query, wait_seconds=WAIT_SECONDS, patience_seconds=FOREVER)
                news, failures = store.offer(envelope, source=client.url), 0
            except (CoordinatorFault, PeerFault) as error:
                failures += 1
                log.warning("no descriptor from %s: %s", client.url, error)
                await asyncio.sleep(BACKOFF.delay(failures))
            else:
                if news is not OfferResult.NEWER and time.monotonic() - asked < PAUSE_SECONDS:
                    await asyncio.sleep(PAUSE_SECONDS)


async def _write_status(settings: PeerDaemonSettings, store: DescriptorStore, network: PeerNetwork) -> None:
    path = settings.state / "status.json"
    await asyncio.to_thread(settings.state.mkdir, parents=True, exist_ok=True)
    while True:
        last = store.last
        status: dict[str, Any] = {"run_id": store.run_id, "network": network.status()}
        status["descriptor_version"] = -1 if last is None else last.descriptor.version
        settings.watch(status)
        temporary = path.with_suffix(".json.tmp")
        with contextlib.suppress(OSError):  # for observers only
            temporary.write_bytes(msgspec.json.encode(status))
            temporary.rename(path)
        await asyncio.sleep(STATUS_SECONDS)


async def until_parent_ends(stop: asyncio.Event) -> None:
    """Set `stop` when standard input closes: the parent process has ended."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    descriptor = sys.stdin.fileno()

    def read() -> None:
        if not os.read(descriptor, 4096):
            gone.set()

    loop.add_reader(descriptor, read)
    with contextlib.suppress(Stopped):
        await race(gone.wait(), stop)
    loop.remove_reader(descriptor)
    stop.set()
