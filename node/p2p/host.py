"""A libp2p host for hostile company: TCP, Noise and Yamux, few connections, and no handler whose error ends the node.

Of py-libp2p 0.8.1 it takes the handshakes, the multiplexer and the negotiation of protocols, and leaves out the rest:
plaintext, which would let anybody pose as anybody; Mplex; identify, which lets a peer say where it is to be called;
its dialler, which says nothing of why; its resource manager, which has limits for all and none for one; GossipSub and
Kademlia (docs/adr/0018). A host built by `new_host` lets in as many connections in its life as it may have at once,
and ends with any exception that leaves a stream's handler.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, cast

import multiaddr
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import IHost, INetConn, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.host.basic_host import BasicHost
from libp2p.io.exceptions import IOException
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX

from node.p2p.door import Door, Guest
from node.p2p.thread import describe
from node.p2p.transport import Muxer, TcpStream, Upgrader
from node.protocol.peers import Address, peer_id_of, public_key_of

log = logging.getLogger(__name__)

for _noisy in ("libp2p", "multiaddr", "async_service"):
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)  # it logs each peer's misconduct with a traceback

UPGRADE_SECONDS: Final = 5.0
END_SECONDS: Final = 1.0
IDLE_SECONDS: Final = 120.0
LOOK_SECONDS: Final = 10.0
OWN_CALLS: Final = 16
"""Of all connections, kept for those that this node opens: guests must not take its last way out."""

MAX_RESOLVED: Final = 4
_FAMILIES: Final = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


class Unreachable(Exception):
    """A peer could not be called; says why as the operating system does, or what answered in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """How many connections in all and of one peer, and how long one may take to be called or to shake hands."""

    connections: int = 128
    per_peer: int = 2
    dial_seconds: float = 5.0


