"""The part of a node that nobody can call: it reserves at relays, and lets in whom they announce."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.abc import IHost, INetStream
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status, StopMessage

from node.p2p.circuits import HOP, ask, is_relayed, let_in, named, node_in, part, read_message, write_message
from node.p2p.host import connect, node_of, peer_of, reset
from node.p2p.thread import describe
from node.protocol.peers import Address, peer_id_of
from shardcast.errors import Malformed

log = logging.getLogger(__name__)

WANTED: Final = 2
LOOK_SECONDS: Final = 1.0
RENEW_SECONDS: Final = 60.0
"""So often is a reservation made anew, which also keeps the way through a router's table open."""

ASK_SECONDS: Final = 10.0
WAIT_SECONDS: Final = (2.0, 120.0)
MOST_AT_ONCE: Final = 8
CIRCUIT_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class _Held:
    relay: Address
    renewed_at: float


@dataclass(frozen=True, slots=True)
class _Refused:
    wait_seconds: float
    not_before: float


class Reservations:
    """Keeps up to two of them for as long as `needed` says that there is no other way here; serves STOP.

    `relays` names peers that may be relays; `changed` is told when `addresses` has changed; nobody is let in of whose
    public key `unwanted` is true.
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
        self._held: dict[bytes, _Held] = {}
        self._refused: dict[bytes, _Refused] = {}
        self._inside = 0

    def addresses(self) -> tuple[Address, ...]:
        """Where this node is reached through relays."""
        relays = [held.relay for held in self._held.values()]
        return tuple(Address(each.kind, each.host, each.port, self._own, relay=each.node) for each in relays)

    async def run(self) -> None:
        """Never ends."""
        while True:
            before = set(self._held)
            self._drop()
            if self._needed():
                await self._renew()
                await self._reserve_more()
            if set(self._held) != before:
                self._changed()
            await trio.sleep(LOOK_SECONDS)

    async def serve(self, stream: INetStream) -> None:
        """A relay, where this node has reserved, announces somebody."""
        relay = node_of(stream)
        if relay not in self._held or self._inside >= MOST_AT_ONCE or is_relayed(stream):
            await reset(stream)
            return
        self._inside += 1
        try:
            with trio.move_on_after(CIRCUIT_SECONDS):
                await self._take(relay, stream)
        finally:
            self._inside -= 1
            await reset(stream)

    async def _take(self, relay: bytes, stream: INetStream) -> None:
        try:
            asked = await read_message(stream, StopMessage)
            source = node_in(asked.peer)
        except Malformed:
            await part(stream, _status(Status.MALFORMED_MESSAGE))
            raise
        if asked.type != StopMessage.CONNECT or self._unwanted(source):
            await part(stream, _status(Status.PERMISSION_DENIED))
            return
        await write_message(stream, _status(Status.OK))
        circuit, connection = await let_in(self._host, stream, relay=relay)
        try:
            if connection.peer_id != peer_of(source):
                raise Malformed("a relay announced somebody else", code="foreign_circuit")
            await circuit.ended.wait()
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                await connection.close()

    def _drop(self) -> None:
        """Forget those that are lost with their connection, or have not been renewed, or are not needed any more."""
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
        fit = {each.node: each for each in self._relays() if each.relay is None and not self._unwanted(each.node)}
        named_now = [each for node, each in fit.items() if node not in self._held and self._may_ask(node, now)]
        random.shuffle(named_now)
        for relay in named_now[: WANTED - len(self._held)]:
            await self._reserve(relay)

    async def _reserve(self, relay: Address) -> None:
        try:
            with trio.fail_after(ASK_SECONDS):
                await connect(self._host, relay, seconds=ASK_SECONDS)
                stream = await self._host.new_stream(peer_of(relay.node), [HOP])
                try:
                    await ask(stream, HopMessage(type=HopMessage.RESERVE, peer=named(self._own)))
                finally:
                    await reset(stream)
        except Exception as error:  # noqa: BLE001  (no relay, or none that wants: another is asked, or this one later)
            self._note_refusal(relay, describe(error))
            return
        self._refused.pop(relay.node, None)
        if relay.node not in self._held:
            log.info("reached through the relay at %s:%d", relay.host, relay.port)
        self._held[relay.node] = _Held(relay, trio.current_time())

    def _note_refusal(self, relay: Address, why: str) -> None:
        first, most = WAIT_SECONDS
        before = self._refused.get(relay.node)
        wait = first if before is None else min(most, 2 * before.wait_seconds)
        self._refused[relay.node] = _Refused(wait, trio.current_time() + wait)
        while len(self._refused) > 1024:
            del self._refused[next(iter(self._refused))]
        log.debug("no reservation at %s: %s", peer_id_of(relay.node), why)

    def _may_ask(self, node: bytes, now: float) -> bool:
        refused = self._refused.get(node)
        return refused is None or refused.not_before <= now


def _status(status: Status.ValueType) -> StopMessage:
    return StopMessage(type=StopMessage.STATUS, status=status)
