"""How a node comes to its run and stays in touch: by a coordinator's URL, or by a peer and the run's id alone.

Whoever answers first tells the run's descriptor, which the run's key has signed; it names the coordinators. From then
on the node hears of newer ones from its peers and asks a coordinator now and then, whichever is first.
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

from node.client.api import DEFAULT_BACKOFF, CoordinatorClient
from node.client.endpoints import MAX_ENDPOINTS
from node.client.http import Backoff, sound_urls
from node.discovery.addresses import check_port
from node.discovery.descriptor import Board, News, Posted
from node.errors import ConfigError, CoordinatorFault, StateError, Unavailable
from node.protocol.peers import Address
from node.protocol.run import Descriptor
from node.runtime.signals import Stopped, race
from shardcast.errors import PeerFault

if TYPE_CHECKING:
    from node.p2p import PeerNetwork

log = logging.getLogger(__name__)

FOR_EVER: Final = float("inf")
REFRESH_SECONDS: Final = 15.0
"""Less than a coordinator lets anybody wait."""

WAITING: Final = 4
SAY_SECONDS: Final = 10.0
"""After which a node that is not in yet says why; then after twice that, and so on."""

NO_LIBP2P: Final = (
    "libp2p, which is not installed: pip install 'swarmproof[p2p]' (on Debian first: apt install gcc libgmp-dev "
    "python3-dev)"
)
INSTALL: Final = f"Joining by peers needs {NO_LIBP2P}, or give --coordinator URL with --run-id ID."


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a node was told: coordinators' URLs, or peers to begin with, or both.

    `host`, `port` and `addresses` are where it listens for peers, and where they reach it.
    """

    run_id: str
    coordinators: tuple[str, ...] = ()
    peers: tuple[Address, ...] = ()
    host: str = "0.0.0.0"  # noqa: S104  (peers are meant to find it; nothing they send is believed)
    port: int = 0
    addresses: tuple[Address, ...] = ()