class Network(Swarm):
    """Connections: those that come in by the door, and those that this node opens."""

    def __init__(self, key: Ed25519PrivateKey, limits: HostLimits) -> None:
        pair = create_new_key_pair(key.private_bytes_raw())
        own, peerstore = ID.from_pubkey(pair.public_key), PeerStore()
        peerstore.add_key_pair(own, pair)
        noise = NoiseTransport(pair, create_noise_key_pair().private_key)
        upgrader = Upgrader({NOISE: noise}, {TProtocol(YAMUX): Muxer})
        super().__init__(own, peerstore, upgrader, [], connection_config=_connections(limits))
        self.door = Door(places=max(1, limits.connections - OWN_CALLS))
        self.port = 0
        self._per_peer = limits.per_peer

    async def admit(self, tcp: trio.SocketStream) -> None:
        """Serve one that calls, until it goes or has to; raises nothing."""
        stream, guest = TcpStream(tcp), None
        try:
            remote = stream.get_remote_address()
            guest = None if remote is None else self.door.enter(remote[0])
            if guest is not None:
                with guest.scope:
                    await self._entertain(guest, stream)
        except Exception as error:  # noqa: BLE001  (whatever a guest does ends its own visit)
            log.debug("a connection failed: %s", describe(error))
        finally:
            stream.stop()
            if guest is not None:
                self.door.leave(guest)

    async def _entertain(self, guest: Guest, stream: TcpStream) -> None:
        with trio.fail_after(2 * UPGRADE_SECONDS):
            nowhere = multiaddr.Multiaddr("/ip4/0.0.0.0")
            muxed = cast("Muxer", await self.upgrade_inbound_raw_conn(RawConnection(stream, False), nowhere))
        muxed.tcp, guest.shaken, guest.busy = stream, True, lambda: bool(muxed.streams)
        try:
            self._limit(muxed.peer_id)
            await muxed.event_closed.wait()
        finally:
            for connection in self.get_connections(muxed.peer_id):
                if connection.muxed_conn is muxed:
                    await self.end(connection)

    async def call(self, host: str, port: int, peer: ID, *, seconds: float, only_shake_hands: bool = False) -> None:
        """Open a connection to a peer, or only see whether it could be; raises Unreachable."""
        stream, done = None, False
        try:
            with trio.fail_after(seconds):
                stream = TcpStream(await trio.open_tcp_stream(host, port))
                raw = RawConnection(stream, True)
                if only_shake_hands:
                    await self.upgrader.upgrade_security(raw, True, peer)
                else:
                    connection = await self.upgrade_outbound_raw_conn(raw, peer)
                    cast("Muxer", connection.muxed_conn).tcp, done = stream, True
        except trio.TooSlowError as error:
            what = "no answer" if stream is None else "answers, but does not shake hands"
            raise Unreachable(f"{what} within {seconds:.0f} s") from error
        except OSError as error:
            raise Unreachable(_reason(error)) from error
        except Exception as error:
            raise Unreachable(what_answers(error)) from error
        finally:
            if stream is not None and not done:
                stream.stop()

    async def end(self, connection: INetConn) -> None:
        """End a connection and all that goes over it, whatever the peer does; raises nothing."""
        tcp = cast("Muxer", connection.muxed_conn).tcp
        if tcp is not None:
            tcp.stop()  # or a farewell that the peer does not take would have to be waited for
        deadline = trio.current_time() + END_SECONDS
        with trio.CancelScope(deadline=deadline, shield=True), contextlib.suppress(Exception):
            await connection.close()
        self.remove_conn(cast("Any", connection))

    def stop_all(self) -> None:
        """End every connection at once, without a farewell."""
        for connection in self.get_connections():
            tcp = cast("Muxer", connection.muxed_conn).tcp
            if tcp is not None:
                tcp.stop()

    async def end_idle(self) -> None:
        """End connections over which nothing has gone for a while; never returns."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            since = trio.current_time() - IDLE_SECONDS
            for connection in self.get_connections():
                muxed = cast("Muxer", connection.muxed_conn)
                if not muxed.streams and muxed.used_at < since:
                    await self.end(connection)

    async def notify_disconnected(self, conn: INetConn) -> None:
        """Remembers nothing, where libp2p keeps every peer that ever left."""

    def _limit(self, peer: ID) -> None:
        """Of too many connections of one peer the oldest goes: the peer itself may not know yet that it is dead."""
        connections = sorted(self.get_connections(peer), key=lambda each: cast("Muxer", each.muxed_conn).opened_at)
        for each in connections[: -self._per_peer]:
            self.manager.run_task(self.end, each)


@contextlib.asynccontextmanager
async def running_host(key: Ed25519PrivateKey, listen: str, limits: HostLimits) -> AsyncIterator[IHost]:
    """A host of this key that listens at the multiaddr `listen` (/ip4/…/tcp/PORT; 0: any); raises OSError."""
    network = Network(key, limits)
    host = BasicHost(network, negotiate_timeout=int(UPGRADE_SECONDS), disable_identify_address_discovery=True)
    host.multiselect.handlers.clear()
    network.notifees.clear()  # they keep something of every peer that was ever here
    guard_streams(host)
    _, _, at, _, port = listen.split("/")
    async with host.run(listen_addrs=[]), trio.open_nursery() as nursery:
        listeners = list(await trio.open_tcp_listeners(int(port), host=at))
        network.port = listeners[0].socket.getsockname()[1]
        if at == "::":
            with contextlib.suppress(OSError):  # a system may have no IPv4, or serve it by the same socket
                listeners += await trio.open_tcp_listeners(network.port, host="0.0.0.0")  # noqa: S104
        nursery.start_soon(trio.serve_listeners, network.admit, listeners)
        nursery.start_soon(network.end_idle)
        try:
            yield host
        finally:
            network.stop_all()
            nursery.cancel_scope.cancel()


def _connections(limits: HostLimits) -> ConnectionConfig:
    most = 2 * limits.connections  # the door keeps the number; whoever has to go takes a moment
    return ConnectionConfig(
        max_connections=most,
        # The node calls whom it wants itself: nothing is to be called because there are few connections.
        min_connections=0,
        low_watermark=0,
        high_watermark=most,
        auto_connect_interval=86400.0,
        max_connections_per_peer=most,
        inbound_upgrade_timeout=UPGRADE_SECONDS,
        outbound_upgrade_timeout=UPGRADE_SECONDS,
        outbound_stream_protocol_negotiation_timeout=UPGRADE_SECONDS,
        inbound_stream_protocol_negotiation_timeout=UPGRADE_SECONDS,
    )


def guard_streams(host: IHost) -> None:
    """Nothing that a stream's handler raises leaves the stream."""
    network: Any = host.get_network()
    handle = network.common_stream_handler

    async def guarded(stream: INetStream) -> None:
        try:
            await handle(stream)
        except Exception as error:  # noqa: BLE001  (the boundary that this function is)
            log.debug("a stream failed: %s", describe(error))
            await reset(stream)

    network.set_stream_handler(guarded)


