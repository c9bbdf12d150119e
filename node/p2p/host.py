"""libp2p host for a hostile network: TCP, Noise and Yamux, few connections, and isolated handler errors.

From py-libp2p 0.8.1 it uses the handshakes, the multiplexer and protocol negotiation. It leaves out plaintext, under
which anybody could impersonate anybody; Mplex; identify, which lets a peer name addresses to dial; its dialler, which
hides why a dial failed; its resource manager, which has global limits but none per peer; GossipSub and Kademlia
(docs/adr/0018). A host built by `new_host` accepts as many connections in its lifetime as it may have at once, and dies
of any exception that leaves a stream handler.
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

from node.p2p.admission import AdmissionControl, InboundConnection
from node.p2p.thread import describe
from node.p2p.transport import BoundedMuxer, TcpStream, Upgrader
from node.protocol.peers import Address, peer_id_of, public_key_of

log = logging.getLogger(__name__)

for _noisy in ("libp2p", "multiaddr", "async_service"):
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)  # they log each peer's misconduct with a traceback

UPGRADE_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 1.0
IDLE_SECONDS: Final = 120.0
IDLE_CHECK_SECONDS: Final = 10.0
OUTBOUND_RESERVE: Final = 16
"""Connections reserved for outbound dials: inbound ones must not use up the last slot."""

MAX_RESOLVED: Final = 4
_FAMILIES: Final = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


class PeerUnreachable(Exception):
    """A peer could not be reached; the message gives the operating system's reason, or what responded instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Connections in total and per peer, and the deadline for a dial with its handshake."""

    connections: int = 128
    per_peer: int = 2
    dial_seconds: float = 5.0


class PeerSwarm(Swarm):
    """A libp2p swarm with admission control for inbound connections."""

    def __init__(self, key: Ed25519PrivateKey, limits: HostLimits) -> None:
        pair = create_new_key_pair(key.private_bytes_raw())
        own, peerstore = ID.from_pubkey(pair.public_key), PeerStore()
        peerstore.add_key_pair(own, pair)
        noise = NoiseTransport(pair, create_noise_key_pair().private_key)
        upgrader = Upgrader({NOISE: noise}, {TProtocol(YAMUX): BoundedMuxer})
        super().__init__(own, peerstore, upgrader, [], connection_config=_connection_config(limits))
        self.admission = AdmissionControl(capacity=max(1, limits.connections - OUTBOUND_RESERVE))
        self.port = 0
        self._per_peer = limits.per_peer

    async def admit(self, tcp: trio.SocketStream) -> None:
        """Serve an inbound connection until it closes or is evicted; raises nothing."""
        stream, inbound = TcpStream(tcp), None
        try:
            remote = stream.get_remote_address()
            inbound = None if remote is None else self.admission.admit(remote[0])
            if inbound is not None:
                with inbound.scope:
                    await self._serve_inbound(inbound, stream)
        except Exception as error:  # noqa: BLE001  (affects this connection only)
            log.debug("inbound connection failed: %s", describe(error))
        finally:
            stream.stop()
            if inbound is not None:
                self.admission.release(inbound)

    async def _serve_inbound(self, inbound: InboundConnection, stream: TcpStream) -> None:
        with trio.fail_after(2 * UPGRADE_SECONDS):
            nowhere = multiaddr.Multiaddr("/ip4/0.0.0.0")
            muxed = cast("BoundedMuxer", await self.upgrade_inbound_raw_conn(RawConnection(stream, False), nowhere))
        muxed.tcp, inbound.handshaken, inbound.busy = stream, True, lambda: bool(muxed.streams)
        try:
            self._close_excess(muxed.peer_id)
            await muxed.event_closed.wait()
        finally:
            for connection in self.get_connections(muxed.peer_id):
                if connection.muxed_conn is muxed:
                    await self.close_connection(connection)

    async def dial(self, host: str, port: int, peer: ID, *, seconds: float, handshake_only: bool = False) -> None:
        """Dial a peer, or with `handshake_only` just verify its key; raises PeerUnreachable."""
        stream, done = None, False
        try:
            with trio.fail_after(seconds):
                stream = TcpStream(await trio.open_tcp_stream(host, port))
                raw = RawConnection(stream, True)
                if handshake_only:
                    await self.upgrader.upgrade_security(raw, True, peer)
                else:
                    connection = await self.upgrade_outbound_raw_conn(raw, peer)
                    cast("BoundedMuxer", connection.muxed_conn).tcp, done = stream, True
        except trio.TooSlowError as error:
            stage = "no response" if stream is None else "responds, but does not complete the handshake"
            raise PeerUnreachable(f"{stage} within {seconds:.0f} s") from error
        except OSError as error:
            raise PeerUnreachable(_os_error_text(error)) from error
        except Exception as error:
            raise PeerUnreachable(handshake_failure(error)) from error
        finally:
            if stream is not None and not done:
                stream.stop()

    async def close_connection(self, connection: INetConn) -> None:
        """Close a connection and all its streams, whatever the peer does; raises nothing."""
        tcp = cast("BoundedMuxer", connection.muxed_conn).tcp
        if tcp is not None:
            tcp.stop()  # avoids waiting for a goodbye the peer does not read
        deadline = trio.current_time() + CLOSE_SECONDS
        with trio.CancelScope(deadline=deadline, shield=True), contextlib.suppress(Exception):
            await connection.close()
        self.remove_conn(cast("Any", connection))

    def stop_all(self) -> None:
        """Close every connection at once, without a goodbye."""
        for connection in self.get_connections():
            tcp = cast("BoundedMuxer", connection.muxed_conn).tcp
            if tcp is not None:
                tcp.stop()

    async def close_idle(self) -> None:
        """Close connections without traffic for IDLE_SECONDS; never returns."""
        while True:
            await trio.sleep(IDLE_CHECK_SECONDS)
            since = trio.current_time() - IDLE_SECONDS
            for connection in self.get_connections():
                muxed = cast("BoundedMuxer", connection.muxed_conn)
                if not muxed.streams and muxed.used_at < since:
                    await self.close_connection(connection)

    async def notify_disconnected(self, conn: INetConn) -> None:
        """Do nothing: libp2p would keep a record of every peer that ever disconnected."""

    def _close_excess(self, peer: ID) -> None:
        """Close a peer's oldest excess connections: the peer may not know yet that they are dead."""
        connections = sorted(
            self.get_connections(peer), key=lambda each: cast("BoundedMuxer", each.muxed_conn).opened_at
        )
        for each in connections[: -self._per_peer]:
            self.manager.run_task(self.close_connection, each)


