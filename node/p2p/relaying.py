"""Relay side of circuits (`node.p2p.circuits`): reservations, and circuits to peers that hold one.

Circuits carry control traffic only, so they are few, short and small. A relay sees who talks to whom and how much, but
cannot read or impersonate.

py-libp2p 0.8.1's own relay is not used: it accepts reservations in any peer's name, so one stream fills its table for
an hour; its circuits end only when something is sent; and of two circuits to one peer, the end of one ends the other.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.abc import IHost, INetStream
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, Reservation, Status, StopMessage

from node.discovery.peer_book import subnet_of
from node.p2p.circuits import (
    MESSAGE_SECONDS,
    STOP,
    is_relayed,
    node_of_message,
    peer_id_message,
    read_message,
    send_and_close,
    write_message,
)
from node.p2p.frames import FRAME_SECONDS
from node.p2p.host import node_of, peer_of, reset
from node.p2p.thread import describe
from node.protocol.peers import peer_id_of
from shardcast.errors import Malformed

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Limits of a relay: in total, per subnet (`subnet_of`) and per peer; a request counts while its stream is open.

    A circuit ends after `circuit_seconds`, or `circuit_bytes` of both directions together, whichever is first.
    """

    reservations: int = 64
    reservations_per_subnet: int = 16
    reservation_seconds: int = 1800
    circuits: int = 16
    circuits_per_peer: int = 4
    circuit_seconds: int = 120
    circuit_bytes: int = 2**20
    requests: int = 64
    requests_per_peer: int = 8


@dataclass(frozen=True, slots=True)
class _ReservationEntry:
    ends_at: int
    subnet: str


