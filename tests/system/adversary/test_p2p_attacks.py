"""Every byte from a peer is hostile: what ends a node of stock py-libp2p, and posing as somebody else.

After each attack the victim is up, as small as it was, and serves who comes.
"""

# ruff: noqa: E402, TID251  (the attacker speaks libp2p, where it is installed)

from __future__ import annotations

import contextlib
import random

import pytest

trio = pytest.importorskip("trio")
pytest.importorskip("libp2p")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from p2p_attacker import (
    DATA,
    FIN,
    RST,
    SYN,
    WINDOW_UPDATE,
    Gone,
    Refused,
    hostile,
    negotiated,
    new_source,
    raw,
    shaken,
    spoken,
)
from p2p_scene import Scene, framed, scene_fixture, standing_fixture  # noqa: F401  (fixtures)

from node.keys.identity import load_or_create_key
from node.protocol.peers import peer_id_of

RNG = random.Random(7)


# -- what ends a node of stock py-libp2p


def varint_prefixed(data: bytes) -> bytes:
    return bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) + data


PUBSUB, KAD = "/meshsub/1.1.0", "/ipfs/kad/1.0.0"
FROM = b"\x12\x20" + bytes(32)


def message(sender: bytes, key: bytes) -> bytes:
    """An RPC of GossipSub that publishes: sender, data, sequence number, topic, signature, key."""
    fields = ((1, sender), (2, b"x"), (3, b"1"), (4, b"t"), (5, b"z"), (6, key))
    inner = b"".join(bytes([number << 3 | 2, len(value)]) + value for number, value in fields if value)
    return varint_prefixed(b"\x12" + bytes([len(inner)]) + inner)


@pytest.mark.parametrize(
    ("protocol", "sent"),
    [
        ("/rr/1", framed(b'{"boom":1}')),
        (PUBSUB, message(FROM, b"\xff\xff\xff")),
        (PUBSUB, message(b"", b"\x08\x01\x12\x20" + bytes(32))),
        (PUBSUB, message(b"\x00\x05\xff\xff\xff\xff\xff", b"junk")),
        (PUBSUB, varint_prefixed(RNG.randbytes(200))),
        (PUBSUB, varint_prefixed(b"\x1a\x08" + b"\x0a\x06\x0a\x01t\x12\x01x") * 200),
        (PUBSUB, varint_prefixed(b"\x1a\x10" + b"\x0a\x0e\x0a\x01t\x12\x09(1,not-a-")),
        (PUBSUB, b"\xff\xff\xff\xff\x0f" + b"A" * 100_000),
        ("/floodsub/1.0.0", message(FROM, b"")),
        (
            KAD,
            varint_prefixed(RNG.randbytes(64)) + varint_prefixed(b"") + varint_prefixed(b"\x08\x00\x1a\x04\x0a\x02zz"),
        ),
        ("/prime/kad/1.0.0", varint_prefixed(RNG.randbytes(64))),
        ("/ipfs/id/push/1.0.0", varint_prefixed(RNG.randbytes(300))),
        ("/ipfs/id/1.0.0", b""),
        ("/ipfs/ping/1.0.0", bytes(32) * 1000),
        ("/ipfs/bitswap/1.2.0", varint_prefixed(RNG.randbytes(64))),
        ("/libp2p/dcutr", varint_prefixed(RNG.randbytes(64))),
        ("/libp2p/autonat/1.0.0", varint_prefixed(RNG.randbytes(64))),
    ],
    ids=[
        "a RequestResponse handler that raises",
        "a GossipSub message with a malformed key",
        "a GossipSub message from nobody",
        "a GossipSub message from a junk identity",
        "a garbage RPC of GossipSub",
        "a flood of GossipSub control",
        "malformed message ids of GossipSub",
        "a GossipSub length of 4 GB",
        "FloodSub",
        "garbage for Kademlia",
        "garbage for a prefixed Kademlia",
        "garbage pushed to identify",
        "identify",
        "a flood of pings",
        "Bitswap",
        "a hole punched by a stranger",
        "having a victim dialled back",
    ],
)
def test_a_protocol_that_is_not_spoken_cannot_be_attacked(scene: Scene, protocol: str, sent: bytes) -> None:
    async def attack() -> None:
        async with hostile(scene.address) as connection:
            with pytest.raises(Refused):
                await connection.open(protocol)
            await connection.data(connection.new_stream() - 2, sent)

    trio.run(attack)


