"""Reservations at relays for a node that cannot be dialled, and the circuits that arrive through them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.abc import IHost, INetStream
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status, StopMessage

from node.p2p.circuits import (
    HOP,
    accept_circuit,
    is_relayed,
    node_of_message,
    peer_id_message,
    read_message,
    request_relay,
    send_and_close,
    write_message,
)
from node.p2p.host import connect, node_of, peer_of, reset
from node.p2p.thread import describe
from node.protocol.peers import Address, peer_id_of
from shardcast.errors import Malformed

log = logging.getLogger(__name__)

WANTED: Final = 2
CHECK_SECONDS: Final = 1.0
RENEW_SECONDS: Final = 60.0
"""Renewal interval; it also keeps a NAT's mapping alive."""

RESERVE_SECONDS: Final = 10.0
BACKOFF_SECONDS: Final = (2.0, 120.0)
MAX_CIRCUITS: Final = 8
CIRCUIT_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class _HeldReservation:
    relay: Address
    renewed_at: float


@dataclass(frozen=True, slots=True)
class _Backoff:
    wait_seconds: float
    not_before: float


class Reservations:
    """Holds up to two reservations while `needed()` is true; serves STOP.

    `relays` returns candidate relays; `changed` is called when `addresses` has changed; `unwanted(public_key)` tells
    whom to refuse.
    """

    def __init__(
        self,
        host: IHost,
        own: bytes,
        *,
        relays: Callable[[], Iterable[Address]],
        needed: Callable[[], bool],
        changed: Callable[[], None],
        unwanted: Callable[[bytes], bool],
    ) -> None:
        self._host, self._own, self._relays = host, own, relays
        self._needed, self._changed, self._unwanted = needed, changed, unwanted
        self._held: dict[bytes, _HeldReservation] = {}
        self._backoffs: dict[bytes, _Backoff] = {}
        self._open_circuits = 0

    def addresses(self) -> tuple[Address, ...]:
        """Return the relayed addresses of this node."""
        relays = [held.relay for held in self._held.values()]
        return tuple(Address(each.kind, each.host, each.port, self._own, relay=each.node) for each in relays)

    async def run(self) -> None:
        """Maintain the reservations forever; never returns."""
        while True:
            before = set(self._held)
            self._drop()
            if self._needed():
                await self._renew()
                await self._reserve_more()
            if set(self._held) != before:
                self._changed()
            await trio.sleep(CHECK_SECONDS)

    async def serve(self, stream: INetStream) -> None:
        """Serve a circuit announced by a relay that holds a reservation."""
        relay = node_of(stream)
        if relay not in self._held or self._open_circuits >= MAX_CIRCUITS or is_relayed(stream):
            await reset(stream)
            return
        self._open_circuits += 1
        try:
            with trio.move_on_after(CIRCUIT_SECONDS):
                await self._serve_circuit(relay, stream)
        finally:
            self._open_circuits -= 1
            await reset(stream)

    async def _serve_circuit(self, relay: bytes, stream: INetStream) -> None:
        try:
            request = await read_message(stream, StopMessage)
            source = node_of_message(request.peer)
        except Malformed:
            await send_and_close(stream, _status(Status.MALFORMED_MESSAGE))
            raise
        if request.type != StopMessage.CONNECT or self._unwanted(source):
            await send_and_close(stream, _status(Status.PERMISSION_DENIED))
            return
        await write_message(stream, _status(Status.OK))
        circuit, connection = await accept_circuit(self._host, stream, relay=relay)
        try:
            if connection.peer_id != peer_of(source):
                raise Malformed("relay announced another peer than the one connecting", code="foreign_circuit")
            await circuit.ended.wait()
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                await connection.close()

    def _drop(self) -> None:
        """Drop reservations that are disconnected, not renewed, unwanted or no longer needed."""
        now, needed = trio.current_time(), self._needed()
        for node, held in list(self._held.items()):
            connected = self._host.get_network().get_connections(peer_of(node))
            if not needed or not connected or now - held.renewed_at > 3 * RENEW_SECONDS or self._unwanted(node):
                del self._held[node]

    async def _renew(self) -> None:
        now = trio.current_time()
        for held in list(self._held.values()):
            if now - held.renewed_at > RENEW_SECONDS:
                await self._reserve(held.relay)

    async def _reserve_more(self) -> None:
        now = trio.current_time()
        relays = {each.node: each for each in self._relays() if each.relay is None and not self._unwanted(each.node)}
        candidates = [each for node, each in relays.items() if node not in self._held and self._may_request(node, now)]
        random.shuffle(candidates)
        for relay in candidates[: WANTED - len(self._held)]:
            await self._reserve(relay)

    async def _reserve(self, relay: Address) -> None:
        try:
            with trio.fail_after(RESERVE_SECONDS):
                await connect(self._host, relay, seconds=RESERVE_SECONDS)
                stream = await self._host.new_stream(peer_of(relay.node), [HOP])
                try:
                    await request_relay(stream, HopMessage(type=HopMessage.RESERVE, peer=peer_id_message(self._own)))
                finally:
                    await reset(stream)
        except Exception as error:  # noqa: BLE001  (another relay is tried, or this one later)
            self._note_refusal(relay, describe(error))
            return
        self._backoffs.pop(relay.node, None)
        if relay.node not in self._held:
            log.info("reachable through the relay at %s:%d", relay.host, relay.port)
        self._held[relay.node] = _HeldReservation(relay, trio.current_time())

    def _note_refusal(self, relay: Address, why: str) -> None:
        shortest, longest = BACKOFF_SECONDS
        previous = self._backoffs.get(relay.node)
        wait = shortest if previous is None else min(longest, 2 * previous.wait_seconds)
        self._backoffs[relay.node] = _Backoff(wait, trio.current_time() + wait)
        while len(self._backoffs) > 1024:
            del self._backoffs[next(iter(self._backoffs))]
        log.debug("cannot reserve at %s: %s", peer_id_of(relay.node), why)

    def _may_request(self, node: bytes, now: float) -> bool:
        refused = self._backoffs.get(node)
        return refused is None or refused.not_before <= now


def _status(status: Status.ValueType) -> StopMessage:
    return StopMessage(type=StopMessage.STATUS, status=status)
