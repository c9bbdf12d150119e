"""Attacks on relays, by relays, and on those whom nobody can call but through one."""

# ruff: noqa: TID251  (what is tested is what speaks libp2p)

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

pytest.importorskip("libp2p", reason="libp2p is not installed: pip install -e '.[p2p]'")

import trio
from circuits import SECONDS, Scene, on_circuits
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status, StopMessage

from node.discovery.descriptor import DescriptorStore
from node.p2p import LinkLimits, PeerNetwork, PeerSettings
from node.p2p.circuits import HOP, STOP, accept_circuit, peer_id_message, reach, read_message, write_message
from node.p2p.host import PeerUnreachable, peer_of
from node.p2p.links import PROTOCOL as LINK
from node.p2p.links import Links
from node.p2p.relaying import CircuitRelay, RelayLimits
from node.protocol.run import run_id_of

ENDINGS = (StreamError, StreamFailure, SwarmException)
"""How libp2p says that a stream or a connection has gone, or cannot be had."""

GARBAGE = (
    b"",
    b"\x00",
    b"\x05hello",
    b"\xff" * 20,
    b"\x80\x80\x80\x80\x01" + b"x" * 100,
    b"\xff\x1f" + b"x" * 4095,
    os.urandom(300),
    b"\x02\x08\x63",
    b"\x04\x08\x01\x12\x00",
    b"\x06\x08\x01\x12\x02\x0a\x00",
)
"""Nothing, an empty message, no protobuf, lengths without end, the longest that is read, chance, an unknown type, and
a circuit to nobody twice."""


@on_circuits()
async def test_garbage_on_hop_and_stop_ends_neither_the_relay_nor_the_home(scene: Scene) -> None:
    """Who answers HOP or STOP is spoken to by anybody; stock py-libp2p would go down with an error in a handler."""
    for garbage in GARBAGE:
        for speaker, target, protocol in ((scene.stranger, scene.relay, HOP), (scene.relay, scene.home, STOP)):
            stream = await speaker.host.new_stream(peer_of(target.node), [protocol])
            await stream.write(garbage)
            await stream.close()
    await scene.assert_sound()


@on_circuits()
async def test_garbage_where_the_handshake_belongs(scene: Scene) -> None:
    """A relay announces a guest, and then speaks no Noise: the home hangs up, and lets in the next."""
    for garbage in GARBAGE:
        stream = await scene.relay.host.new_stream(peer_of(scene.home.node), [STOP])
        await write_message(stream, StopMessage(type=StopMessage.CONNECT, peer=peer_id_message(scene.stranger.node)))
        assert (await read_message(stream, StopMessage)).status == Status.OK
        await stream.write(garbage)
        await stream.close()
    await scene.settle(lambda: scene.reservations._open_circuits == 0)
    await scene.assert_sound()


@on_circuits()
async def test_two_hundred_reservations_of_one_peer_are_one(scene: Scene) -> None:
    for _ in range(200):  # three times the table
        assert await scene.stranger.reserve(scene.relay.address) == Status.OK
    assert scene.relaying.status()["reservations"] == 2, "the stranger's, and the home's"
    await scene.assert_sound()


@on_circuits(RelayLimits(reservations=3))
async def test_reservations_in_the_names_of_others(scene: Scene) -> None:
    """Otherwise one stream fills the table with names, as it does with py-libp2p's own relay."""
    for name in (*(bytes([number]) * 32 for number in range(10)), scene.friend.node):
        request = HopMessage(type=HopMessage.RESERVE, peer=peer_id_message(name))
        assert await scene.stranger.ask(scene.relay.address, request) == Status.OK
    assert set(scene.relaying._reserved) == {scene.home.node, scene.stranger.node}
    assert await (await scene.visitor()).reserve(scene.relay.address) == Status.OK


@on_circuits(RelayLimits(reservations_per_subnet=3))
async def test_one_host_with_many_keys_takes_no_more_than_its_share(scene: Scene) -> None:
    statuses = [await (await scene.visitor()).reserve(scene.relay.address) for _ in range(4)]
    assert statuses == [Status.OK, Status.OK, Status.RESERVATION_REFUSED, Status.RESERVATION_REFUSED]
    assert scene.relaying.holds(scene.home.node), "whoever has reserved keeps it"


