"""Links: one stream per neighbour, over which both sides gossip descriptors and peer records.

A frame is an envelope: a descriptor of the run, or a peer's record about itself. Gossip carries state, not messages:
the newest descriptor wins, so a link sends the newest its neighbour lacks, at most a few per second, and a returning
node is up to date after one frame. No queues build up, replays need no memory, and a neighbour that sends too fast is
read more slowly.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio
from libp2p.abc import INetStream

from node.client.http import printable
from node.discovery.descriptor import DescriptorStore, OfferResult
from node.discovery.equivocation import MAX_ENVELOPE_BYTES
from node.discovery.peer_book import PeerBook, is_plausible, subnet_of
from node.p2p.frames import FRAME_SECONDS, read_frame, write_frame
from node.p2p.host import node_of, reset
from node.p2p.thread import describe
from node.p2p.transport import TrioTokenBucket
from node.protocol.peers import PEER_DOMAIN, Peer, open_peer, peer_id_of
from shardcast.envelope import MAGIC
from shardcast.errors import Malformed, PeerFault, Stale

log = logging.getLogger(__name__)

PROTOCOL: Final = "/swarmproof/link/1"
GREETING_PEERS: Final = 16
DESCRIPTOR_GAP_SECONDS: Final = 0.25
"""Minimum interval between two descriptors to one neighbour."""

FRAMES_PER_SECOND: Final = 8.0
BURST_FRAMES: Final = 48
IDLE_SECONDS: Final = 150.0
KEEPALIVE_SECONDS: Final = 60.0
MAX_WAITING_RECORDS: Final = 32
SIMULTANEOUS_SECONDS: Final = 10.0
"""Two links of a pair opened within this time were dialled simultaneously; a later one means the first is dead."""

GREETINGS_PER_SECOND: Final = 0.2
BURST_GREETINGS: Final = 4
"""Greetings per node: each amplifies a few bytes into a hundred thousand."""

OWN_RECORDS_PER_SECOND: Final = 0.1
BURST_OWN_RECORDS: Final = 3
"""Of a neighbour about itself; each may trigger a reachability probe."""

LOG_LINES_PER_SECOND: Final = 0.1
BURST_LOG_LINES: Final = 10
MAX_GREETED: Final = 1024
CLOSING_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """`wanted`: neighbours to look for. `most`: upper limit, inbound links included."""

    wanted: int = 6
    most: int = 64


@dataclass(slots=True, eq=False)
class PeerLink:
    """One neighbour. `knows`: newest descriptor version it has; `network`: where it was dialled, None if inbound."""

    node: bytes
    stream: INetStream
    network: str | None
    knows: int = -1
    wake: trio.Event = field(default_factory=trio.Event)
    records: list[bytes] = field(default_factory=list)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    opened_at: float = field(default_factory=time.monotonic)
    own_records: TrioTokenBucket = field(
        default_factory=lambda: TrioTokenBucket(rate=OWN_RECORDS_PER_SECOND, burst=BURST_OWN_RECORDS)
    )

    @property
    def host(self) -> str:
        """IP address of the neighbour; empty behind a relay."""
        remote = self.stream.get_remote_address()
        return "" if remote is None else remote[0]

    @property
    def subnet(self) -> str:
        """Address group of the neighbour (`subnet_of`)."""
        return subnet_of(self.host) if self.host else ""

    def tell(self, record: bytes) -> None:
        """Queue a peer's record, unless too many are waiting."""
        if len(self.records) < MAX_WAITING_RECORDS and record not in self.records:
            self.records.append(record)
            self.wake.set()


