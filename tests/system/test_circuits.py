"""Circuits as they are meant: who cannot be called is reached, knows who has come, and finds a relay again."""

# ruff: noqa: TID251  (what is tested is what speaks libp2p)

from __future__ import annotations

import pytest

pytest.importorskip("libp2p", reason="libp2p is not installed: pip install -e '.[p2p]'")

import trio
from circuits import ECHO, SECONDS, Scene, echo, on_circuits
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.relay.circuit_v2.config import RelayConfig, RelayRole
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits as StockLimits
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from node.p2p.circuits import is_relayed, reach
from node.p2p.host import PeerUnreachable, node_of, peer_of
from node.protocol.peers import Address, parse_address, public_key_of


@on_circuits()
async def test_both_ends_of_a_circuit_know_who_the_other_is(scene: Scene) -> None:
    seen = []

    async def look(stream) -> None:
        seen.append((node_of(stream), is_relayed(stream), stream.get_remote_address()))
        await echo(stream)

    scene.home.host.set_stream_handler(ECHO, look)
    assert parse_address(str(scene.circuit)) == scene.circuit
    await reach(scene.stranger.host, scene.circuit, seconds=SECONDS)
    assert await scene.stranger.echo(scene.home.node, b"x" * 100_000) == b"x" * 100_000
    assert seen == [(scene.stranger.node, True, None)], "the relay's address is not the stranger's"
    assert scene.relaying.status() == {"reservations": 1, "circuits": 1}


@on_circuits()
async def test_two_circuits_to_one_peer_do_not_end_each_other(scene: Scene) -> None:
    """As those of py-libp2p's own relay do."""
    for guest in (scene.stranger, scene.friend):
        await reach(guest.host, scene.circuit, seconds=SECONDS)
        assert await guest.echo(scene.home.node) == b"hello"
    await scene.stranger.host.disconnect(peer_of(scene.home.node))
    await scene.settle(lambda: scene.relaying.status()["circuits"] == 1)
    assert await scene.friend.echo(scene.home.node) == b"hello"


@on_circuits()
async def test_a_reservation_that_is_lost_is_made_again(scene: Scene) -> None:
    """A relay is started anew, or a router forgets the connection."""
    await scene.relay.host.disconnect(peer_of(scene.home.node))
    scene.relaying._reserved.clear()
    await scene.settle(lambda: scene.relaying.holds(scene.home.node))
    await scene.assert_sound()


@on_circuits()
async def test_who_can_be_called_after_all_is_not_reached_by_relays(scene: Scene) -> None:
    scene.needed = False
    await scene.settle(lambda: not scene.reservations.addresses())


@on_circuits()
async def test_who_is_not_reached_is_told_why(scene: Scene) -> None:
    relay = scene.relay.address
    without = Address(relay.kind, relay.host, relay.port, scene.friend.node, relay=relay.node)
    with pytest.raises(PeerUnreachable, match=r"refuses \(NO_RESERVATION\)"):
        await reach(scene.stranger.host, without, seconds=SECONDS)
    with pytest.raises(PeerUnreachable, match="is not a relay"):
        await reach(scene.stranger.host, _through(scene, scene.friend.address), seconds=SECONDS)


@on_circuits()
async def test_a_stock_peer_reaches_a_home_through_our_relay(scene: Scene) -> None:
    """The protocol is libp2p's own."""
    guest = new_host(key_pair=create_new_key_pair())
    async with guest.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        config = RelayConfig(roles=RelayRole.STOP | RelayRole.CLIENT)
        transport = CircuitV2Transport(guest, CircuitV2Protocol(guest), config)
        await transport.dial(Multiaddr(str(scene.circuit)))
        with trio.fail_after(SECONDS):
            stream = await guest.new_stream(peer_of(scene.home.node), [ECHO])
            await stream.write(b"hello")
            assert await stream.read(5) == b"hello"
    assert scene.relaying.status()["reservations"] == 2, "a stock guest reserves, too"


@on_circuits()
async def test_a_home_reserves_at_a_stock_relay(scene: Scene) -> None:
    stock = new_host(key_pair=create_new_key_pair())
    async with stock.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        limits = StockLimits(duration=60, data=2**20, max_circuit_conns=4, max_reservations=4)
        async with background_trio_service(CircuitV2Protocol(stock, limits, allow_hop=True)) as service:
            del service
            port = int(stock.get_addrs()[0].value_for_protocol("tcp"))
            relay = Address("ip4", "127.0.0.1", port, public_key_of(str(stock.get_id())))
            scene.reservations._relays = lambda: [relay]
            await scene.settle(lambda: len(scene.reservations.addresses()) == 2)
            await reach(scene.stranger.host, _through(scene, relay), seconds=SECONDS)
            assert await scene.stranger.echo(scene.home.node) == b"hello"
            await scene.stranger.host.disconnect(peer_of(scene.home.node))


def _through(scene: Scene, relay: Address) -> Address:
    return Address(relay.kind, relay.host, relay.port, scene.home.node, relay=relay.node)