class CircuitRelay:
    """Serves HOP. `unwanted(public_key)` tells whom to refuse at either end of a circuit."""

    def __init__(self, host: IHost, limits: RelayLimits, *, unwanted: Callable[[bytes], bool]) -> None:
        self._host, self._limits, self._unwanted = host, limits, unwanted
        self._reserved: dict[bytes, _ReservationEntry] = {}
        self._circuits: Counter[bytes] = Counter()
        self._requests: Counter[bytes] = Counter()

    def status(self) -> dict[str, int]:
        """Return usage counters, ready for JSON."""
        return {"reservations": len(self._reserved), "circuits": self._circuits.total() // 2}

    def holds(self, node: bytes) -> bool:
        """Return whether the peer has a valid reservation and is connected."""
        reserved = self._reserved.get(node)
        return reserved is not None and reserved.ends_at > time.time() and _is_connected(self._host, node)

    async def serve(self, stream: INetStream) -> None:
        """Serve one request: a reservation, or a circuit to a peer that has one."""
        source, limits = node_of(stream), self._limits
        if self._requests.total() >= limits.requests or self._requests[source] >= limits.requests_per_peer:
            await reset(stream)
            return
        with _counted(self._requests, source):
            try:
                reply = await self._reply(source, stream, await read_message(stream, HopMessage))
            except Malformed as error:
                log.debug("peer %s sent a malformed circuit request: %s", peer_id_of(source), error)
                reply = _status(Status.MALFORMED_MESSAGE)
            if reply is not None:
                await send_and_close(stream, reply)

    async def _reply(self, source: bytes, stream: INetStream, request: HopMessage) -> HopMessage | None:
        """Handle a request and return the reply; None if the stream became a circuit."""
        if is_relayed(stream) or self._unwanted(source):
            return _status(Status.PERMISSION_DENIED)
        if request.type == HopMessage.RESERVE:
            return self._reserve(source, stream)
        if request.type == HopMessage.CONNECT:
            return await self._connect(source, stream, node_of_message(request.peer))
        return _status(Status.UNEXPECTED_MESSAGE)

    def _reserve(self, source: bytes, stream: INetStream) -> HopMessage:
        """Grant or renew a reservation of the authenticated peer, whatever name the message carries."""
        self._drop_lapsed()
        remote = stream.get_remote_address()
        subnet, limits = "" if remote is None else subnet_of(remote[0]), self._limits
        others = [each.subnet for node, each in self._reserved.items() if node != source]
        if len(others) >= limits.reservations or others.count(subnet) >= limits.reservations_per_subnet:
            return _status(Status.RESERVATION_REFUSED)
        ends_at = int(time.time()) + limits.reservation_seconds
        self._reserved[source] = _ReservationEntry(ends_at, subnet)
        reply = _status(Status.OK, self._limit())
        reply.reservation.CopyFrom(Reservation(expire=ends_at))
        return reply

    async def _connect(self, source: bytes, stream: INetStream, target: bytes) -> HopMessage | None:
        limits, circuits = self._limits, self._circuits
        if self._unwanted(target):
            return _status(Status.PERMISSION_DENIED)
        if not self.holds(target):
            return _status(Status.NO_RESERVATION)
        if (
            circuits.total() >= 2 * limits.circuits
            or max(circuits[source], circuits[target]) >= limits.circuits_per_peer
        ):
            return _status(Status.RESOURCE_LIMIT_EXCEEDED)
        with _counted(circuits, source), _counted(circuits, target):
            onward = await self._open_onward(source, target)
            if onward is None:
                return _status(Status.CONNECTION_FAILED)
            try:
                await write_message(stream, _status(Status.OK, self._limit()))
                await self._forward(stream, onward)
            finally:
                await reset(onward)
                await reset(stream)
        return None

    async def _open_onward(self, source: bytes, target: bytes) -> INetStream | None:
        """Open a stream on which the target agreed to the circuit; None if it did not."""
        stream = None
        try:
            with trio.fail_after(MESSAGE_SECONDS):
                stream = await self._host.new_stream(peer_of(target), [STOP])
            await write_message(
                stream, StopMessage(type=StopMessage.CONNECT, peer=peer_id_message(source), limit=self._limit())
            )
            reply = await read_message(stream, StopMessage)
            if reply.type == StopMessage.STATUS and reply.status == Status.OK:
                return stream
            log.debug("peer %s refused a circuit: status %d", peer_id_of(target), reply.status)
        except Exception as error:  # noqa: BLE001  (any failure is the target's)
            log.debug("cannot open a circuit to %s: %s", peer_id_of(target), describe(error))
        if stream is not None:
            await reset(stream)
        return None

    async def _forward(self, first: INetStream, second: INetStream) -> None:
        """Copy both ways until either end closes or a limit is reached."""
        bytes_left = self._limits.circuit_bytes

        async def copy(source: INetStream, sink: INetStream) -> None:
            nonlocal bytes_left
            try:
                while (piece := await source.read(PIECE_BYTES)) and len(piece) <= bytes_left:
                    bytes_left -= len(piece)
                    # A cancelled write would break the connection below, and every other stream on it.
                    with trio.CancelScope(deadline=trio.current_time() + FRAME_SECONDS, shield=True):
                        await sink.write(piece)
            except Exception as error:  # noqa: BLE001  (the circuit's normal end)
                log.debug("circuit closed: %s", describe(error))
            nursery.cancel_scope.cancel()

        with trio.move_on_after(self._limits.circuit_seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(copy, first, second)
                nursery.start_soon(copy, second, first)

    def _limit(self) -> Limit:
        return Limit(duration=self._limits.circuit_seconds, data=self._limits.circuit_bytes)

    def _drop_lapsed(self) -> None:
        for node in [node for node in self._reserved if not self.holds(node) or self._unwanted(node)]:
            del self._reserved[node]


@contextlib.contextmanager
def _counted(counter: Counter[bytes], node: bytes) -> Iterator[None]:
    counter[node] += 1
    try:
        yield
    finally:
        counter[node] -= 1
        if not counter[node]:
            del counter[node]


def _status(status: Status.ValueType, limit: Limit | None = None) -> HopMessage:
    return HopMessage(type=HopMessage.STATUS, status=status, limit=limit)


def _is_connected(host: IHost, node: bytes) -> bool:
    return bool(host.get_network().get_connections(peer_of(node)))
