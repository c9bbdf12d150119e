"""Links: one stream to each neighbour, over which both say at once what each learns first.

A frame is an envelope: a descriptor of the run, or a peer's record about itself. What is gossiped is a state, not
messages: of two descriptors the newer holds, so a link sends the newest that its neighbour lacks, at most a few a
second, and whoever was away is up to date with the first frame of its next link. Nothing waits in queues, nothing has
to be remembered to tell a replay, and a neighbour that sends too fast is read more slowly.
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

from node.board import MAX_ENVELOPE_BYTES, Board, News
from node.exchange import printable
from node.p2p.frames import FRAME_SECONDS, read_frame, write_frame
from node.p2p.host import node_of, reset
from node.p2p.thread import describe
from node.p2p.transport import Pace
from node.peer_book import PeerBook, crowd_of, is_plausible
from node.protocol.peers import PEER_DOMAIN, Peer, open_peer, peer_id_of
from shardcast.envelope import MAGIC
from shardcast.errors import Malformed, PeerFault, Stale

log = logging.getLogger(__name__)

PROTOCOL: Final = "/veriswarm/link/1"
GREETING_PEERS: Final = 16
GAP_SECONDS: Final = 0.25
"""Between two descriptors to one neighbour: at most four a second, however fast the run moves."""

FRAMES_PER_SECOND: Final = 8.0
BURST_FRAMES: Final = 48
IDLE_SECONDS: Final = 150.0
KEEPALIVE_SECONDS: Final = 60.0
MAX_WAITING_RECORDS: Final = 32
AT_ONCE_SECONDS: Final = 10.0
"""Two links of one pair within so long were opened at once; later, the second one tells that the first is dead."""

CALLS_PER_SECOND: Final = 0.2
BURST_CALLS: Final = 4
"""Of one node, each of which it is greeted for: a few bytes would be answered with a hundred thousand otherwise."""

OWN_RECORDS_PER_SECOND: Final = 0.1
BURST_OWN_RECORDS: Final = 3
"""Of a neighbour about itself, each of which may have this node see whether it is there."""

LINES_PER_SECOND: Final = 0.1
BURST_LINES: Final = 10
MAX_CALLERS: Final = 1024
PARTING_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """`wanted`: neighbours that a node looks for. `most`: how many it has at most, those that called included."""

    wanted: int = 6
    most: int = 64


@dataclass(slots=True, eq=False)
class Link:
    """One neighbour. `knows` is the newest descriptor that it is known to have, `network` where it was called."""

    node: bytes
    stream: INetStream
    network: str | None
    knows: int = -1
    wake: trio.Event = field(default_factory=trio.Event)
    records: list[bytes] = field(default_factory=list)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    opened_at: float = field(default_factory=time.monotonic)
    own_records: Pace = field(default_factory=lambda: Pace(rate=OWN_RECORDS_PER_SECOND, burst=BURST_OWN_RECORDS))

    @property
    def host(self) -> str:
        """The IP address at the other end, or nothing where a relay is between."""
        remote = self.stream.get_remote_address()
        return "" if remote is None else remote[0]

    @property
    def crowd(self) -> str:
        """The network that it is in."""
        return crowd_of(self.host) if self.host else ""

    def tell(self, record: bytes) -> None:
        """Send a peer's record with the next frames, if not too many wait already."""
        if len(self.records) < MAX_WAITING_RECORDS and record not in self.records:
            self.records.append(record)
            self.wake.set()