@contextlib.asynccontextmanager
async def running_host(key: Ed25519PrivateKey, listen: str, limits: HostLimits) -> AsyncIterator[IHost]:
    """Run a host that listens at the multiaddr `listen` (/ip4/…/tcp/PORT; 0: any free port); raises OSError."""
    network = PeerSwarm(key, limits)
    host = BasicHost(network, negotiate_timeout=int(UPGRADE_SECONDS), disable_identify_address_discovery=True)
    host.multiselect.handlers.clear()
    network.notifees.clear()  # they keep state for every peer ever seen
    guard_streams(host)
    _, _, at, _, port = listen.split("/")
    async with host.run(listen_addrs=[]), trio.open_nursery() as nursery:
        listeners = list(await trio.open_tcp_listeners(int(port), host=at))
        network.port = listeners[0].socket.getsockname()[1]
        if at == "::":
            with contextlib.suppress(OSError):  # the system may lack IPv4, or serve it on the same socket
                listeners += await trio.open_tcp_listeners(network.port, host="0.0.0.0")  # noqa: S104
        nursery.start_soon(trio.serve_listeners, network.admit, listeners)
        nursery.start_soon(network.close_idle)
        try:
            yield host
        finally:
            network.stop_all()
            nursery.cancel_scope.cancel()


def _connection_config(limits: HostLimits) -> ConnectionConfig:
    max_connections = 2 * limits.connections  # admission enforces the limit; eviction takes a moment
    return ConnectionConfig(
        max_connections=max_connections,
        # No automatic dialling: this node chooses whom to dial.
        min_connections=0,
        low_watermark=0,
        high_watermark=max_connections,
        auto_connect_interval=86400.0,
        max_connections_per_peer=max_connections,
        inbound_upgrade_timeout=UPGRADE_SECONDS,
        outbound_upgrade_timeout=UPGRADE_SECONDS,
        outbound_stream_protocol_negotiation_timeout=UPGRADE_SECONDS,
        inbound_stream_protocol_negotiation_timeout=UPGRADE_SECONDS,
    )


