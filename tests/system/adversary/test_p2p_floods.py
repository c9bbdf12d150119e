"""Attacks below the protocol: on the multiplexer, on TCP, and by numbers.

After each the victim is up, as small as it was, and serves who comes.
"""

# ruff: noqa: E402, TID251  (the attacker speaks libp2p, where it is installed)

from __future__ import annotations

import contextlib
import random

import pytest

trio = pytest.importorskip("trio")
pytest.importorskip("libp2p")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.custom_types import TProtocol
from p2p_attacker import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    Gone,
    hostile,
    new_source,
    raw,
)
from p2p_scene import SERVED_SECONDS, Scene, framed, scene_fixture, standing_fixture  # noqa: F401  (fixtures)
from trio.testing import MockClock

from node.p2p.admission import BURST_HANDSHAKES, MAX_HANDSHAKES, MAX_HANDSHAKES_PER_SUBNET, AdmissionControl
from node.p2p.host import IDLE_CHECK_SECONDS, IDLE_SECONDS, HostLimits, connect, listening_port, running_host
from node.p2p.transport import MAX_HELD_BYTES, MAX_STREAMS
from node.protocol.peers import Address, public_key_of

RNG = random.Random(8)


# -- below it


def test_a_thousand_streams_on_one_connection_end_it(scene: Scene) -> None:
    async def attack() -> None:
        async with hostile(scene.address) as connection:
            try:
                for _ in range(1000):
                    await connection.send(WINDOW_UPDATE, SYN, connection.new_stream(), 0)
            except Gone:
                pass
            with trio.fail_after(60):
                await connection.gone.wait()
        async with hostile(scene.address) as connection:
            for _ in range(MAX_STREAMS // 2):
                await connection.send(WINDOW_UPDATE, SYN, connection.new_stream(), 0)
            await connection.frame(await connection.open())

    trio.run(attack)


@pytest.mark.parametrize(
    "frames",
    [
        HEADER.pack(0, DATA, SYN, 1, 2**32 - 1),
        HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 2**32 - 1) * 3,
        HEADER.pack(0, WINDOW_UPDATE, SYN, 2, 0) + HEADER.pack(0, WINDOW_UPDATE, SYN, 0, 0),
        (HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0) + HEADER.pack(0, WINDOW_UPDATE, RST, 1, 0)) * 300,
        HEADER.pack(0, WINDOW_UPDATE, SYN | ACK | FIN | RST, 1, 7) * 20,
        HEADER.pack(0, DATA, FIN, 77, 5) + b"12345" + HEADER.pack(0, DATA, RST, 78, 0),
        HEADER.pack(0, GO_AWAY, 0, 0, 0) + HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0),
        HEADER.pack(0, GO_AWAY, 0, 0, 2**32 - 1),
        HEADER.pack(255, 255, 65535, 2**32 - 1, 2**32 - 1) * 50,
        HEADER.pack(0, PING, ACK, 0, 1) * 500,
        b"\x00" * 5,
        RNG.randbytes(4096),
    ],
    ids=[
        "a frame of 4 GB",
        "a window that is opened beyond all bounds",
        "streams with the victim's own ids",
        "ids that are used again",
        "every flag at once",
        "data on streams that are not open",
        "a stream after GOAWAY",
        "an unknown GOAWAY",
        "unknown types",
        "pongs that nobody asked for",
        "half a header",
        "noise",
    ],
)
def test_junk_for_yamux(scene: Scene, frames: bytes) -> None:
    async def attack() -> None:
        async with hostile(scene.address) as connection:
            await connection.send_bytes(frames)
            await trio.sleep(0.2)

    trio.run(attack)