class Links:
    """All neighbours of a node. `own_record` makes this node's signed record, or None if it cannot be called.

    `heard` is told of each record that a neighbour sent about itself, with the host that it was heard from.
    """

    def __init__(
        self,
        board: Board,
        book: PeerBook,
        *,
        own: bytes,
        limits: LinkLimits,
        own_record: Callable[[], bytes | None],
        heard: Callable[[Peer, str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.changed = trio.Event()
        self.frames = {"received": 0, "sent": 0, "refused": 0}
        self._board, self._book, self._own, self._limits = board, book, own, limits
        self._own_record, self._heard, self._clock = own_record, heard, clock
        self._links: dict[bytes, Link] = {}
        self._callers: dict[bytes, Pace] = {}
        self._lines = Pace(rate=LINES_PER_SECOND, burst=BURST_LINES, clock=time.monotonic)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def nodes(self) -> set[bytes]:
        """The neighbours' public keys."""
        return set(self._links)

    @property
    def networks(self) -> list[str]:
        """In which networks the neighbours are that this node called."""
        return [link.network for link in self._links.values() if link.network is not None]

    def news(self) -> None:
        """There is a newer descriptor: every link looks what its neighbour lacks."""
        self._drop_revoked()
        for link in self._links.values():
            link.wake.set()

    def spread(self, record: bytes) -> None:
        """Tell every neighbour of a peer."""
        for link in self._links.values():
            link.tell(record)

    async def serve(self, stream: INetStream) -> None:
        """A neighbour has called. It is greeted even if there is no room for it: that is all a newcomer needs."""
        node = node_of(stream)
        if self.is_unwanted(node) or not self._may_call(node):
            await reset(stream)
            return
        link = Link(node, stream, None)
        if len(self._links) >= self._limits.most and node not in self._links and not self._make_way(link):
            await self._greet_only(link)
            return
        await self.keep(link)

    async def keep(self, link: Link) -> None:
        """Greet, then send and receive until either side ends it; raises nothing."""
        old = self._links.get(link.node)
        if old is not None:
            # Both have called at once: both keep the stream that the smaller key opened.
            at_once = link.opened_at - old.opened_at < AT_ONCE_SECONDS
            if at_once and self._opener(old) < self._opener(link):
                await reset(link.stream)
                return
            old.scope.cancel()
        self._links[link.node] = link
        self._note_change()
        try:
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send, link)
                    await self._receive(link)
                    nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001  (one link's end, whatever it was, ends nothing else)
            log.debug("link to %s ended: %s", peer_id_of(link.node), describe(error))
        finally:
            if self._links.get(link.node) is link:
                del self._links[link.node]
            self._note_change()
            await reset(link.stream)
            if self.is_unwanted(link.node):
                with trio.CancelScope(deadline=trio.current_time() + 1, shield=True), contextlib.suppress(Exception):
                    await link.stream.muxed_conn.close()

    def end_all(self) -> None:
        """End every link."""
        for link in list(self._links.values()):
            link.scope.cancel()

    def _may_call(self, node: bytes) -> bool:
        pace = self._callers.pop(node, None) or Pace(rate=CALLS_PER_SECOND, burst=BURST_CALLS)
        self._callers[node] = pace
        if len(self._callers) > MAX_CALLERS:
            del self._callers[next(iter(self._callers))]
        return pace.take_now()

    def _make_way(self, link: Link) -> bool:
        """End a link of the most crowded network, if this one's is less crowded; never one that this node opened."""
        callers = [each for each in self._links.values() if each.network is None]
        crowds = Counter(each.crowd for each in callers)
        largest = max(crowds.values(), default=0)
        if crowds[link.crowd] + 1 >= largest:
            return False
        random.choice([each for each in callers if crowds[each.crowd] == largest]).scope.cancel()
        return True

    async def _greet_only(self, link: Link) -> None:
        """All that a newcomer needs, where there is no room for its link."""
        with trio.move_on_after(FRAME_SECONDS), contextlib.suppress(Exception):
            await self._greet(link)
            await link.stream.close()
            with trio.move_on_after(PARTING_SECONDS):
                while await link.stream.read(4096):
                    pass
        await reset(link.stream)

    async def _greet(self, link: Link) -> None:
        await self._send_descriptor(link)
        own = self._own_record()
        records = self._book.sample(GREETING_PEERS, without=(link.node,))
        for record in ([] if own is None else [own]) + records:
            await self._write(link, record)

    async def _send(self, link: Link) -> None:
        await self._greet(link)
        while True:
            link.wake = trio.Event()
            if await self._send_descriptor(link):
                await trio.sleep(GAP_SECONDS)
                continue
            if link.records:
                await self._write(link, link.records.pop(0))
                continue
            with trio.move_on_after(KEEPALIVE_SECONDS) as waited:
                await link.wake.wait()
            if waited.cancelled_caught:
                await self._write(link, b"")

    async def _send_descriptor(self, link: Link) -> bool:
        posted = self._board.newest
        if posted is None or posted.descriptor.version <= link.knows:
            return False
        link.knows = posted.descriptor.version
        await self._write(link, posted.envelope)
        return True

    async def _write(self, link: Link, frame: bytes) -> None:
        await write_frame(link.stream, frame)
        self.frames["sent"] += 1

    async def _receive(self, link: Link) -> None:
        pace = Pace(rate=FRAMES_PER_SECOND, burst=BURST_FRAMES)
        while True:
            try:
                frame = await read_frame(link.stream, max_bytes=MAX_ENVELOPE_BYTES, idle_seconds=IDLE_SECONDS)
            except Malformed as error:
                if error.code == "oversized":  # and not cut off, which is no fault of the sender's
                    self._shun(link, error)
                raise
            if frame is None:
                return
            await pace.take()
            self.frames["received"] += 1
            self._take(link, frame)

    def _take(self, link: Link, frame: bytes) -> None:
        """Look at one frame; raises PeerFault, and shuns the neighbour, for what no honest one sends."""
        try:
            if not frame:
                return
            if frame.startswith(_PEER_PREFIX):
                self._take_record(link, frame)
            else:
                self._take_descriptor(link, frame)
        except Stale:
            self.frames["refused"] += 1  # its clock may be wrong, or ours
        except PeerFault as error:
            self._shun(link, error)
            raise

    def _shun(self, link: Link, error: PeerFault) -> None:
        self.frames["refused"] += 1
        self._book.shun(link.node)
        said = logging.INFO if self._lines.take_now() else logging.DEBUG
        where = f"{peer_id_of(link.node)} at {link.host or 'a relay'}"
        log.log(said, "peer %s sent what is not the run's (%s); shunned", where, printable(str(error)))

    def _take_descriptor(self, link: Link, frame: bytes) -> None:
        news = self._board.offer(frame, source=peer_id_of(link.node))
        posted = self._board.newest
        if posted is not None and news in {News.NEWER, News.KNOWN}:
            link.knows = max(link.knows, posted.descriptor.version)
        elif news is News.OLDER:
            link.wake.set()

    def _take_record(self, link: Link, frame: bytes) -> None:
        peer = open_peer(frame, run_id=self._board.run_id, now=self._clock())
        if peer.node == link.node:
            if link.own_records.take_now():
                self._heard(peer, link.host)
        elif peer.node == self._own:
            self._heard(peer, "")
        elif is_plausible(peer, teller=link.host) and self._book.add(peer, teller=link.crowd):
            self._note_change()

    def _opener(self, link: Link) -> bytes:
        return link.node if link.network is None else self._own

    def is_unwanted(self, node: bytes) -> bool:
        """Whether nothing is to be had with it: it is revoked, or shunned, or this node itself."""
        posted = self._board.newest
        revoked = posted is not None and node.hex() in posted.descriptor.revoked
        return revoked or node == self._own or self._book.is_shunned(node)

    def _drop_revoked(self) -> None:
        for node, link in list(self._links.items()):
            if self.is_unwanted(node):
                link.scope.cancel()

    def _note_change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


_PEER_PREFIX = MAGIC + bytes((len(PEER_DOMAIN),)) + PEER_DOMAIN.encode()
