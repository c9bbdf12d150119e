"""A node's membership in a run's peer-to-peer network, for the asyncio side.

It keeps a few neighbours (`node.p2p.links`), finds others through them, and feeds their descriptors to the node's
`DescriptorStore`. It needs one bootstrap peer the first time only: known peers are kept in the state folder.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol

from node.client.ssrf import Reach, reach_of
from node.discovery.addresses import is_loopback, reachable_hosts
from node.discovery.descriptor import DescriptorStore, VerifiedDescriptor
from node.discovery.peer_book import PeerBook, is_plausible, subnet_of
from node.errors import NetworkDown
from node.p2p.circuits import HOP, STOP, is_relayed
from node.p2p.control import PROTOCOL as CONTROL
from node.p2p.control import ControlServer, Handler, send_request
from node.p2p.dialer import Dialer
from node.p2p.host import HostLimits, PeerUnreachable, listening_port, reset, running_host, verify
from node.p2p.links import PROTOCOL, LinkLimits, Links
from node.p2p.peers_file import load_peers, save_peers
from node.p2p.relaying import CircuitRelay, RelayLimits
from node.p2p.reserving import Reservations
from node.p2p.thread import TrioThread
from node.protocol.peers import MAX_ADDRESSES, MAX_VALID_SECONDS, Address, Peer, PeerRecord, peer_id_of, sign_peer

log = logging.getLogger(__name__)

RECORD_SECONDS: Final = MAX_VALID_SECONDS
RENEW_SECONDS: Final = MAX_VALID_SECONDS / 2
GOSSIP_SECONDS: Final = 30.0
GOSSIP_RECORDS: Final = 8
PROBE_SECONDS: Final = 3.0
READY_SECONDS: Final = 20.0
MAX_PROBES: Final = 8
MAX_REMEMBERED: Final = 16
"""Peers with expired records that are dialled after a restart all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Settings of one node in the network.

    `bootstrap`: first peers to dial. `host`, `port`: where to listen (port 0: any free one). `addresses`: where others
    reach it, if different. `announced`: whether others are told of it. `state`: folder for known peers. `relay`: limits
    for relaying to unreachable peers, None for no relaying.
    """

    bootstrap: tuple[Address, ...]
    state: Path
    host: str = "0.0.0.0"  # noqa: S104  (reachable by default; nothing received is trusted)
    port: int = 0
    addresses: tuple[Address, ...] = ()
    announced: bool = True
    links: LinkLimits = field(default_factory=LinkLimits)
    limits: HostLimits = field(default_factory=HostLimits)
    relay: RelayLimits | None = None


class PeerNetwork:
    """The peer-to-peer network; use as an async context manager. It restarts itself after any failure."""

    def __init__(self, settings: PeerSettings, *, key: Ed25519PrivateKey, store: DescriptorStore) -> None:
        self._settings, self._key, self._store = settings, key, store
        self.node = key.public_key().public_bytes_raw()
        self.book = PeerBook(self.node, clock=time.time)
        self._thread = TrioThread(self._main, name="p2p")
        self._started = time.time()
        self._host: IHost | None = None
        self._links: Links | None = None
        self._dialer: Dialer | None = None
        self._relay: CircuitRelay | None = None
        self._reservations: Reservations | None = None
        self._was_dialled = False
        self._port = settings.port
        self._record: tuple[float, bytes] | None = None
        self._issued_at = 0
        self._duplicate_key_logged = False
        self._probing = 0
        self._control = ControlServer()
        self._remembered: list[Address] = []
        for peer in load_peers(settings.state, run_id=store.run_id, now=time.time()):
            if peer.expires_at > time.time():
                self.book.add(peer)
            elif len(self._remembered) < MAX_REMEMBERED:
                self._remembered += peer.addresses[:1]
        store.listen(self._on_descriptor)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._thread.stop()
        if len(self.book):  # keep the previous peers if none was met
            await asyncio.to_thread(save_peers, self._settings.state, self.book.envelopes())

    async def ready(self) -> tuple[Address, ...]:
        """Wait until this node listens and return its addresses; raises TimeoutError."""
        await self._thread.wait_up(READY_SECONDS)
        return self.addresses()

    def addresses(self) -> tuple[Address, ...]:
        """Return where others may reach this node; none if unknown or not announced."""
        if not self._settings.announced:
            return ()
        if self._settings.addresses:
            return self._settings.addresses
        if self._port == 0:
            return ()
        hosts = reachable_hosts(self._settings.host)
        direct = tuple(Address("ip6" if ":" in one else "ip4", one, self._port, self.node) for one in hosts)
        relayed = () if self._reservations is None else self._reservations.addresses()
        return (*direct[: MAX_ADDRESSES - len(relayed)], *relayed)

    def status(self) -> dict[str, Any]:
        """Return the network's state as this node sees it, ready for JSON."""
        links = self._links
        return {
            "peer_id": peer_id_of(self.node),
            "up": self._thread.is_up,
            "addresses": [str(address) for address in self.addresses()],
            "neighbours": [] if links is None else [peer_id_of(node) for node in sorted(links.nodes)],
            "known": len(self.book),
            "restarts": self._thread.restarts,
            "frames": {} if links is None else dict(links.frames),
            "relay": None if self._relay is None else self._relay.status(),
        }

    def set_handler(self, handler: Handler | None) -> None:
        """Set the handler of control requests (`node.p2p.control`), on the running asyncio loop."""
        self._control.set_handler(handler, asyncio.get_running_loop())

    async def request(
        self, node: bytes, data: bytes, *, address: Address | None = None, timeout_seconds: float
    ) -> tuple[bytes, float]:
        """Send a control request; return the reply and its duration in seconds. Raises NetworkDown.

        Without `address` the node is dialled at its known addresses.
        """

        async def send() -> tuple[bytes, float]:
            if self._host is None:
                raise NetworkDown("The peer-to-peer network is not up yet; retry.")
            known = self.book.addresses(node) if address is None else (address,)
            return await send_request(
                self._host, node, data, addresses=known, dial_seconds=self._settings.limits.dial_seconds
            )

        return await self._thread.call(send, timeout_seconds=timeout_seconds)

    # -- on the trio thread

    async def _main(self, ready: Callable[[], None]) -> None:
        settings = self._settings
        listen = f"/{'ip6' if ':' in settings.host else 'ip4'}/{settings.host}/tcp/{self._port}"
        async with running_host(self._key, listen, settings.limits) as host, trio.open_nursery() as nursery:
            self._host, self._port = host, listening_port(host)
            links = Links(
                self._store,
                self.book,
                own=self.node,
                limits=settings.links,
                own_record=self._own_record,
                on_record=lambda peer, remote: self._on_record(nursery, peer, remote),
            )
            self._links = links
            self._dialer = Dialer(
                host,
                links,
                self.book,
                self._store,
                bootstrap=(*settings.bootstrap, *self._remembered),
                wanted=settings.links.wanted,
                limits=settings.limits,
            )
            self._reservations = Reservations(
                host,
                self.node,
                relays=self._dialer.seeds,
                needed=self._needs_relay,
                changed=lambda: self._announce(links),
                unwanted=links.is_unwanted,
            )
            host.set_stream_handler(TProtocol(PROTOCOL), lambda stream: self._serve_link(links, stream))
            host.set_stream_handler(STOP, self._reservations.serve)
            if settings.relay is not None:
                self._relay = CircuitRelay(host, settings.relay, unwanted=links.is_unwanted)
                host.set_stream_handler(HOP, self._relay.serve)
            host.set_stream_handler(TProtocol(CONTROL), self._control.serve)
            ready()
            nursery.start_soon(self._dialer.run)
            nursery.start_soon(self._reservations.run)
            nursery.start_soon(self._gossip_peers, links)
            await trio.sleep_forever()

    async def _serve_link(self, links: Links, stream: INetStream) -> None:
        """Serve an inbound link; refuse one through a relay, since circuits are short-lived."""
        if is_relayed(stream):
            await reset(stream)
            return
        remote = stream.get_remote_address()
        self._was_dialled = self._was_dialled or (remote is not None and reach_of(remote[0]) is Reach.INTERNET)
        await links.serve(stream)

    def _needs_relay(self) -> bool:
        """Return whether nobody seems able to dial this node: no distant peer has yet, and no address is configured."""
        settings = self._settings
        if not settings.announced or settings.addresses or self._was_dialled:
            return False
        return not all(map(is_loopback, reachable_hosts(settings.host)))

    def _announce(self, links: Links) -> None:
        """Send the neighbours this node's new record."""
        self._record = None
        own = self._own_record()
        if own is not None:
            links.spread(own)

    def _on_descriptor(self, _on_descriptor: VerifiedDescriptor) -> None:
        """Pass on a newer descriptor; called on any thread."""
        self._thread.soon(lambda: None if self._links is None else self._links.news())

    async def _gossip_peers(self, links: Links) -> None:
        """Periodically gossip known peers and save them."""
        while True:
            await trio.sleep(GOSSIP_SECONDS * random.uniform(0.5, 1.0))
            own = self._own_record()
            for record in ([] if own is None else [own]) + self.book.sample(GOSSIP_RECORDS):
                links.spread(record)
            await trio.to_thread.run_sync(save_peers, self._settings.state, self.book.envelopes())

    def _own_record(self) -> bytes | None:
        addresses = self.addresses()
        if not addresses:
            return None
        now = time.time()
        if self._record is None or now - self._record[0] > RENEW_SECONDS:
            # The later record wins, and two may be made within a second.
            self._issued_at = issued_at = max(int(now), self._issued_at + 1)
            record = PeerRecord(
                run_id=self._store.run_id,
                addresses=tuple(map(str, addresses)),
                issued_at=issued_at,
                expires_at=issued_at + RECORD_SECONDS,
            )
            self._record = now, sign_peer(record, key=self._key)
        return self._record[1]

    def _on_record(self, nursery: trio.Nursery, peer: Peer, remote: str) -> None:
        """Handle a neighbour's record about itself, or one signed with this node's own key."""
        if peer.node == self.node:
            self._warn_duplicate_key(peer)
            return
        news = is_plausible(peer, source=remote) and self.book.add(peer, source=subnet_of(remote) if remote else "")
        if news and self._probing < MAX_PROBES:
            self._probing += 1
            nursery.start_soon(self._probe, peer, remote)

    async def _probe(self, peer: Peer, remote: str) -> None:
        """Check that a peer listens where it connected from, or has reserved here; only then pass its record on."""
        try:
            if self._relays_for(peer) or await self._listens(peer, remote):
                self.book.answered(peer.node)
                if self._links is not None:
                    self._links.spread(peer.envelope)
        finally:
            self._probing -= 1

    def _relays_for(self, peer: Peer) -> bool:
        names_this_relay = any(address.relay == self.node for address in peer.addresses)
        return names_this_relay and self._relay is not None and self._relay.holds(peer.node)

    async def _listens(self, peer: Peer, remote: str) -> bool:
        """Verify that the peer itself responds at its first address, on the host it connects from."""
        if self._host is None:
            return False
        try:
            await verify(self._host, peer.addresses[0], at=remote, seconds=PROBE_SECONDS)
            return True
        except PeerUnreachable as error:
            log.debug("peer %s does not listen at %s: %s", peer_id_of(peer.node), remote, error)
            return False

    def _warn_duplicate_key(self, peer: Peer) -> None:
        """Warn once if the same key is used elsewhere, by a record issued after this node started."""
        ours = {(address.host, address.port) for address in self.addresses() if address.relay is None}
        theirs = {(address.host, address.port) for address in peer.addresses if address.relay is None}
        if self._duplicate_key_logged or peer.issued_at <= self._started or theirs & ours:
            return
        self._duplicate_key_logged = True
        where = ", ".join(f"{host}:{port}" for host, port in sorted(theirs))
        log.warning("this node's key is also in use at %s: use each key on one machine only", where)