@on_circuits(RelayLimits(reservations_per_subnet=2))
async def test_a_reservation_is_lost_with_its_connection(scene: Scene) -> None:
    """Who reserves and leaves must not hold a place for half an hour."""
    assert await scene.stranger.reserve(scene.relay.address) == Status.OK
    await scene.stranger.host.disconnect(peer_of(scene.relay.node))
    await scene.settle(lambda: not scene.relaying.holds(scene.stranger.node))
    assert await (await scene.visitor()).reserve(scene.relay.address) == Status.OK


@on_circuits()
async def test_bulk_through_a_circuit_ends_with_it(scene: Scene) -> None:
    """A relay's line is its owner's: what is over the limit does not arrive, and nothing else suffers."""
    await reach(scene.stranger.host, scene.circuit, seconds=SECONDS)
    arrived = 0
    with pytest.raises(ENDINGS):
        while True:
            arrived += len(await scene.stranger.echo(scene.home.node, b"x" * 32_768))
    assert 2**18 < 2 * arrived <= scene.relaying._limits.circuit_bytes
    await scene.settle(lambda: scene.relaying.status()["circuits"] == 0)
    await scene.settle(lambda: not scene.stranger.host.is_peer_connected(peer_of(scene.home.node)))
    assert scene.relaying.holds(scene.home.node)
    await scene.assert_sound()


@on_circuits(RelayLimits(circuit_seconds=6))
async def test_a_circuit_on_which_nothing_is_said_ends_in_time(scene: Scene) -> None:
    await reach(scene.stranger.host, scene.circuit, seconds=SECONDS)
    assert scene.relaying.status()["circuits"] == 1
    await scene.settle(lambda: scene.relaying.status()["circuits"] == 0)
    await scene.settle(lambda: scene.reservations._open_circuits == 0)
    await scene.assert_sound()


@on_circuits(RelayLimits(circuits=3, circuits_per_peer=2))
async def test_circuits_of_one_peer_and_of_all_are_few(scene: Scene) -> None:
    async def open_one(guest) -> int:
        stream = await guest.host.new_stream(peer_of(scene.relay.node), [HOP])
        await write_message(stream, HopMessage(type=HopMessage.CONNECT, peer=peer_id_message(target)))
        return (await read_message(stream, HopMessage)).status

    target = scene.home.node
    scene.home.host.set_stream_handler(STOP, _agree)  # which waits for no handshake
    assert [await open_one(scene.stranger) for _ in range(3)] == [Status.OK] * 2 + [Status.RESOURCE_LIMIT_EXCEEDED]
    other = await scene.visitor()
    assert await open_one(other) == Status.RESOURCE_LIMIT_EXCEEDED, "the home has two already"
    for member in (other, scene.stranger):
        member.host.set_stream_handler(STOP, _agree)
        assert await member.reserve(scene.relay.address) == Status.OK
    target = other.node
    guests = [await scene.visitor() for _ in range(2)]
    assert [await open_one(guest) for guest in guests] == [Status.OK, Status.RESOURCE_LIMIT_EXCEEDED]


@on_circuits(RelayLimits(requests_per_peer=4))
async def test_requests_that_never_come_cost_others_nothing(scene: Scene) -> None:
    """Somebody opens streams and says nothing: a few wait, the rest is ended at once."""
    ended = heard = 0

    def is_over() -> bool:
        nonlocal heard
        heard = max(heard, scene.relaying._requests[scene.stranger.node])
        return ended >= 26

    async def wait() -> None:
        nonlocal ended
        with contextlib.suppress(*ENDINGS):
            stream = await scene.stranger.host.new_stream(peer_of(scene.relay.node), [HOP])
            await stream.read(1)
        ended += 1

    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(wait)
        await scene.settle(is_over)
        assert heard <= 4
        await scene.assert_sound()
        nursery.cancel_scope.cancel()
    await scene.assert_sound()


@on_circuits()
async def test_a_revoked_or_shunned_node_has_no_part_in_circuits(scene: Scene) -> None:
    """Not as a new tenant, not as a guest, and not with the reservation that it had before."""
    assert await scene.stranger.reserve(scene.relay.address) == Status.OK
    scene.unwanted.add(scene.stranger.node)
    assert await scene.stranger.reserve(scene.relay.address) == Status.PERMISSION_DENIED
    assert await scene.stranger.ask_for(scene.relay.address, scene.home.node) == Status.PERMISSION_DENIED
    guest = await scene.visitor()
    assert await guest.ask_for(scene.relay.address, scene.stranger.node) == Status.PERMISSION_DENIED
    await scene.assert_sound()