def guard_streams(host: IHost) -> None:
    """Wrap the host's stream handler so that an exception only resets its stream."""
    network: Any = host.get_network()
    handle = network.common_stream_handler

    async def guarded(stream: INetStream) -> None:
        try:
            await handle(stream)
        except Exception as error:  # noqa: BLE001  (this function is the boundary)
            log.debug("stream handler failed: %s", describe(error))
            await reset(stream)

    network.set_stream_handler(guarded)


async def connect(host: IHost, address: Address, *, seconds: float, gossiped: bool = False) -> None:
    """Connect to the peer at `address`; raises PeerUnreachable.

    `gossiped`: the address came from a stranger, so a name in it must resolve to public addresses. Otherwise anybody
    could have this node probe its own network.
    """
    network, peer = cast("PeerSwarm", host.get_network()), peer_of(address.node)
    if network.get_connections(peer):
        return
    hosts = await _resolve(address, seconds=seconds)
    if gossiped and address.kind in _FAMILIES:
        hosts = [ip for ip in hosts if ipaddress.ip_address(ip).is_global]
    error_of_last = PeerUnreachable("name resolves to no public address")
    for ip in hosts:
        try:
            await network.dial(ip, address.port, peer, seconds=seconds / len(hosts))
            return
        except PeerUnreachable as error:
            error_of_last = error
    raise error_of_last


async def verify(host: IHost, address: Address, *, at: str, seconds: float) -> None:
    """Verify that the peer at `address` has its key and the IP address `at`; raises PeerUnreachable.

    `at` is where the peer connected from: otherwise peers could make this node dial third parties.
    """
    network = cast("PeerSwarm", host.get_network())
    if address.relay is not None or at not in await _resolve(address, seconds=seconds):
        raise PeerUnreachable("announces another address than it connects from")
    await network.dial(at, address.port, peer_of(address.node), seconds=seconds, handshake_only=True)


async def _resolve(address: Address, *, seconds: float) -> list[str]:
    """Resolve an address to at most MAX_RESOLVED IP addresses; raises PeerUnreachable."""
    if address.kind not in _FAMILIES:
        return [address.host]
    try:
        with trio.fail_after(seconds):
            family = _FAMILIES[address.kind]
            found = await trio.socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM)
    except trio.TooSlowError as error:
        raise PeerUnreachable(f"name not resolved within {seconds:.0f} s") from error
    except (OSError, UnicodeError) as error:
        raise PeerUnreachable(_os_error_text(error)) from error
    return [str(at[0]) for *_, at in found][:MAX_RESOLVED]


def _os_error_text(error: Exception) -> str:
    """Return the operating system's error message, uncapitalised."""
    inner = error.__cause__
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    os_error = inner if isinstance(inner, OSError) else error
    number = getattr(os_error, "errno", None) or 0
    # A getaddrinfo error has a negative number and its own text.
    text = os.strerror(number) if number > 0 else str(getattr(os_error, "strerror", None) or os_error)
    return text[:1].lower() + text[1:]


def handshake_failure(error: BaseException | None) -> str:
    """Describe what responded instead of the peer, as far as the handshake error tells."""
    while error is not None:
        if isinstance(error, PeerIDMismatchesPubkey):
            return "responds with another key"
        if isinstance(error, IOException):
            return "responds, but closes the connection"
        if isinstance(error, ParseError):
            return "responds, but not as a peer"
        error = error.__cause__
    return "responds, but does not complete the handshake"


async def reset(stream: INetStream) -> None:
    """Reset a stream in any state; raises nothing."""
    with trio.CancelScope(deadline=trio.current_time() + CLOSE_SECONDS, shield=True), contextlib.suppress(Exception):
        await stream.reset()


def peer_of(node: bytes) -> ID:
    """Return the PeerId of a raw public key (32 bytes)."""
    return ID.from_string(peer_id_of(node))


def node_of(stream: INetStream) -> bytes:
    """Return the peer's authenticated raw public key (32 bytes); raises Malformed for other key types."""
    return public_key_of(str(stream.muxed_conn.peer_id))


def listening_port(host: IHost) -> int:
    """Return the TCP port the host listens on."""
    return cast("PeerSwarm", host.get_network()).port