class Links:
    """All neighbours of a node. `own_record` returns this node's signed record, or None if it cannot be dialled.

    `on_record` is called with each record a neighbour sent about itself and the host it came from.
    """

    def __init__(
        self,
        store: DescriptorStore,
        book: PeerBook,
        *,
        own: bytes,
        limits: LinkLimits,
        own_record: Callable[[], bytes | None],
        on_record: Callable[[Peer, str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.changed = trio.Event()
        self.frames = {"received": 0, "sent": 0, "refused": 0}
        self._store, self._book, self._own, self._limits = store, book, own, limits
        self._own_record, self._on_record, self._clock = own_record, on_record, clock
        self._links: dict[bytes, PeerLink] = {}
        self._greetings: dict[bytes, TrioTokenBucket] = {}
        self._log_limit = TrioTokenBucket(rate=LOG_LINES_PER_SECOND, burst=BURST_LOG_LINES, clock=time.monotonic)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def nodes(self) -> set[bytes]:
        """Public keys of the neighbours."""
        return set(self._links)

    @property
    def networks(self) -> list[str]:
        """Networks of the neighbours that this node dialled."""
        return [link.network for link in self._links.values() if link.network is not None]

    def news(self) -> None:
        """Wake every link to send a newer descriptor."""
        self._drop_revoked()
        for link in self._links.values():
            link.wake.set()

    def spread(self, record: bytes) -> None:
        """Queue a record at every neighbour."""
        for link in self._links.values():
            link.tell(record)

    async def serve(self, stream: INetStream) -> None:
        """Serve an inbound link. It is greeted even when full: a newcomer needs no more."""
        node = node_of(stream)
        if self.is_unwanted(node) or not self._may_greet(node):
            await reset(stream)
            return
        link = PeerLink(node, stream, None)
        if len(self._links) >= self._limits.most and node not in self._links and not self._evict_for(link):
            await self._greet_only(link)
            return
        await self.keep(link)

    async def keep(self, link: PeerLink) -> None:
        """Greet, then send and receive until either side closes; raises nothing."""
        existing = self._links.get(link.node)
        if existing is not None:
            # Simultaneous open: both sides keep the stream that the smaller key opened.
            is_simultaneous = link.opened_at - existing.opened_at < SIMULTANEOUS_SECONDS
            if is_simultaneous and self._opener(existing) < self._opener(link):
                await reset(link.stream)
                return
            existing.scope.cancel()
        self._links[link.node] = link
        self._note_change()
        try:
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send, link)
                    await self._receive(link)
                    nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001  (a failed link must not end the others)
            log.debug("link to %s closed: %s", peer_id_of(link.node), describe(error))
        finally:
            if self._links.get(link.node) is link:
                del self._links[link.node]
            self._note_change()
            await reset(link.stream)
            if self.is_unwanted(link.node):
                with trio.CancelScope(deadline=trio.current_time() + 1, shield=True), contextlib.suppress(Exception):
                    await link.stream.muxed_conn.close()

    def _may_greet(self, node: bytes) -> bool:
        pace = self._greetings.pop(node, None) or TrioTokenBucket(rate=GREETINGS_PER_SECOND, burst=BURST_GREETINGS)
        self._greetings[node] = pace
        if len(self._greetings) > MAX_GREETED:
            del self._greetings[next(iter(self._greetings))]
        return pace.try_acquire()

    def _evict_for(self, link: PeerLink) -> bool:
        """Evict a link of the most crowded network if this one's is less crowded; never an outbound one."""
        inbound = [each for each in self._links.values() if each.network is None]
        subnets = Counter(each.subnet for each in inbound)
        largest = max(subnets.values(), default=0)
        if subnets[link.subnet] + 1 >= largest:
            return False
        random.choice([each for each in inbound if subnets[each.subnet] == largest]).scope.cancel()
        return True

    async def _greet_only(self, link: PeerLink) -> None:
        """Send the greeting without keeping the link."""
        with trio.move_on_after(FRAME_SECONDS), contextlib.suppress(Exception):
            await self._greet(link)
            await link.stream.close()
            with trio.move_on_after(CLOSING_SECONDS):
                while await link.stream.read(4096):
                    pass
        await reset(link.stream)

    async def _greet(self, link: PeerLink) -> None:
        await self._send_descriptor(link)
        own = self._own_record()
        records = self._book.sample(GREETING_PEERS, without=(link.node,))
        for record in ([] if own is None else [own]) + records:
            await self._write(link, record)

    async def _send(self, link: PeerLink) -> None:
        await self._greet(link)
        while True:
            link.wake = trio.Event()
            if await self._send_descriptor(link):
                await trio.sleep(DESCRIPTOR_GAP_SECONDS)
                continue
            if link.records:
                await self._write(link, link.records.pop(0))
                continue
            with trio.move_on_after(KEEPALIVE_SECONDS) as waited:
                await link.wake.wait()
            if waited.cancelled_caught:
                await self._write(link, b"")

    async def _send_descriptor(self, link: PeerLink) -> bool:
        verified = self._store.newest
        if verified is None or verified.descriptor.version <= link.knows:
            return False
        link.knows = verified.descriptor.version
        await self._write(link, verified.envelope)
        return True

    async def _write(self, link: PeerLink, frame: bytes) -> None:
        await write_frame(link.stream, frame)
        self.frames["sent"] += 1

    async def _receive(self, link: PeerLink) -> None:
        bucket = TrioTokenBucket(rate=FRAMES_PER_SECOND, burst=BURST_FRAMES)
        while True:
            try:
                frame = await read_frame(link.stream, max_bytes=MAX_ENVELOPE_BYTES, idle_seconds=IDLE_SECONDS)
            except Malformed as error:
                if error.code == "oversized":  # truncation is no fault of the sender's
                    self._shun(link, error)
                raise
            if frame is None:
                return
            await bucket.acquire()
            self.frames["received"] += 1
            self._process_frame(link, frame)

    def _process_frame(self, link: PeerLink, frame: bytes) -> None:
        """Process one frame; raises PeerFault and shuns the neighbour for what no honest one sends."""
        try:
            if not frame:
                return
            if frame.startswith(_PEER_PREFIX):
                self._process_record(link, frame)
            else:
                self._process_descriptor(link, frame)
        except Stale:
            self.frames["refused"] += 1  # either side's clock may be wrong
        except PeerFault as error:
            self._shun(link, error)
            raise

    def _shun(self, link: PeerLink, error: PeerFault) -> None:
        self.frames["refused"] += 1
        self._book.shun(link.node)
        level = logging.INFO if self._log_limit.try_acquire() else logging.DEBUG
        where = f"{peer_id_of(link.node)} at {link.host or 'a relay'}"
        log.log(level, "peer %s sent data that is not the run's (%s); shunned", where, printable(str(error)))

    def _process_descriptor(self, link: PeerLink, frame: bytes) -> None:
        news = self._store.offer(frame, source=peer_id_of(link.node))
        verified = self._store.newest
        if verified is not None and news in {OfferResult.NEWER, OfferResult.KNOWN}:
            link.knows = max(link.knows, verified.descriptor.version)
        elif news is OfferResult.OLDER:
            link.wake.set()

    def _process_record(self, link: PeerLink, frame: bytes) -> None:
        peer = open_peer(frame, run_id=self._store.run_id, now=self._clock())
        if peer.node == link.node:
            if link.own_records.try_acquire():
                self._on_record(peer, link.host)
        elif peer.node == self._own:
            self._on_record(peer, "")
        elif is_plausible(peer, source=link.host) and self._book.add(peer, source=link.subnet):
            self._note_change()

    def _opener(self, link: PeerLink) -> bytes:
        return link.node if link.network is None else self._own

    def is_unwanted(self, node: bytes) -> bool:
        """Return whether to refuse a node: revoked, shunned, or this node itself."""
        verified = self._store.newest
        revoked = verified is not None and node.hex() in verified.descriptor.revoked
        return revoked or node == self._own or self._book.is_shunned(node)

    def _drop_revoked(self) -> None:
        for node, link in list(self._links.items()):
            if self.is_unwanted(node):
                link.scope.cancel()

    def _note_change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


_PEER_PREFIX = MAGIC + bytes((len(PEER_DOMAIN),)) + PEER_DOMAIN.encode()