async def connect(host: IHost, address: Address, *, seconds: float, hearsay: bool = False) -> None:
    """Be connected to the peer at `address`; raises Unreachable.

    `hearsay`: it was a stranger who gave the address. A name in it has to stand for a public host then, or anybody
    could have this node knock at the doors of its own network.
    """
    network, peer = cast("Network", host.get_network()), peer_of(address.node)
    if network.get_connections(peer):
        return
    reached = await _resolved(address, seconds=seconds)
    if hearsay and address.kind in _FAMILIES:
        reached = [one for one in reached if ipaddress.ip_address(one).is_global]
    last = Unreachable("a name that stands for no public address")
    for one in reached:
        try:
            await network.call(one, address.port, peer, seconds=seconds / len(reached))
            return
        except Unreachable as error:
            last = error
    raise last


async def verify(host: IHost, address: Address, *, at: str, seconds: float) -> None:
    """See whether the peer at `address` has its key, and the IP address `at`; raises Unreachable.

    Its own, since this node would otherwise call whomever it is told to.
    """
    network = cast("Network", host.get_network())
    if address.relay is not None or at not in await _resolved(address, seconds=seconds):
        raise Unreachable("says that it is somewhere else")
    await network.call(at, address.port, peer_of(address.node), seconds=seconds, only_shake_hands=True)


async def _resolved(address: Address, *, seconds: float) -> list[str]:
    """The IP addresses behind an address, at most MAX_RESOLVED; raises Unreachable."""
    if address.kind not in _FAMILIES:
        return [address.host]
    try:
        with trio.fail_after(seconds):
            family = _FAMILIES[address.kind]
            found = await trio.socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM)
    except trio.TooSlowError as error:
        raise Unreachable(f"its name is not found within {seconds:.0f} s") from error
    except (OSError, UnicodeError) as error:
        raise Unreachable(_reason(error)) from error
    return [str(at[0]) for *_, at in found][:MAX_RESOLVED]


def _reason(error: Exception) -> str:
    """The operating system's own words."""
    inner = error.__cause__
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    said = inner if isinstance(inner, OSError) else error
    number = getattr(said, "errno", None) or 0
    # That of an unknown name is negative, and speaks for itself.
    text = os.strerror(number) if number > 0 else str(getattr(said, "strerror", None) or said)
    return text[:1].lower() + text[1:]


def what_answers(error: BaseException | None) -> str:
    """What is there instead of the peer, as far as the handshake tells."""
    while error is not None:
        if isinstance(error, PeerIDMismatchesPubkey):
            return "answers with another key"
        if isinstance(error, IOException):
            return "answers, and ends the connection"
        if isinstance(error, ParseError):
            return "answers, but not as a peer does"
        error = error.__cause__
    return "answers, but does not shake hands"


async def reset(stream: INetStream) -> None:
    """End a stream at once, whatever state it is in."""
    with trio.CancelScope(deadline=trio.current_time() + END_SECONDS, shield=True), contextlib.suppress(Exception):
        await stream.reset()


def peer_of(node: bytes) -> ID:
    """The PeerId of a raw public key (32 bytes)."""
    return ID.from_string(peer_id_of(node))


def node_of(stream: INetStream) -> bytes:
    """The raw public key (32 bytes) with which the other side has shaken hands; raises Malformed for other keys."""
    return public_key_of(str(stream.muxed_conn.peer_id))


def listening_port(host: IHost) -> int:
    """The TCP port that it listens on."""
    return cast("Network", host.get_network()).port
