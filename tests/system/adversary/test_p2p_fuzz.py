"""Mutated bytes on every layer of a living node: TCP, Noise, Yamux, negotiation, and each protocol that it serves.

The seed is fixed, so that what is found is found again. Parsers alone are fuzzed in benchmarks/fuzzing.
"""

# ruff: noqa: E402, TID251  (the attacker speaks libp2p, where it is installed)

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import pytest

trio = pytest.importorskip("trio")
pytest.importorskip("libp2p")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, StopMessage
from p2p_attacker import (
    DATA,
    HEADER,
    PING,
    SYN,
    WINDOW_UPDATE,
    Gone,
    Hostile,
    Refused,
    hostile,
    new_source,
    raw,
    shaken,
    spoken,
)
from p2p_scene import Scene, descriptor, framed, record, scene_fixture, standing_fixture  # noqa: F401  (fixtures)

from benchmarks.fuzzing.mutation import bytes_mutator, json_mutator
from node.p2p.circuits import HOP, STOP
from node.p2p.control import PROTOCOL as CONTROL
from node.p2p.host import peer_of
from node.p2p.links import PROTOCOL as LINK
from node.protocol.peers import PEER_DOMAIN, PEER_VERSION
from shardcast.envelope import open_envelope, seal

CASES = [pytest.param(120, id="short"), pytest.param(1500, id="long", marks=pytest.mark.nightly)]
AT_ONCE = 10
OF_ONE_SOURCE = 60
"""As many handshakes as one host may make in a row, and more would be refused unheard."""

KEY = Ed25519PrivateKey.from_private_bytes(b"\7" * 32)
Case = Callable[[Scene, Random, str], Awaitable[None]]


# -- what honest peers send, and what is made of it


@functools.cache
def envelopes() -> tuple[bytes, ...]:
    now = int(time.time())
    return (
        descriptor(1),
        descriptor(1, issued_at=now - 100, expires_at=now - 50),
        record(KEY, ("127.0.0.1", 9), ("127.0.0.2", 10)),
        record(KEY),
        b"",
    )


@functools.cache
def messages() -> tuple[bytes, ...]:
    """Of circuit relay, with their lengths."""
    somebody = PeerId(id=peer_of(KEY.public_key().public_bytes_raw()).to_bytes(), addrs=[b"\x04\x7f\0\0\1\x06\0\x09"])
    made: Sequence[Message] = (
        HopMessage(type=HopMessage.RESERVE, peer=somebody),
        HopMessage(type=HopMessage.CONNECT, peer=somebody),
        HopMessage(type=HopMessage.STATUS, status=100),
        StopMessage(type=StopMessage.CONNECT, peer=somebody),
    )
    return tuple(bytes([len(data)]) + data for data in (each.SerializeToString() for each in made))


def frames() -> tuple[bytes, ...]:
    return tuple(map(framed, envelopes()))


def signed_anew(rng: Random) -> bytes:
    """A record that its own key has signed, whatever it says."""
    opened = open_envelope(envelopes()[2], domain=PEER_DOMAIN, versions=(PEER_VERSION,), max_payload_bytes=10_000)
    return seal(json_mutator()(rng, [opened.payload]), domain=PEER_DOMAIN, version=PEER_VERSION, key=KEY)


# -- the layers


async def on_a_link(scene: Scene, rng: Random, source: str) -> None:
    """Frames of which the bytes, the lengths and the order are wrong."""
    mutate = bytes_mutator(b"VSW1", struct.pack(">I", 5), *frames())
    async with hostile(scene.address, source=source, tries=1) as connection:
        stream = await connection.open(LINK)
        for _ in range(4):
            await connection.data(stream, mutate(rng, frames()))
        await trio.sleep(0.01)


async def in_envelopes(scene: Scene, rng: Random, source: str) -> None:
    """Whole frames of spoilt envelopes, and of records that say nonsense under a good signature."""
    mutate = bytes_mutator(*envelopes())
    async with hostile(scene.address, source=source, key=KEY if rng.random() < 0.3 else None, tries=1) as connection:
        stream = await connection.open(LINK)
        for _ in range(6):
            made = signed_anew(rng) if rng.random() < 0.5 else mutate(rng, envelopes())
            await connection.data(stream, framed(made))
        await trio.sleep(0.01)


