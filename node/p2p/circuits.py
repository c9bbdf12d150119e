"""Circuits through a relay (libp2p specs, relay/circuit-v2.md): how a peer that nobody can call is reached after all.

It keeps a connection to a relay, and has reserved there. Whoever wants it asks the relay, and the two shake hands on a
stream of these connections as they do over TCP: each knows the other by its key, whatever the relay says.
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
from node.p2p.host import Unreachable, connect, peer_of, reset, what_answers
from node.p2p.thread import describe
from node.protocol.peers import Address, public_key_of
from shardcast.errors import Malformed

log = logging.getLogger(__name__)

HOP: Final = TProtocol("/libp2p/circuit/relay/0.2.0/hop")
STOP: Final = TProtocol("/libp2p/circuit/relay/0.2.0/stop")
MAX_MESSAGE_BYTES: Final = 4096
MESSAGE_SECONDS: Final = 5.0
PARTING_SECONDS: Final = 1.0
_ID_BYTES: Final = 38
"""Of the PeerId of an Ed25519 key."""

M = TypeVar("M", bound=Message)


class Circuit(ReadWriteCloser):
    """A relay's stream as the wire of a connection. `ended` is set when nothing comes or goes any more."""

    def __init__(self, stream: INetStream) -> None:
        self.ended = trio.Event()
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        """At most `n` bytes, none at the end; raises ConnectionClosedError."""
        if n == 0:
            return b""
        try:
            data = await self._stream.read(n)
        except Exception as error:
            self.ended.set()
            raise ConnectionClosedError(f"the circuit has ended: {describe(error)}") from error
        if not data:
            self.ended.set()
        return data

    async def write(self, data: bytes) -> None:
        """All of `data`; raises ConnectionClosedError."""
        try:
            await self._stream.write(data)
        except Exception as error:
            self.ended.set()
            raise ConnectionClosedError(f"the circuit has ended: {describe(error)}") from error

    async def close(self) -> None:
        """End it in both directions."""
        self.ended.set()
        await reset(self._stream)

    def get_remote_address(self) -> None:
        """Nobody knows; the relay's must not be taken for the peer's."""


async def reach(host: IHost, address: Address, *, seconds: float) -> None:
    """Be connected to the peer at `address`, by a circuit where it has a relay; raises Unreachable."""
    if address.relay is None:
        await connect(host, address, seconds=seconds)
        return
    if host.get_network().get_connections(peer_of(address.node)):
        return
    try:
        with trio.fail_after(seconds):
            await connect(host, Address(address.kind, address.host, address.port, address.relay), seconds=seconds)
            await _open(host, address.relay, address.node)
    except trio.TooSlowError as error:
        raise Unreachable(f"no circuit within {seconds:.0f} s") from error


async def _open(host: IHost, relay: bytes, node: bytes) -> None:
    try:
        stream = await host.new_stream(peer_of(relay), [HOP])
    except Exception as error:
        raise Unreachable("is no relay") from error
    try:
        await ask(stream, HopMessage(type=HopMessage.CONNECT, peer=named(node)))
        try:
            await host.upgrade_outbound_connection(relayed(Circuit(stream), initiator=True, relay=relay), peer_of(node))
        except Exception as error:
            raise Unreachable(what_answers(error)) from error
    except BaseException:
        await reset(stream)
        raise


async def ask(stream: INetStream, request: HopMessage) -> None:
    """Ask a relay; raises Unreachable where it does not grant it, and trio.TooSlowError."""
    try:
        await write_message(stream, request)
        # For a circuit, the relay asks the other peer first.
        answer = await read_message(stream, HopMessage, seconds=3 * MESSAGE_SECONDS)
    except (IOException, Malformed) as error:
        raise Unreachable(f"the relay does not answer ({describe(error)})") from error
    if answer.type != HopMessage.STATUS or answer.status != Status.OK:
        status = Status.Name(answer.status) if answer.status in Status.values() else answer.status
        raise Unreachable(f"the relay refuses ({status})")


async def let_in(host: IHost, stream: INetStream, *, relay: bytes) -> tuple[Circuit, IMuxedConn]:
    """The connection of whoever is at the other end of a relay's stream; raises whatever libp2p does."""
    circuit = Circuit(stream)
    raw = relayed(circuit, initiator=False, relay=relay)
    return circuit, await host.upgrade_inbound_connection(raw, raw.get_transport_addresses()[0])


def relayed(circuit: Circuit, *, initiator: bool, relay: bytes) -> RawConnection:
    """What libp2p makes a connection of, and knows for a relayed one."""
    return RawConnection(
        circuit,
        initiator,
        connection_type=ConnectionType.RELAYED,
        addresses=[Multiaddr(f"/p2p/{peer_of(relay)}/p2p-circuit")],
    )


def is_relayed(stream: INetStream) -> bool:
    """Whether it came through a relay."""
    return stream.muxed_conn.get_connection_type() == ConnectionType.RELAYED


async def read_message(stream: INetStream, kind: type[M], *, seconds: float = MESSAGE_SECONDS) -> M:
    """A message after its length as a varint, of at most two bytes; raises Malformed and trio.TooSlowError."""
    with trio.fail_after(seconds):
        size = (await read_exactly(stream, 1))[0]
        if size >= 0x80:
            size += ((await read_exactly(stream, 1))[0] << 7) - 0x80
        if size > MAX_MESSAGE_BYTES:
            raise Malformed(f"a message of {size} bytes, at most {MAX_MESSAGE_BYTES} are taken", code="oversized")
        data = await read_exactly(stream, size)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Malformed(f"not a {kind.__name__}", code="not_protobuf") from error


async def write_message(stream: INetStream, message: Message) -> None:
    """Send it, after its length; raises trio.TooSlowError when the peer does not take it."""
    data = message.SerializeToString()
    size = len(data)
    head = bytes((size,)) if size < 0x80 else bytes((size & 0x7F | 0x80, size >> 7))
    with trio.fail_after(FRAME_SECONDS):
        await stream.write(head + data)


async def part(stream: INetStream, last: Message) -> None:
    """Say the last word, give the peer a moment to read it, and leave nothing of the stream behind."""
    try:
        await write_message(stream, last)
        await stream.close()
        with trio.move_on_after(PARTING_SECONDS):
            await stream.read(1)
    except Exception as error:  # noqa: BLE001  (the stream is over, one way or the other)
        log.debug("a stream ended before its answer: %s", describe(error))
    finally:
        await reset(stream)


def named(node: bytes) -> PeerId:
    """The name of a public key (32 bytes) in a message."""
    return PeerId(id=peer_of(node).to_bytes())


def node_in(peer: PeerId) -> bytes:
    """The public key (32 bytes) named in a message; raises Malformed."""
    if len(peer.id) != _ID_BYTES:
        raise Malformed("not the PeerId of an Ed25519 key", code="bad_peer_id")
    return public_key_of(str(ID(peer.id)))