@on_circuits()
async def test_a_relay_that_lets_a_revoked_node_through(scene: Scene) -> None:
    """The home judges for itself who is announced."""
    scene.relaying._unwanted = set().__contains__
    scene.unwanted.add(scene.stranger.node)
    with pytest.raises(PeerUnreachable, match="CONNECTION_FAILED"):
        await reach(scene.stranger.host, scene.circuit, seconds=SECONDS)
    assert not scene.home.host.is_peer_connected(peer_of(scene.stranger.node))


@on_circuits()
async def test_a_relay_that_poses_as_the_peer_behind_it(scene: Scene) -> None:
    """It answers that the circuit stands, and is the other end itself: the handshake is with the wrong key."""

    async def pose(stream) -> None:
        await read_message(stream, HopMessage)
        await write_message(stream, HopMessage(type=HopMessage.STATUS, status=Status.OK))
        await accept_circuit(scene.relay.host, stream, relay=scene.relay.node)

    scene.relay.host.set_stream_handler(HOP, pose)
    with pytest.raises(PeerUnreachable, match="another key"):
        await reach(scene.stranger.host, scene.circuit, seconds=SECONDS)
    assert not scene.stranger.host.is_peer_connected(peer_of(scene.home.node))


@on_circuits()
async def test_a_relay_that_announces_somebody_else(scene: Scene) -> None:
    """The home sees by the handshake who it is, and hangs up on whoever was announced under another name."""
    honest = scene.relaying._open_onward

    async def lie(_source: bytes, target: bytes):
        return await honest(b"\x07" * 32, target)

    scene.relaying._open_onward = lie
    await reach(scene.stranger.host, scene.circuit, seconds=SECONDS)
    await scene.settle(lambda: not scene.home.host.is_peer_connected(peer_of(scene.stranger.node)))
    with pytest.raises(ENDINGS):
        await scene.stranger.echo(scene.home.node)


@on_circuits()
async def test_only_a_relay_of_this_node_may_announce_anybody(scene: Scene) -> None:
    await scene.stranger.call(scene.home.address)
    with pytest.raises(ENDINGS):
        stream = await scene.stranger.host.new_stream(peer_of(scene.home.node), [STOP])
        await write_message(stream, StopMessage(type=StopMessage.CONNECT, peer=peer_id_message(scene.relay.node)))
        await read_message(stream, StopMessage)


@on_circuits()
async def test_nobody_reserves_or_goes_on_through_a_circuit(scene: Scene) -> None:
    """Circuits over circuits would hide who uses a relay, and multiply what it carries."""
    scene.home.host.set_stream_handler(
        HOP, CircuitRelay(scene.home.host, RelayLimits(), unwanted=set().__contains__).serve
    )
    await reach(scene.stranger.host, scene.circuit, seconds=SECONDS)
    assert await scene.stranger.reserve(scene.home.address) == Status.PERMISSION_DENIED


@on_circuits()
async def test_no_links_through_a_circuit(scene: Scene) -> None:
    """A node's neighbours are few: nobody takes a place who is gone in two minutes, or cannot be told from others."""
    key = Ed25519PrivateKey.generate()
    store = DescriptorStore(run_id_of(key.public_key().public_bytes_raw()))
    network = PeerNetwork(PeerSettings(bootstrap=(), state=Path("/nowhere")), key=key, store=store)
    records = {"own_record": lambda: None, "on_record": lambda _peer, _remote: None}
    links = Links(store, network.book, own=scene.home.node, limits=LinkLimits(), **records)
    scene.home.host.set_stream_handler(TProtocol(LINK), lambda stream: network._serve_link(links, stream))
    await reach(scene.stranger.host, scene.circuit, seconds=SECONDS)
    await scene.friend.call(scene.home.address)
    with contextlib.suppress(*ENDINGS):
        stream = await scene.stranger.host.new_stream(peer_of(scene.home.node), [TProtocol(LINK)])
        await stream.read(1)
    await scene.friend.host.new_stream(peer_of(scene.home.node), [TProtocol(LINK)])
    await scene.settle(lambda: links.nodes)
    assert links.nodes == {scene.friend.node}, "who called, and not who came by the relay"
    assert not network._was_dialled, "a call from this very machine shows nothing"


async def _agree(stream) -> None:
    """A home that takes every guest and says nothing to it."""
    await read_message(stream, StopMessage)
    await write_message(stream, StopMessage(type=StopMessage.STATUS, status=Status.OK))
    await trio.sleep_forever()
