"""A node's session with its run: join by a coordinator's URL, or by a peer and the run id, and follow the descriptor.

The first answer brings the signed descriptor, which names the coordinators. From then on newer ones come from peers or
from polling a coordinator, whichever is first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.client.api import DEFAULT_BACKOFF, FOREVER, CoordinatorClient
from node.client.endpoints import MAX_ENDPOINTS
from node.client.http import Backoff, valid_urls
from node.discovery.addresses import check_port
from node.discovery.descriptor import DescriptorStore, OfferResult, VerifiedDescriptor
from node.errors import ConfigError, CoordinatorFault, StateError, Unavailable
from node.protocol.peers import Address
from node.protocol.run import Descriptor
from node.runtime.extras import install_hint
from node.runtime.signals import Stopped, race
from shardcast.errors import PeerFault

if TYPE_CHECKING:
    from node.p2p import PeerNetwork

log = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 15.0
"""Less than a coordinator's long-poll limit."""

WAITING: Final = 4
SAY_SECONDS: Final = 10.0
"""Waiting time after which the reason is logged; doubled each time."""

NO_LIBP2P: Final = (
    f"libp2p, which is not installed: {install_hint('p2p')} (on Debian first: apt install gcc libgmp-dev python3-dev)"
)
INSTALL: Final = f"Joining by peers needs {NO_LIBP2P}, or give --coordinator URL with --run-id ID."


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """How to join a run: by coordinators' URLs, bootstrap peers, or both.

    `host` and `port` are where it listens for peers, `addresses` where they reach it.
    """

    run_id: str
    coordinators: tuple[str, ...] = ()
    peers: tuple[Address, ...] = ()
    host: str = "0.0.0.0"  # noqa: S104  (peers are meant to find it; nothing they send is believed)
    port: int = 0
    addresses: tuple[Address, ...] = ()


