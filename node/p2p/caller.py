"""Keeping enough neighbours: whom to call, and what to say when nobody answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.abc import IHost
from libp2p.custom_types import TProtocol

from node.board import Board
from node.p2p.host import HostLimits, Unreachable, connect, peer_of
from node.p2p.links import PROTOCOL, Link, Links
from node.p2p.thread import describe
from node.p2p.transport import Pace
from node.peer_book import PeerBook, network_of
from node.protocol.peers import Address, parse_address
from shardcast.errors import Malformed

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
AT_ONCE: Final = 4
SEED_WAIT_SECONDS: Final = (1.0, 15.0)
SAY_SECONDS: Final = 60.0
STEADY_SECONDS: Final = 30.0
"""A link that ends sooner was none; whoever ends it is called again, but not at once."""

CALLS_PER_SECOND: Final = 1.0
BURST_CALLS: Final = 16
"""Of peers that strangers have named: nobody can have this node knock at a thousand doors."""

MAX_FAILED: Final = 1024


@dataclass(frozen=True, slots=True)
class _Failed:
    """How often in a row, until when it is left alone, and what it was last time."""

    count: int
    not_before: float
    why: str


class Caller:
    """Calls peers until this node has the neighbours that it wants, and again when they go."""

    def __init__(
        self,
        host: IHost,
        links: Links,
        book: PeerBook,
        board: Board,
        *,
        bootstrap: Sequence[Address],
        wanted: int,
        limits: HostLimits,
    ) -> None:
        self._host, self._links, self._book, self._board = host, links, book, board
        self._bootstrap, self._wanted, self._limits = tuple(bootstrap), wanted, limits
        self._calling: set[bytes] = set()
        self._failures: dict[Address, _Failed] = {}
        self._hearsay = Pace(rate=CALLS_PER_SECOND, burst=BURST_CALLS)
        self._said_at: float | None = None
        self._is_alone = True

    async def run(self) -> None:
        """Never ends."""
        async with trio.open_nursery() as nursery:
            while True:
                changed = self._links.changed
                for address in self._next():
                    self._calling.add(address.node)
                    self._book.calling(address.node, seconds=self._limits.dial_seconds)
                    nursery.start_soon(self._call, address)
                with trio.move_on_after(LOOK_SECONDS):
                    await changed.wait()

    def _next(self) -> list[Address]:
        """Whom to call now: peers that others named, and those to begin with where that is not enough."""
        missing = self._missing()
        if missing <= 0:
            return []
        now = time.monotonic()
        waiting = {address for address, failed in self._failures.items() if failed.not_before > now}
        taken = self._links.nodes | self._calling | {address.node for address in waiting}
        found = self._book.to_call(missing, without=taken, networks=self._links.networks)
        chosen = [peer.addresses[0] for peer in found if self._hearsay.take_now()]
        for address in self.seeds():
            busy = address.node in taken or any(address.node == other.node for other in chosen)
            if len(chosen) < missing and not busy and not self._links.is_unwanted(address.node):
                chosen.append(address)
        return chosen

    def _missing(self) -> int:
        """How many to call. Whoever fills a node's links from outside must not choose its neighbours for it."""
        called = len(self._links.networks)
        wanted = max(self._wanted - len(self._links), self._wanted // 2 - called)
        if self._board.newest is None:
            # Neighbours that do not know the run either, or do not say, are none.
            wanted = 4 * self._wanted - called
        return min(wanted, AT_ONCE) - len(self._calling)

    def seeds(self) -> list[Address]:
        """The peers to begin with, and those that the descriptor names; a circuit is too short for a link."""
        last = self._board.last
        named = []
        for text in () if last is None else last.descriptor.peers:
            try:
                named.append(parse_address(text))
            except Malformed as error:
                log.debug("the descriptor names %r: %s", text, error)
        own = self._host.get_id()
        return [a for a in dict.fromkeys((*self._bootstrap, *named)) if peer_of(a.node) != own and a.relay is None]

    async def _call(self, address: Address) -> None:
        stream = None
        try:
            hearsay = address not in self.seeds()
            await connect(self._host, address, seconds=self._limits.dial_seconds, hearsay=hearsay)
            with trio.fail_after(self._limits.dial_seconds):
                stream = await self._host.new_stream(peer_of(address.node), [TProtocol(PROTOCOL)])
        except Unreachable as error:
            self._book.failed(address.node)
            self._note_failure(address, str(error))
        except Exception as error:  # noqa: BLE001  (libp2p raises of many kinds; whoever is called is to blame for all)
            log.debug("no link to %s:%d: %s", address.host, address.port, describe(error))
            self._book.failed(address.node)
            self._note_failure(address, "answers, but takes no part in this network")
        finally:
            self._calling.discard(address.node)
        if stream is not None:
            self._note_answer(address)
            await self._keep(Link(address.node, stream, network_of(address)), address)

    async def _keep(self, link: Link, address: Address) -> None:
        await self._links.keep(link)
        if self._links.is_unwanted(address.node):
            self._note_failure(address, "sends what is not the run's")
        elif time.monotonic() - link.opened_at < STEADY_SECONDS:
            self._note_failure(address, "answers, and ends the link")
        else:
            self._failures.pop(address, None)

    def _note_failure(self, address: Address, why: str) -> None:
        before = self._failures.pop(address, None)
        count = 1 if before is None else before.count + 1
        first, most = SEED_WAIT_SECONDS
        wait = min(most, first * 2.0 ** min(count - 1, 16))
        self._failures[address] = _Failed(count, time.monotonic() + wait, why)
        while len(self._failures) > MAX_FAILED:
            del self._failures[next(iter(self._failures))]
        self._say_alone()

    def _say_alone(self) -> None:
        """In one line, now and then: nobody is there, whom this node has tried, and that it goes on."""
        seeds, now = self.seeds(), time.monotonic()
        if not seeds or self._links.nodes or any(address not in self._failures for address in seeds):
            return
        if self._said_at is not None and now - self._said_at < SAY_SECONDS:
            return
        self._said_at, self._is_alone = now, True
        tried = "; ".join(f"{address.host}:{address.port}: {self._failures[address].why}" for address in seeds[:4])
        log.warning("no peer answers (%s); trying on", tried)

    def _note_answer(self, address: Address) -> None:
        self._book.answered(address.node)
        if self._is_alone:
            log.info("joined the peer-to-peer network at %s:%d", address.host, address.port)
        self._is_alone = False