def test_frames_of_16_megabytes_are_not_kept(scene: Scene) -> None:
    """As much as twenty streams of them is 320 MB, on one connection."""

    async def attack() -> None:
        async with hostile(scene.address) as connection:
            with pytest.raises(Gone):
                for _ in range(20):
                    await connection.send(DATA, SYN, connection.new_stream(), 2**24 - 1)
                    for _ in range(2**24 // 60_000):
                        await connection.send_bytes(bytes(60_000))
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(fill, scene)

    trio.run(attack)
    assert scene.victim.rss() - scene.rss < 20 + 10 * MAX_HELD_BYTES / 2**20


async def fill(scene: Scene) -> None:
    """As much as is kept: frames that say nothing, which a link reads slowly."""
    async with hostile(scene.address) as connection:
        await connection.data(await connection.open(), framed(b"") * (MAX_HELD_BYTES // 5))
        await trio.sleep(1)


def test_a_flood_of_pings_leaves_time_for_others(scene: Scene) -> None:
    """Of Yamux, each of which has to be answered."""

    async def attack() -> None:
        async def one() -> None:
            async with hostile(scene.address) as connection:
                try:
                    while True:
                        await connection.send_bytes(HEADER.pack(0, PING, SYN, 0, 7) * 2000)
                except Gone:
                    pass

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(one)
            await trio.sleep(1)
            await scene.assert_served()
            nursery.cancel_scope.cancel()

    trio.run(attack)


def test_connections_that_nothing_goes_over_are_ended() -> None:
    """Else those who once were there, and never left, are all who are. Two minutes pass at once here."""

    async def rule() -> None:
        async with trio.open_nursery() as nursery:
            hosts = [await nursery.start(a_host) for _ in range(3)]
            one, idle, busy = (host.get_network() for host in hosts)
            for host in hosts[1:]:
                await connect(host, address_of(hosts[0]), seconds=5)

            async def waits(stream: object) -> None:
                await trio.sleep_forever()

            hosts[0].set_stream_handler(TProtocol("/x"), waits)
            await hosts[2].new_stream(one.get_peer_id(), [TProtocol("/x")])
            await trio.sleep(IDLE_SECONDS + 3 * IDLE_CHECK_SECONDS)
            assert not one.get_connections(idle.get_peer_id())
            assert len(one.get_connections(busy.get_peer_id())) == 1
            assert len(one.admission) == 1
            nursery.cancel_scope.cancel()

    async def a_host(task_status) -> None:
        key = Ed25519PrivateKey.generate()
        async with running_host(key, "/ip4/127.0.0.1/tcp/0", HostLimits()) as host:
            task_status.started(host)
            await trio.sleep_forever()

    def address_of(host) -> Address:
        return Address("ip4", "127.0.0.1", listening_port(host), public_key_of(str(host.get_id())))

    trio.run(rule, clock=MockClock(autojump_threshold=0.1))


# -- floods of peers


def test_a_full_house_makes_way_for_who_comes_from_elsewhere() -> None:
    """The rule alone: of 20 slots one host takes all, and neither of two others is kept out."""

    async def rule() -> None:
        admission = AdmissionControl(capacity=20)
        flood = [admission.admit("8.8.8.8") for _ in range(8)]
        assert all(flood)
        for inbound in flood:
            inbound.handshaken = True
        flood += [admission.admit("8.8.4.4") for _ in range(12)]
        for inbound in flood:
            inbound.handshaken, inbound.busy = True, lambda: True
        assert admission.admit("8.8.8.9") is None, "its own network has enough"
        for host in ("9.9.9.9", "7.7.7.7"):
            assert admission.admit(host) is not None
        assert len(admission) == 20
        assert sum(inbound.scope.cancel_called for inbound in flood) == 2

    trio.run(rule)


def test_handshakes_that_nobody_ends_make_way_for_who_comes_from_elsewhere() -> None:
    """The rule alone: of all that may be under way four hosts have their share, and others come all the same."""

    async def rule() -> None:
        admission = AdmissionControl(capacity=10_000)
        hosts = [f"8.{number}.8.8" for number in range(MAX_HANDSHAKES // MAX_HANDSHAKES_PER_SUBNET)]
        begun = [admission.admit(host) for host in hosts for _ in range(MAX_HANDSHAKES_PER_SUBNET)]
        assert all(begun)
        assert admission.admit(hosts[0]) is None, "it has its share"
        assert all(admission.admit(host) is not None for host in ("9.9.9.9", "7.7.7.7"))
        assert len(admission) == MAX_HANDSHAKES
        ended = [one for one in begun if one.scope.cancel_called]
        assert len(ended) == 2
        assert len({one.subnet for one in ended}) == 2, "of those who have most"

    trio.run(rule, clock=MockClock())


def test_a_crowd_shakes_hands_only_so_fast() -> None:
    async def rule() -> None:
        admission = AdmissionControl(capacity=10_000)
        inside = 0
        for _ in range(2 * BURST_HANDSHAKES):
            inbound = admission.admit("8.8.8.8")
            if inbound is not None:
                inbound.handshaken = True
                inside += 1
        assert inside <= BURST_HANDSHAKES + 1
        assert admission.admit("9.9.9.9") is not None

    trio.run(rule, clock=MockClock())


def test_attack_hosts_that_begin_handshakes_and_end_none(scene: Scene) -> None:
    """Eight hosts, each with as many as one may have, and another one as soon as the victim ends one."""

    async def attack() -> None:
        async with trio.open_nursery() as nursery:
            for source in [new_source() for _ in range(8)]:
                for _ in range(MAX_HANDSHAKES_PER_SUBNET):
                    nursery.start_soon(stall, source)
            await trio.sleep(2)
            for _ in range(3):
                await scene.assert_served()
            nursery.cancel_scope.cancel()

    async def stall(source: str) -> None:
        while True:
            with contextlib.suppress(OSError, trio.BrokenResourceError):
                async with await raw(scene.address, source=source) as stream:
                    while await stream.receive_some():
                        pass
            await trio.sleep(0.05)

    trio.run(attack)


def test_a_flood_of_peers(scene: Scene) -> None:
    """Six hundred keys from six hosts, more than there is room for, half of which only sit there."""

    async def attack() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                source = new_source()
                for number in range(100):
                    nursery.start_soon(one, source, number % 2 == 0)
                    await trio.sleep(0.03)
            await scene.assert_served()
            await trio.to_thread.run_sync(scene.post_newer)
            await scene.assert_served()
            assert scene.victim.sockets() < 600
            nursery.cancel_scope.cancel()

    async def one(source: str, links: bool) -> None:
        try:
            async with hostile(scene.address, source=source, tries=1) as connection:
                if links:
                    await connection.open()
                await connection.gone.wait()
        except Exception:  # noqa: BLE001  (it is not let in, or thrown out, at whatever point)
            return

    trio.run(attack)
    for _ in range(3):
        assert scene.newcomer.joins(scene.address)[0] < SERVED_SECONDS


def test_a_thousand_connections_one_after_the_other_leave_nothing(scene: Scene) -> None:
    """A stock host counts everyone who was ever there; what it keeps of each must not add up either."""

    async def attack() -> None:
        for turn in range(1000):
            if turn % 100 == 0:
                source = new_source()
            async with hostile(scene.address, source=source) as connection:
                try:
                    await connection.frame(await connection.open())
                except (Gone, trio.TooSlowError):
                    missed.append(turn)

    missed = list[int]()
    before = scene.victim.rss()
    trio.run(attack)
    assert scene.victim.rss() - before < 25
    assert len(missed) < 10


def test_a_byte_a_second_is_cut_off(scene: Scene) -> None:
    """A frame that has begun has 20 s to be complete."""

    async def attack() -> None:
        async with hostile(scene.address) as connection:
            stream, started = await connection.open(), trio.current_time()
            for byte in (1000).to_bytes(4) + bytes(300):
                await connection.data(stream, bytes([byte]))
                with trio.move_on_after(1):
                    await connection.until_ended(stream)
                    break
            assert 15 < trio.current_time() - started < 90

    trio.run(attack)


def test_the_victim_says_little_and_never_began_anew(scene: Scene) -> None:
    """After all of the above."""
    assert scene.victim.status()["network"]["restarts"] == 0
    assert len(scene.victim.log().splitlines()) < 100