async def to_the_other_protocols(scene: Scene, rng: Random, source: str) -> None:
    """Requests to relay, to be relayed, and to be answered."""
    mutate = bytes_mutator(*messages(), *frames())
    async with hostile(scene.address, source=source, tries=1) as connection:
        for protocol in (HOP, STOP, CONTROL):
            for _ in range(3):
                await refused_or_not(connection, protocol, mutate(rng, [*messages(), *frames()]))
        await trio.sleep(0.01)


async def refused_or_not(connection: Hostile, protocol: str, sent: bytes) -> None:
    try:
        await connection.data(await connection.open(protocol), sent)
    except Refused:
        return


async def where_protocols_are_negotiated(scene: Scene, rng: Random, source: str) -> None:
    good = [spoken("/multistream/1.0.0") + spoken(name) for name in (LINK, CONTROL, HOP, "ls", "/x")]
    mutate = bytes_mutator(b"\x13", b"\n", spoken("na"), *good)
    async with hostile(scene.address, source=source, tries=1) as connection:
        for _ in range(8):
            sent = mutate(rng, good)[:5000]
            await connection.send(DATA, SYN, connection.new_stream(), len(sent), sent)
        await trio.sleep(0.01)


async def of_yamux(scene: Scene, rng: Random, source: str) -> None:
    hello = spoken("/multistream/1.0.0") + spoken(LINK)
    good = [
        HEADER.pack(0, DATA, SYN, 1, len(hello)) + hello,
        HEADER.pack(0, WINDOW_UPDATE, SYN, 3, 0) + HEADER.pack(0, DATA, 0, 3, len(hello)) + hello,
        HEADER.pack(0, PING, SYN, 0, 9),
        HEADER.pack(0, WINDOW_UPDATE, 0, 1, 1000),
    ]
    mutate = bytes_mutator(*good, *(HEADER.pack(0, kind, flag, 1, 0) for kind in range(5) for flag in (1, 2, 4, 8)))
    async with hostile(scene.address, source=source, tries=1) as connection:
        for _ in range(10):
            await connection.send_bytes(mutate(rng, good)[:20_000] or b"\0")
        await trio.sleep(0.01)


async def instead_of_a_muxer(scene: Scene, rng: Random, source: str) -> None:
    good = [
        spoken("/multistream/1.0.0") + spoken("/yamux/1.0.0"),
        spoken("/multistream/1.0.0") + spoken("/mplex/6.7.0"),
    ]
    secured, tcp = await shaken(scene.address, source=source)
    async with tcp:
        await secured.write(bytes_mutator(b"\n", *good)(rng, good)[:5000] or b"\0")
        await trio.sleep(0.01)


async def instead_of_a_handshake(scene: Scene, rng: Random, source: str) -> None:
    """From the first byte on; the third part of a handshake is as long as the first two are right."""
    hello = spoken("/multistream/1.0.0") + spoken("/noise")
    good = [
        hello + b"\x00\x20" + rng.randbytes(32),
        hello + b"\x00\x20" + rng.randbytes(32) + b"\x00\xc8" + rng.randbytes(200),
    ]
    async with await raw(scene.address, source=source) as tcp:
        try:
            for _ in range(3):
                await tcp.send_all(bytes_mutator(hello, b"\xff\xff")(rng, good)[:70_000])
        except trio.BrokenResourceError:
            return


LAYERS: tuple[Case, ...] = (
    on_a_link,
    in_envelopes,
    to_the_other_protocols,
    where_protocols_are_negotiated,
    of_yamux,
    instead_of_a_muxer,
    instead_of_a_handshake,
)


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_mutated_bytes(scene: Scene, layer: Case, cases: int) -> None:
    refused = 0

    async def attack() -> None:
        limit = trio.CapacityLimiter(AT_ONCE)
        source = new_source()
        async with trio.open_nursery() as nursery:
            for number in range(cases):
                if number % OF_ONE_SOURCE == 0:
                    source = new_source()
                await limit.acquire_on_behalf_of(number)
                nursery.start_soon(one, limit, number, source)

    async def one(limit: object, number: int, source: str) -> None:
        nonlocal refused
        try:
            with trio.fail_after(20):
                await layer(scene, Random(f"{layer.__name__} {number}"), source)
        except Exception as error:  # noqa: BLE001  (of libp2p's: the victim has ended the handshake)
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            refused += not isinstance(error, (Gone, trio.BrokenResourceError))
        finally:
            limit.release_on_behalf_of(number)

    trio.run(attack)
    assert refused < cases / 2, "most of it never arrived"
