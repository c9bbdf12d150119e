"""Outbound dialling: keep enough neighbours, and report when no peer can be reached."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.abc import IHost
from libp2p.custom_types import TProtocol

from node.discovery.descriptor import DescriptorStore
from node.discovery.peer_book import PeerBook, network_of
from node.p2p.host import HostLimits, PeerUnreachable, connect, peer_of
from node.p2p.links import PROTOCOL, Links, PeerLink
from node.p2p.thread import describe
from node.p2p.transport import TrioTokenBucket
from node.protocol.peers import Address, parse_address
from shardcast.errors import Malformed

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.5
MAX_CONCURRENT_DIALS: Final = 4
BACKOFF_SECONDS: Final = (1.0, 15.0)
WARN_SECONDS: Final = 60.0
STEADY_SECONDS: Final = 30.0
"""A link that ends sooner counts as a failed dial."""

DIALS_PER_SECOND: Final = 1.0
BURST_DIALS: Final = 16
"""Limit on dials to addresses named by strangers: nobody can use this node to scan others."""

MAX_FAILED: Final = 1024


@dataclass(frozen=True, slots=True)
class _DialFailure:
    """Consecutive failures of an address, when to retry (monotonic seconds), and the last reason."""

    count: int
    not_before: float
    why: str


class Dialer:
    """Dials peers until this node has the neighbours it wants, and again when they disconnect."""

    def __init__(
        self,
        host: IHost,
        links: Links,
        book: PeerBook,
        store: DescriptorStore,
        *,
        bootstrap: Sequence[Address],
        wanted: int,
        limits: HostLimits,
    ) -> None:
        self._host, self._links, self._book, self._store = host, links, book, store
        self._bootstrap, self._wanted, self._limits = tuple(bootstrap), wanted, limits
        self._dialing: set[bytes] = set()
        self._failures: dict[Address, _DialFailure] = {}
        self._gossiped_dials = TrioTokenBucket(rate=DIALS_PER_SECOND, burst=BURST_DIALS)
        self._warned_at: float | None = None
        self._is_alone = True

    async def run(self) -> None:
        """Dial forever; never returns."""
        async with trio.open_nursery() as nursery:
            while True:
                changed = self._links.changed
                for address in self._addresses_to_dial():
                    self._dialing.add(address.node)
                    self._book.calling(address.node, seconds=self._limits.dial_seconds)
                    nursery.start_soon(self._dial, address)
                with trio.move_on_after(POLL_SECONDS):
                    await changed.wait()

    def _addresses_to_dial(self) -> list[Address]:
        """Choose the addresses to dial now: peers from the book, then seeds if those are not enough."""
        missing = self._dials_to_start()
        if missing <= 0:
            return []
        now = time.monotonic()
        waiting = {address for address, failed in self._failures.items() if failed.not_before > now}
        busy_nodes = self._links.nodes | self._dialing | {address.node for address in waiting}
        peers = self._book.to_call(missing, without=busy_nodes, networks=self._links.networks)
        chosen = [peer.addresses[0] for peer in peers if self._gossiped_dials.try_acquire()]
        for address in self.seeds():
            is_busy = address.node in busy_nodes or any(address.node == other.node for other in chosen)
            if len(chosen) < missing and not is_busy and not self._links.is_unwanted(address.node):
                chosen.append(address)
        return chosen

    def _dials_to_start(self) -> int:
        """Return how many outbound dials to start. Half of the slots are outbound-only, against eclipse attacks."""
        outbound = len(self._links.networks)
        wanted = max(self._wanted - len(self._links), self._wanted // 2 - outbound)
        if self._store.newest is None:
            # Neighbours that do not know the run, or do not say, do not count.
            wanted = 4 * self._wanted - outbound
        return min(wanted, MAX_CONCURRENT_DIALS) - len(self._dialing)

    def seeds(self) -> list[Address]:
        """Return the bootstrap peers and those named by the descriptor, without relayed addresses (too short-lived for
        a link).
        """
        verified = self._store.last
        named = []
        for text in () if verified is None else verified.descriptor.peers:
            try:
                named.append(parse_address(text))
            except Malformed as error:
                log.debug("descriptor names an invalid peer %r: %s", text, error)
        own = self._host.get_id()
        return [a for a in dict.fromkeys((*self._bootstrap, *named)) if peer_of(a.node) != own and a.relay is None]

    async def _dial(self, address: Address) -> None:
        stream = None
        try:
            gossiped = address not in self.seeds()
            await connect(self._host, address, seconds=self._limits.dial_seconds, gossiped=gossiped)
            with trio.fail_after(self._limits.dial_seconds):
                stream = await self._host.new_stream(peer_of(address.node), [TProtocol(PROTOCOL)])
        except PeerUnreachable as error:
            self._book.failed(address.node)
            self._note_failure(address, str(error))
        except Exception as error:  # noqa: BLE001  (libp2p raises many kinds; all are the dialled peer's)
            log.debug("cannot open a link to %s:%d: %s", address.host, address.port, describe(error))
            self._book.failed(address.node)
            self._note_failure(address, "responds, but does not speak this protocol")
        finally:
            self._dialing.discard(address.node)
        if stream is not None:
            self._note_success(address)
            await self._keep(PeerLink(address.node, stream, network_of(address)), address)

    async def _keep(self, link: PeerLink, address: Address) -> None:
        await self._links.keep(link)
        if self._links.is_unwanted(address.node):
            self._note_failure(address, "sent data that is not the run's")
        elif time.monotonic() - link.opened_at < STEADY_SECONDS:
            self._note_failure(address, "responds, but closes the link")
        else:
            self._failures.pop(address, None)

    def _note_failure(self, address: Address, why: str) -> None:
        previous = self._failures.pop(address, None)
        count = 1 if previous is None else previous.count + 1
        first, longest = BACKOFF_SECONDS
        wait = min(longest, first * 2.0 ** min(count - 1, 16))
        self._failures[address] = _DialFailure(count, time.monotonic() + wait, why)
        while len(self._failures) > MAX_FAILED:
            del self._failures[next(iter(self._failures))]
        self._warn_if_isolated()

    def _warn_if_isolated(self) -> None:
        """Log at most once a minute that no seed can be reached, with the reasons."""
        seeds, now = self.seeds(), time.monotonic()
        if not seeds or self._links.nodes or any(address not in self._failures for address in seeds):
            return
        if self._warned_at is not None and now - self._warned_at < WARN_SECONDS:
            return
        self._warned_at, self._is_alone = now, True
        tried = "; ".join(f"{address.host}:{address.port}: {self._failures[address].why}" for address in seeds[:4])
        log.warning("no peer reachable (%s); retrying", tried)

    def _note_success(self, address: Address) -> None:
        self._book.answered(address.node)
        if self._is_alone:
            log.info("joined the peer-to-peer network through %s:%d", address.host, address.port)
        self._is_alone = False
