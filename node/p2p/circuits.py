"""Circuits through a relay (libp2p specs, relay/circuit-v2.md), for peers that cannot be dialled directly.

Such a peer keeps a connection and a reservation at a relay. Whoever wants it connects through the relay, and the two
handshake over that stream as over TCP: each authenticates the other's key, whatever the relay says.
"""

from __future__ import annotations

import logging
from typing import Final, TypeVar

import trio
from google.protobuf.message import DecodeError, Message
from libp2p.abc import IHost, IMuxedConn, INetStream
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status
from multiaddr import Multiaddr

from node.p2p.frames import FRAME_SECONDS, read_exactly
from node.p2p.host import PeerUnreachable, connect, handshake_failure, peer_of, reset
from node.p2p.thread import describe
from node.protocol.peers import Address, public_key_of
from shardcast.errors import Malformed

log = logging.getLogger(__name__)

HOP: Final = TProtocol("/libp2p/circuit/relay/0.2.0/hop")
STOP: Final = TProtocol("/libp2p/circuit/relay/0.2.0/stop")
MAX_MESSAGE_BYTES: Final = 4096
MESSAGE_SECONDS: Final = 5.0
CLOSING_SECONDS: Final = 1.0
_ID_BYTES: Final = 38
"""Size of the PeerId of an Ed25519 key."""

M = TypeVar("M", bound=Message)


class Circuit(ReadWriteCloser):
    """A relay's stream used as a raw connection. `ended` is set once it is closed in either direction."""

    def __init__(self, stream: INetStream) -> None:
        self.ended = trio.Event()
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        """Read at most `n` bytes, none at the end; raises ConnectionClosedError."""
        if n == 0:
            return b""
        try:
            data = await self._stream.read(n)
        except Exception as error:
            self.ended.set()
            raise ConnectionClosedError(f"circuit closed: {describe(error)}") from error
        if not data:
            self.ended.set()
        return data

    async def write(self, data: bytes) -> None:
        """Write all of `data`; raises ConnectionClosedError."""
        try:
            await self._stream.write(data)
        except Exception as error:
            self.ended.set()
            raise ConnectionClosedError(f"circuit closed: {describe(error)}") from error

    async def close(self) -> None:
        """Close both directions."""
        self.ended.set()
        await reset(self._stream)

    def get_remote_address(self) -> None:
        """Return None: the relay's address must not be taken for the peer's."""


async def reach(host: IHost, address: Address, *, seconds: float) -> None:
    """Connect to the peer at `address`, through a circuit if it names a relay; raises PeerUnreachable."""
    if address.relay is None:
        await connect(host, address, seconds=seconds)
        return
    if host.get_network().get_connections(peer_of(address.node)):
        return
    try:
        with trio.fail_after(seconds):
            await connect(host, Address(address.kind, address.host, address.port, address.relay), seconds=seconds)
            await _open_circuit(host, address.relay, address.node)
    except trio.TooSlowError as error:
        raise PeerUnreachable(f"no circuit opened within {seconds:.0f} s") from error


async def _open_circuit(host: IHost, relay: bytes, node: bytes) -> None:
    try:
        stream = await host.new_stream(peer_of(relay), [HOP])
    except Exception as error:
        raise PeerUnreachable("is not a relay") from error
    try:
        await request_relay(stream, HopMessage(type=HopMessage.CONNECT, peer=peer_id_message(node)))
        try:
            await host.upgrade_outbound_connection(
                relayed_connection(Circuit(stream), initiator=True, relay=relay), peer_of(node)
            )
        except Exception as error:
            raise PeerUnreachable(handshake_failure(error)) from error
    except BaseException:
        await reset(stream)
        raise


async def request_relay(stream: INetStream, request: HopMessage) -> None:
    """Send a request to a relay; raises PeerUnreachable unless it is granted, and trio.TooSlowError."""
    try:
        await write_message(stream, request)
        # For a circuit, the relay contacts the other peer first.
        reply = await read_message(stream, HopMessage, seconds=3 * MESSAGE_SECONDS)
    except (IOException, Malformed) as error:
        raise PeerUnreachable(f"relay does not respond ({describe(error)})") from error
    if reply.type != HopMessage.STATUS or reply.status != Status.OK:
        status = Status.Name(reply.status) if reply.status in Status.values() else reply.status
        raise PeerUnreachable(f"relay refuses ({status})")


async def accept_circuit(host: IHost, stream: INetStream, *, relay: bytes) -> tuple[Circuit, IMuxedConn]:
    """Accept the connection at the other end of a relay's stream; raises whatever libp2p does."""
    circuit = Circuit(stream)
    raw = relayed_connection(circuit, initiator=False, relay=relay)
    return circuit, await host.upgrade_inbound_connection(raw, raw.get_transport_addresses()[0])


def relayed_connection(circuit: Circuit, *, initiator: bool, relay: bytes) -> RawConnection:
    """Wrap a circuit as a raw connection that libp2p recognises as relayed."""
    return RawConnection(
        circuit,
        initiator,
        connection_type=ConnectionType.RELAYED,
        addresses=[Multiaddr(f"/p2p/{peer_of(relay)}/p2p-circuit")],
    )


def is_relayed(stream: INetStream) -> bool:
    """Return whether the stream came through a relay."""
    return stream.muxed_conn.get_connection_type() == ConnectionType.RELAYED


async def read_message(stream: INetStream, kind: type[M], *, seconds: float = MESSAGE_SECONDS) -> M:
    """Read a message prefixed by its length (varint of at most two bytes); raises Malformed and trio.TooSlowError."""
    with trio.fail_after(seconds):
        size = (await read_exactly(stream, 1))[0]
        if size >= 0x80:
            size += ((await read_exactly(stream, 1))[0] << 7) - 0x80
        if size > MAX_MESSAGE_BYTES:
            raise Malformed(f"message of {size} bytes exceeds the limit of {MAX_MESSAGE_BYTES}", code="oversized")
        data = await read_exactly(stream, size)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Malformed(f"message is not a {kind.__name__}", code="not_protobuf") from error


async def write_message(stream: INetStream, message: Message) -> None:
    """Write a length-prefixed message; raises trio.TooSlowError if the peer does not read it."""
    data = message.SerializeToString()
    size = len(data)
    head = bytes((size,)) if size < 0x80 else bytes((size & 0x7F | 0x80, size >> 7))
    with trio.fail_after(FRAME_SECONDS):
        await stream.write(head + data)


async def send_and_close(stream: INetStream, last: Message) -> None:
    """Send a final message, give the peer a moment to read it, and reset the stream; raises nothing."""
    try:
        await write_message(stream, last)
        await stream.close()
        with trio.move_on_after(CLOSING_SECONDS):
            await stream.read(1)
    except Exception as error:  # noqa: BLE001  (the stream ends in any case)
        log.debug("stream closed before the final message: %s", describe(error))
    finally:
        await reset(stream)


def peer_id_message(node: bytes) -> PeerId:
    """Encode a public key (32 bytes) as a PeerId message."""
    return PeerId(id=peer_of(node).to_bytes())


def node_of_message(peer: PeerId) -> bytes:
    """Decode the public key (32 bytes) of a PeerId message; raises Malformed."""
    if len(peer.id) != _ID_BYTES:
        raise Malformed("PeerId is not that of an Ed25519 key", code="bad_peer_id")
    return public_key_of(str(ID(peer.id)))