@dataclass(slots=True)
class Entrance:
    """A node that has found its run: a client of its coordinators, and the newest descriptor.

    `network` is None where it came by a coordinator's URL alone.
    """

    entry: Entry
    board: Board
    client: CoordinatorClient
    posted: Posted
    network: PeerNetwork | None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def descriptor(self) -> Descriptor:
        """Return the newest descriptor that was seen."""
        posted = self.board.last
        return (self.posted if posted is None else posted).descriptor

    @property
    def run_key(self) -> bytes:
        """Return the run's public key (32 bytes)."""
        return self.posted.run_key

    async def follow(self) -> None:
        """Keep the descriptor and the list of coordinators current; never ends. Raises StateError for other rules.

        Peers bring what is new within milliseconds once one of them has it from a coordinator. So that this hangs on
        nobody, a few nodes wait there, drawn anew all the time, and the others ask when they have heard nothing.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_endpoints())
            group.create_task(self._ask_and_wait())

    async def _follow_endpoints(self) -> None:
        while True:
            self.changed.clear()
            self.client.set_urls(dict.fromkeys((*self.entry.coordinators, *sound_urls(self.descriptor.endpoints))))
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
                # What no peer brought here may not reach others either: then this node is one who waits.
                missed = await self._look(known) and self.network is not None

    def _is_drawn(self) -> bool:
        """Return whether to long-poll a coordinator for a while: about `WAITING` nodes of each neighbourhood do."""
        neighbours = 0 if self.network is None else len(self.network.status()["neighbours"])
        return self.network is not None and random.random() * (1 + neighbours) < WAITING

    async def _wait_at_coordinator(self, ends: float) -> None:
        while (left := ends - time.monotonic()) > 0:
            if not await self._look(self.descriptor.version, wait_seconds=left):
                # The time is over, nobody answers, or enough others wait there already.
                await asyncio.sleep(ends - time.monotonic())

    async def _look(self, known: int, *, wait_seconds: float = 0.0) -> bool:
        """Poll for a version newer than `known`, give it to the board, and return whether there was one."""
        # The client says what it is; peers may know more. PeerFault: it expires between two looks at the clock.
        with contextlib.suppress(CoordinatorFault, PeerFault):
            found = await self.client.descriptor(
                after=known, wait_seconds=wait_seconds, patience_seconds=REFRESH_SECONDS
            )
            offer(self.board, self.client)
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
async def entered(
    entry: Entry, *, key: Ed25519PrivateKey, state: Path, backoff: Backoff = DEFAULT_BACKOFF
) -> AsyncIterator[Entrance]:
    """Find the run, for as long as it takes; raises ConfigError and StateError.

    Without peers, also BadReply from a coordinator of another run.
    """
    board = Board(entry.run_id, state=state)
    async with contextlib.AsyncExitStack() as stack:
        network = await _network(stack, entry, key=key, state=state, board=board)
        changed = asyncio.Event()
        _wake_on_news(board, changed)
        client = await _client(stack, entry, key=key, board=board, changed=changed, backoff=backoff, network=network)
        posted = board.last
        if posted is None:
            raise RuntimeError("whoever has a client has a descriptor")
        client.run_key = posted.run_key
        yield Entrance(entry, board, client, posted, network, changed)


def offer(board: Board, client: CoordinatorClient) -> None:
    """Show the board what a coordinator has just sent, and the client has checked; raises StateError."""
    if client.descriptor_envelope is None:
        return
    if board.offer(client.descriptor_envelope, source=client.url) is News.OTHER_RULES:
        raise StateError(
            "The run's rules are not those that this node joined under, and a run cannot change its rules: ask the "
            "operator. Only if you agree to the new rules, start with another --state.",
            code="spec_changed",
        )


async def _network(
    stack: contextlib.AsyncExitStack, entry: Entry, *, key: Ed25519PrivateKey, state: Path, board: Board
) -> PeerNetwork | None:
    if not entry.peers:
        return None
    try:
        from node.p2p import PeerNetwork, PeerSettings  # noqa: PLC0415  (an optional dependency, and 80 MB)
    except ImportError as error:
        raise ConfigError(INSTALL, code="no_libp2p") from error
    check_port(entry.host, entry.port)
    settings = PeerSettings(
        bootstrap=entry.peers, state=state / "peers", host=entry.host, port=entry.port, addresses=entry.addresses
    )
    return await stack.enter_async_context(PeerNetwork(settings, key=key, board=board))


def _wake_on_news(board: Board, changed: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def wake(_posted: Posted) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(changed.set)

    board.listen(wake)


async def _client(
    stack: contextlib.AsyncExitStack,
    entry: Entry,
    *,
    key: Ed25519PrivateKey,
    board: Board,
    changed: asyncio.Event,
    backoff: Backoff,
    network: PeerNetwork | None,
) -> CoordinatorClient:
    """Return a client with endpoints: from the command line, or from the first descriptor that arrives."""

    def client_of(urls: tuple[str, ...]) -> CoordinatorClient:
        return CoordinatorClient(urls, run_id=entry.run_id, key=key, backoff=backoff)

    if entry.coordinators and network is None:
        client = await stack.enter_async_context(client_of(entry.coordinators))
        await client.descriptor(patience_seconds=FOR_EVER)
        offer(board, client)
        return client
    began, say_after, failures = time.monotonic(), SAY_SECONDS, 0
    while True:
        changed.clear()
        if board.newest is None and (urls := _known_urls(entry, board)):
            # A coordinator of the command line, or of a descriptor that has expired meanwhile.
            async with client_of(urls) as client:
                with contextlib.suppress(Stopped):
                    await race(_ask(board, client), changed)
        # Read again: the descriptor that ended the race names coordinators of its own.
        if board.newest is not None and (urls := _known_urls(entry, board)):
            return await stack.enter_async_context(client_of(urls))
        failures += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff.delay(failures)):
                await changed.wait()
        waited = time.monotonic() - began
        if waited >= say_after:
            say_after *= 2
            log.info("not in the run yet, after %.0f s: %s", waited, _why(board, network))


def _known_urls(entry: Entry, board: Board) -> tuple[str, ...]:
    """List the coordinators of the command line and of the newest descriptor, as many as a client takes."""
    return tuple(dict.fromkeys((*entry.coordinators, *endpoints_of(board))))[:MAX_ENDPOINTS]


async def _ask(board: Board, client: CoordinatorClient) -> None:
    """Poll these coordinators for a descriptor newer than the peers'; raises StateError."""
    try:
        await client.descriptor(patience_seconds=0)
        offer(board, client)
    except Unavailable:
        return
    except (CoordinatorFault, PeerFault) as error:
        # Whoever is there now: that is no reason to give up while peers may answer.
        log.warning("%s", error)


def endpoints_of(board: Board) -> tuple[str, ...]:
    """Return the coordinators of the newest descriptor, even if expired, that the SSRF guard lets through."""
    return () if board.last is None else sound_urls(board.last.descriptor.endpoints)


def _why(board: Board, network: PeerNetwork | None) -> str:
    status = {} if network is None else network.status()
    if board.newest is not None:
        return "the run's descriptor names no coordinator; its operator has to give --endpoint"
    if not status.get("up", True):
        return "the peer-to-peer network does not start"
    if not status.get("neighbours"):
        return "no peer answers"
    return f"none of {len(status['neighbours'])} peers that answer has the run's descriptor; ask for a newer address"