@pytest.mark.parametrize(
    "sent",
    [b"abcd", b"\xff\xff\xff\xff\x0f" + b"A" * 100_000, b"GET / HTTP/1.1\r\n\r\n", b""],
    ids=["bytes that a handler cannot read", "a length of 4 GB", "HTTP", "nothing"],
)
def test_a_handler_that_raises_ends_its_stream_and_nothing_else(scene: Scene, sent: bytes) -> None:
    async def attack() -> None:
        async with hostile(scene.address) as connection:
            stream = await connection.open()
            with contextlib.suppress(Gone):  # it may hang up before all is sent
                await connection.data(stream, sent)
                await connection.send(WINDOW_UPDATE, FIN, stream, 0)
            await connection.until_ended(stream)

    trio.run(attack)


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 9 + b"\x01" + b"A" * 1000,
        b"\x80" * 200,
        b"\x05\xff\xfe\xff\xfe\n",
        b"\x00" * 50,
        spoken("/multistream/1.0.0") + spoken("ls") * 500,
        spoken("/multistream/1.0.0") + spoken("\x00" * 100),
        spoken("/multistream/1.0.0") + b"\x01\n",
    ],
    ids=["a length of 2**63", "a length without an end", "no UTF-8", "zeros", "a flood of ls", "NUL", "an empty name"],
)
def test_garbage_where_protocols_are_negotiated(scene: Scene, sent: bytes) -> None:
    async def attack() -> None:
        async with hostile(scene.address) as connection:
            await connection.send(DATA, SYN, connection.new_stream(), len(sent), sent)
            await trio.sleep(0.2)

    trio.run(attack)


def test_twenty_streams_that_are_reset_and_a_connection_that_is_cut(scene: Scene) -> None:
    async def attack() -> None:
        async with hostile(scene.address) as connection:
            for _ in range(20):
                await connection.send(WINDOW_UPDATE, RST, await connection.open(), 0)

    trio.run(attack)


def test_half_open_connections_and_slow_handshakes_keep_nobody_out(scene: Scene) -> None:
    """Three hundred that say nothing, and thirty that say a byte a second, as long as they are let."""

    async def attack() -> None:
        source, before = new_source(), scene.victim.sockets()
        async with trio.open_nursery() as nursery:
            for number in range(300):
                nursery.start_soon(speak, source, b"GET / HTTP/1.1\r\n\r\n" if number < 50 else b"")
            for _ in range(30):
                nursery.start_soon(speak, new_source(), spoken("/multistream/1.0.0") + spoken("/noise"))
            await trio.sleep(1)
            await scene.assert_served()
            assert scene.victim.sockets() - before < 60
            is_over.set()
            with trio.fail_after(60):
                while scene.victim.sockets() > before + 1:
                    await trio.sleep(0.2)
            nursery.cancel_scope.cancel()

    async def speak(source: str, said: bytes) -> None:
        """Come again as soon as it is thrown out."""
        while not is_over.is_set():
            with contextlib.suppress(trio.BrokenResourceError, OSError):
                async with await raw(scene.address, source=source) as stream:
                    for byte in said:
                        await stream.send_all(bytes([byte]))
                        await trio.sleep(1)
                    while await stream.receive_some(1000):
                        pass
            await trio.sleep(1)

    is_over = trio.Event()
    trio.run(attack)


# -- posing as somebody else


@pytest.mark.parametrize("protocol", ["/plaintext/2.0.0", "/secio/1.0.0", "/tls/1.0.0"])
def test_a_handshake_that_proves_nothing_is_refused(scene: Scene, protocol: str) -> None:
    """A stock host takes plaintext, in which anybody is whoever it says."""

    async def attack() -> None:
        tcp = await raw(scene.address, source=new_source())
        connection = RawConnection(TrioTCPStream(tcp), True)
        with pytest.raises(Exception, match="not supported"):
            await negotiated(connection, protocol)
        await trio.aclose_forcefully(tcp)

    trio.run(attack)


def test_mplex_which_has_no_limits_is_refused(scene: Scene) -> None:
    async def attack() -> None:
        secured, tcp = await shaken(scene.address, source=new_source())
        with pytest.raises(Exception, match="not supported"):
            await negotiated(secured, "/mplex/6.7.0")
        await trio.aclose_forcefully(tcp)

    trio.run(attack)


def test_a_node_s_own_key_reflected_back_at_it(scene: Scene) -> None:
    """Whoever has a copy of it would be a neighbour of itself; and its own record comes back to it."""
    key = load_or_create_key(scene.victim.folder / "key")

    async def attack() -> None:
        async with hostile(scene.address, key=key) as connection:
            with pytest.raises(Gone):
                stream = await connection.open()
                await connection.frame(stream, seconds=5)
        async with hostile(scene.address) as connection:
            stream = await connection.open()
            own = None
            while own is None:
                frame = await connection.frame(stream)
                own = frame if b"swarmproof/peer" in frame[:32] else None
            await connection.data(stream, framed(own) * 5)
            await trio.sleep(0.2)
            assert not connection.gone.is_set()

    trio.run(attack)
    assert "this node's key is at work" not in scene.victim.log()


def test_one_key_from_two_places_holds_one_link(scene: Scene) -> None:
    """A copied key: the two must not throw each other out in a loop that keeps the victim busy."""
    key = Ed25519PrivateKey.generate()
    name = peer_id_of(key.public_key().public_bytes_raw())

    async def attack() -> None:
        async def one_of_two() -> None:
            while True:
                async with hostile(scene.address, key=key) as connection:
                    try:
                        await connection.frame(await connection.open(), seconds=1)
                    except (Gone, trio.TooSlowError):
                        await trio.sleep(0.25)  # two of them come as often as handshakes are heard

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one_of_two)
            nursery.start_soon(one_of_two)
            await trio.sleep(2)
            await scene.assert_served()
            nursery.cancel_scope.cancel()

    trio.run(attack)
    assert scene.neighbours().count(name) <= 1