@dataclass(slots=True)
class RunSession:
    """A joined run: a client of its coordinators, and the newest descriptor.

    `network` is None if it joined by a coordinator's URL alone.
    """

    join: JoinSettings
    store: DescriptorStore
    client: CoordinatorClient
    verified: VerifiedDescriptor
    network: PeerNetwork | None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def descriptor(self) -> Descriptor:
        """The newest descriptor seen."""
        verified = self.store.last
        return (self.verified if verified is None else verified).descriptor

    @property
    def run_key(self) -> bytes:
        """The run's public key (32 bytes)."""
        return self.verified.run_key

    async def follow(self) -> None:
        """Keep the descriptor and the coordinators' URLs current; never returns. Raises StateError for changed rules.

        Gossip spreads a new descriptor within milliseconds once one node has it. So a few nodes, redrawn all the time,
        long-poll a coordinator, and the others poll only after a silence.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_endpoints())
            group.create_task(self._ask_and_wait())

    async def _follow_endpoints(self) -> None:
        while True:
            self.changed.clear()
            self.client.set_urls(dict.fromkeys((*self.join.coordinators, *valid_urls(self.descriptor.endpoints))))
            await self.changed.wait()

    async def _ask_and_wait(self) -> None:
        missed = False
        while True:
            ends = time.monotonic() + REFRESH_SECONDS * random.uniform(0.5, 1.0)
            if missed or self._is_drawn():
                missed = False
                await self._wait_at_coordinator(ends)
                continue
            known = self.descriptor.version
            await asyncio.sleep(ends - time.monotonic())
            if self.descriptor.version == known:
                # Gossip missed this one, so it may not reach others either: long-poll next.
                missed = await self._look(known) and self.network is not None

    def _is_drawn(self) -> bool:
        """Draw whether to long-poll next: about `WAITING` nodes of each neighbourhood do."""
        neighbours = 0 if self.network is None else len(self.network.status()["neighbours"])
        return self.network is not None and random.random() * (1 + neighbours) < WAITING

    async def _wait_at_coordinator(self, ends: float) -> None:
        while (left := ends - time.monotonic()) > 0:
            if not await self._look(self.descriptor.version, wait_seconds=left):
                # The time is over, no coordinator answers, or enough others long-poll already.
                await asyncio.sleep(ends - time.monotonic())

    async def _look(self, known: int, *, wait_seconds: float = 0.0) -> bool:
        """Poll for a version newer than `known`, store it, and return whether there was one."""
        # The client logs its faults. PeerFault: the descriptor may expire between two reads of the clock.
        with contextlib.suppress(CoordinatorFault, PeerFault):
            found = await self.client.descriptor(
                after=known, wait_seconds=wait_seconds, patience_seconds=REFRESH_SECONDS
            )
            offer(self.store, self.client)
            return found.version > known
        return False

    def status(self) -> dict[str, Any]:
        """Return what is known of the run, ready for JSON."""
        descriptor = self.descriptor
        return {
            "descriptor_version": descriptor.version,
            "head_version": -1 if descriptor.head is None else descriptor.head.version,
            "endpoints": list(self.client.urls),
            "network": None if self.network is None else self.network.status(),
        }


@contextlib.asynccontextmanager
async def join_run(
    join: JoinSettings, *, key: Ed25519PrivateKey, state: Path, backoff: Backoff = DEFAULT_BACKOFF
) -> AsyncIterator[RunSession]:
    """Join the run, retrying until it succeeds; raises ConfigError and StateError.

    Without peers, also BadReply from a coordinator of another run.
    """
    store = DescriptorStore(join.run_id, state=state)
    async with contextlib.AsyncExitStack() as stack:
        network = await _network(stack, join, key=key, state=state, store=store)
        changed = asyncio.Event()
        _wake_on_news(store, changed)
        client = await _client(stack, join, key=key, store=store, changed=changed, backoff=backoff, network=network)
        verified = store.last
        if verified is None:
            raise RuntimeError("a client without a descriptor")
        client.run_key = verified.run_key
        yield RunSession(join, store, client, verified, network, changed)


def offer(store: DescriptorStore, client: CoordinatorClient) -> None:
    """Store the descriptor that `client` has just verified; raises StateError for changed rules."""
    if client.descriptor_envelope is None:
        return
    if store.offer(client.descriptor_envelope, source=client.url) is OfferResult.OTHER_RULES:
        raise StateError(
            "The run's rules are not those that this node joined under, and a run cannot change its rules: ask the "
            "operator. Only if you agree to the new rules, start with another --state.",
            code="spec_changed",
        )


async def _network(
    stack: contextlib.AsyncExitStack, join: JoinSettings, *, key: Ed25519PrivateKey, state: Path, store: DescriptorStore
) -> PeerNetwork | None:
    if not join.peers:
        return None
    try:
        from node.p2p import PeerNetwork, PeerSettings  # noqa: PLC0415  (an optional dependency, and 80 MB)
    except ImportError as error:
        raise ConfigError(INSTALL, code="no_libp2p") from error
    check_port(join.host, join.port)
    settings = PeerSettings(
        bootstrap=join.peers, state=state / "peers", host=join.host, port=join.port, addresses=join.addresses
    )
    return await stack.enter_async_context(PeerNetwork(settings, key=key, store=store))


def _wake_on_news(store: DescriptorStore, changed: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def wake(_posted: VerifiedDescriptor) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(changed.set)

    store.listen(wake)


async def _client(
    stack: contextlib.AsyncExitStack,
    join: JoinSettings,
    *,
    key: Ed25519PrivateKey,
    store: DescriptorStore,
    changed: asyncio.Event,
    backoff: Backoff,
    network: PeerNetwork | None,
) -> CoordinatorClient:
    """Return a client with endpoints: from the command line, or from the first descriptor that arrives."""

    def client_of(urls: tuple[str, ...]) -> CoordinatorClient:
        return CoordinatorClient(urls, run_id=join.run_id, key=key, backoff=backoff)

    if join.coordinators and network is None:
        client = await stack.enter_async_context(client_of(join.coordinators))
        await client.descriptor(patience_seconds=FOREVER)
        offer(store, client)
        return client
    began, say_after, failures = time.monotonic(), SAY_SECONDS, 0
    while True:
        changed.clear()
        if store.newest is None and (urls := _known_urls(join, store)):
            # A coordinator of the command line, or of an expired descriptor.
            async with client_of(urls) as client:
                with contextlib.suppress(Stopped):
                    await race(_ask(store, client), changed)
        # Read again: the descriptor that ended the race may name other coordinators.
        if store.newest is not None and (urls := _known_urls(join, store)):
            return await stack.enter_async_context(client_of(urls))
        failures += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff.delay(failures)):
                await changed.wait()
        waited = time.monotonic() - began
        if waited >= say_after:
            say_after *= 2
            log.info("not in the run yet, after %.0f s: %s", waited, _why(store, network))


def _known_urls(join: JoinSettings, store: DescriptorStore) -> tuple[str, ...]:
    """List the coordinators of the command line and of the newest descriptor, as many as a client takes."""
    return tuple(dict.fromkeys((*join.coordinators, *endpoints_of(store))))[:MAX_ENDPOINTS]


async def _ask(store: DescriptorStore, client: CoordinatorClient) -> None:
    """Fetch a descriptor once, logging faults; raises StateError."""
    try:
        await client.descriptor(patience_seconds=0)
        offer(store, client)
    except Unavailable:
        return
    except (CoordinatorFault, PeerFault) as error:
        # Another server may be at that address now; peers may still answer.
        log.warning("%s", error)


def endpoints_of(store: DescriptorStore) -> tuple[str, ...]:
    """Return the valid coordinator URLs of the newest descriptor, even if expired."""
    return () if store.last is None else valid_urls(store.last.descriptor.endpoints)


def _why(store: DescriptorStore, network: PeerNetwork | None) -> str:
    status = {} if network is None else network.status()
    if store.newest is not None:
        return "the run's descriptor names no coordinator; its operator has to give --endpoint"
    if not status.get("up", True):
        return "the peer-to-peer network does not start"
    if not status.get("neighbours"):
        return "no peer answers"
    return f"none of {len(status['neighbours'])} peers that answer has the run's descriptor; ask for a newer address"
