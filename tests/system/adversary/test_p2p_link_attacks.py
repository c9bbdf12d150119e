"""Attacks on /swarmproof/link/1, by peers that shake hands like any other: what they send, and how much, and when.

After each the victim is up, as small as it was, and serves who comes.
"""

# ruff: noqa: E402, TID251  (the attacker speaks libp2p, where it is installed)

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

trio = pytest.importorskip("trio")
pytest.importorskip("libp2p")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.io.exceptions import ConnectionClosedError
from p2p_attacker import DATA, FIN, RST, SYN, WINDOW_UPDATE, Gone, hostile, new_source, spoken
from p2p_scene import Process, Scene, counting_listener, descriptor, framed, record, scene_fixture, standing_fixture  # noqa: F401  (fixtures)
from prepared_replies import OTHER_KEY, RUN_ID, RUN_KEY, sealed_descriptor
from trio.testing import MockClock

from node.discovery.peer_book import MAX_PEERS, MAX_PER_SOURCE, is_plausible
from node.p2p.links import BURST_FRAMES, FRAMES_PER_SECOND, PROTOCOL
from node.p2p.transport import MAX_HELD_BYTES, WRITE_SECONDS, TcpStream
from node.protocol.peers import open_peer, peer_id_of
from node.protocol.run import run_id_of

OTHER_RUN = run_id_of(OTHER_KEY.public_key().public_bytes_raw())


# -- our own protocol


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x10\x00\x00" + bytes(1000),
        framed(bytes(300)),
        framed(b"VSW1"),
        b"\x00\x00\x01\x00" + b"a",
    ],
    ids=["4 GB", "1 MB", "zeros", "a magic alone", "a frame that ends early"],
)
def test_a_frame_that_is_none_ends_the_link(scene: Scene, sent: bytes) -> None:
    key, is_cut_off = Ed25519PrivateKey.generate(), len(sent) == 5

    async def attack() -> None:
        async with hostile(scene.address, key=key) as connection:
            stream = await connection.open()
            await connection.data(stream, sent)
            if is_cut_off:
                await connection.send(WINDOW_UPDATE, FIN, stream, 0)
            await connection.until_ended(stream)

    trio.run(attack)
    said = peer_id_of(key.public_key().public_bytes_raw()) in scene.victim.log()
    assert said is not is_cut_off, "a connection may break at any byte"


def test_a_flood_of_frames_is_read_slowly(scene: Scene) -> None:
    """Of a hundred thousand that fit into a window, each would cost a look at it."""
    before = scene.victim.status()["network"]["frames"]["received"]

    async def attack() -> None:
        async with hostile(scene.address) as connection:
            stream = await connection.open()
            started = trio.current_time()
            await connection.data(stream, framed(b"") * 60_000)
            await scene.assert_served()
            await trio.sleep(2)
            received = scene.victim.status()["network"]["frames"]["received"] - before
            served_meanwhile = 40
            assert received <= BURST_FRAMES + (trio.current_time() - started) * FRAMES_PER_SECOND + served_meanwhile

    trio.run(attack)


def test_a_flood_beyond_the_window_ends_the_connection(scene: Scene) -> None:
    """Yamux of py-libp2p keeps whatever comes."""

    async def attack() -> None:
        async with hostile(scene.address) as connection:
            stream = await connection.open()
            with pytest.raises(Gone):
                await connection.data(stream, framed(scene.coordinator.envelope) * 40_000)

    trio.run(attack)
    assert scene.victim.rss() - scene.rss < 10 + 2 * MAX_HELD_BYTES / 2**20


def forged() -> bytes:
    now = int(time.time())
    good = descriptor(99, endpoints=("http://192.0.2.1:1",), issued_at=now, expires_at=now + 60)
    return good[:-64] + OTHER_KEY.sign(good[:-64])


def of_another_run() -> bytes:
    return sealed_descriptor(key=OTHER_KEY)


def in_another_s_name() -> bytes:
    key, node = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    theirs = open_peer(record(node, ("127.0.0.1", 1)), run_id=RUN_ID, now=time.time()).addresses
    return record(key, addresses=tuple(map(str, theirs)))


@pytest.mark.parametrize(
    "made",
    [forged, of_another_run, in_another_s_name, lambda: record(OTHER_KEY, ("127.0.0.1", 1), run_id=OTHER_RUN)],
    ids=["a forged descriptor", "a descriptor of another run", "a record in another's name", "a record of another run"],
)
def test_whoever_sends_what_no_honest_peer_sends_is_shunned(scene: Scene, made) -> None:
    key = Ed25519PrivateKey.generate()

    async def attack() -> None:
        async with hostile(scene.address, key=key) as connection:
            stream = await connection.open()
            with contextlib.suppress(Gone):  # the first is enough to be hung up on
                await connection.data(stream, framed(made()) * 50)
            await connection.until_ended(stream)
        async with hostile(scene.address, key=key) as connection:
            with pytest.raises(Gone):
                await connection.frame(await connection.open(), seconds=5)

    trio.run(attack)
    assert peer_id_of(key.public_key().public_bytes_raw()) in scene.victim.log()


def test_a_flood_of_forgers_does_not_flood_the_log(scene: Scene) -> None:
    before = len(scene.victim.log().splitlines())

    async def attack() -> None:
        for _ in range(40):
            async with hostile(scene.address) as connection:
                stream = await connection.open()
                await connection.data(stream, framed(of_another_run()))
                await connection.until_ended(stream)

    trio.run(attack)
    assert len(scene.victim.log().splitlines()) - before <= 20


def test_expired_and_stale_descriptors_displace_nothing(scene: Scene) -> None:
    """The oldest that still holds, and all before it, are what a liar has who cannot sign."""
    now = int(time.time())
    scene.post_newer()
    oldest = descriptor(0, endpoints=("http://192.0.2.66:1",))
    expired = descriptor(scene.version + 5, issued_at=now - 90, expires_at=now - 30)

    async def attack() -> None:
        async with hostile(scene.address) as connection:
            stream = await connection.open()
            await connection.data(stream, framed(oldest) + framed(expired) * 10)
            await trio.sleep(0.3)
            assert not connection.gone.is_set(), "its clock may be wrong: no reason to shun it"

    trio.run(attack)
    assert scene.victim.status()["descriptor_version"] == scene.version


def test_replayed_gossip_after_the_run_moved_on(scene: Scene) -> None:
    """All that was ever said, again; the answer is what holds now."""
    heard: list[bytes] = []

    async def overhear() -> None:
        async with hostile(scene.address) as connection:
            stream = await connection.open()
            with trio.move_on_after(0.5):
                while True:
                    heard.append(await connection.frame(stream))

    async def replay() -> None:
        async with hostile(scene.address) as connection:
            stream = await connection.open()
            first = await connection.frame(stream)
            assert first == scene.coordinator.envelope
            for _ in range(4):
                await connection.data(stream, b"".join(map(framed, heard)))
            await trio.sleep(0.5)
            again = bytes(connection.received[stream])
            assert again.count(scene.coordinator.envelope) == 0, "and is said once"

    trio.run(overhear)
    scene.post_newer()
    trio.run(replay)
    assert scene.victim.status()["descriptor_version"] == scene.version


def test_thousands_of_fabricated_peers_fill_no_more_than_their_part_of_the_book(scene: Scene) -> None:
    async def attack() -> None:
        keys = [Ed25519PrivateKey.generate() for _ in range(60)]

        async def one(number: int) -> None:
            async with hostile(scene.address) as connection:
                stream = await connection.open()
                made = [record(key, (f"127.{number}.{at}.1", 9)) for at, key in enumerate(keys)]
                await connection.data(stream, b"".join(map(framed, made)))
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            for number in range(60, 66):
                nursery.start_soon(one, number)

    trio.run(attack)
    known = scene.victim.status()["network"]["known"]
    assert known <= 6 * MAX_PER_SOURCE
    assert known <= MAX_PEERS


def test_fabricated_peers_do_not_make_the_node_knock_at_a_victim_s_door(scene: Scene, tmp_path: Path) -> None:
    """A hundred keys that name one host: it would be called for each, by every node that was told."""
    told = Process(tmp_path, "--coordinator", scene.coordinator.url, "--run-id", RUN_ID)
    with counting_listener() as (port, calls):

        async def attack() -> None:
            for _ in range(2):
                async with hostile(told.address) as connection:
                    stream = await connection.open()
                    made = [record(Ed25519PrivateKey.generate(), ("127.0.0.1", port)) for _ in range(40)]
                    await connection.data(stream, b"".join(map(framed, made)))
                    await trio.sleep(1.5)

        trio.run(attack)
        told.close()
        assert 1 <= len(calls) <= 6, "once, and after 1, 2, 4 s again"


def test_a_record_does_not_have_a_victim_seen_after_or_passed_on(scene: Scene) -> None:
    """Its own address among a victim's; only the first is ever called, and it has to answer with the peer's key."""
    with counting_listener() as (port, calls):
        key, source = Ed25519PrivateKey.generate(), new_source()
        made = record(key, ("127.0.0.1", port), (source, port))

        async def attack() -> None:
            async with hostile(scene.address, key=key, source=source) as connection:
                stream = await connection.open()
                await connection.data(stream, framed(made))
                await trio.sleep(0.5)
            async with hostile(scene.address) as connection:
                stream = await connection.open()
                with trio.move_on_after(0.5):
                    while True:
                        assert await connection.frame(stream) != made

        trio.run(attack)
        assert len(calls) <= 2


def test_ports_of_a_host_are_not_scanned_for_a_peer_there(scene: Scene) -> None:
    """Behind one router are many; whoever calls from there says that it listens on one port after the other."""
    with counting_listener() as (port, calls):
        key = Ed25519PrivateKey.generate()
        now = int(time.time())

        async def attack() -> None:
            async with hostile(scene.address, key=key, source="127.0.0.1") as connection:
                stream = await connection.open()
                made = [record(key, ("127.0.0.1", port), issued_at=now + at) for at in range(40)]
                await connection.data(stream, b"".join(map(framed, made)))
                await trio.sleep(1)

        trio.run(attack)
        assert len(calls) <= 6


def test_whoever_is_far_away_cannot_have_the_own_network_scanned() -> None:
    now = time.time()

    def plausible(host: str, source: str) -> bool:
        return is_plausible(open_peer(record(RUN_KEY, (host, 22)), run_id=RUN_ID, now=now), source=source)

    assert plausible("8.8.8.8", "9.9.9.9")
    for inside in ("127.0.0.1", "10.0.0.5", "192.168.1.1", "169.254.169.254", "100.64.0.1"):
        assert not plausible(inside, "9.9.9.9")
        assert not plausible(inside, ""), "through a relay"
    assert plausible("192.168.1.7", "192.168.1.8")
    assert not plausible("127.0.0.1", "192.168.1.8")


def test_a_greeting_is_not_had_again_and_again(scene: Scene) -> None:
    """A few bytes bring a descriptor and a handful of records: a stream after another would keep the node sending."""

    async def attack() -> None:
        greeted, began = 0, time.monotonic()
        async with hostile(scene.address) as connection:
            for _ in range(60):
                try:
                    stream = await connection.open()
                    await connection.frame(stream, seconds=1)
                    greeted += 1
                except (Gone, trio.TooSlowError):
                    pass
                await connection.send(WINDOW_UPDATE, RST, stream, 0)
                if connection.gone.is_set():
                    break
        assert 1 <= greeted <= 8 + (time.monotonic() - began) / 5

    trio.run(attack)


def test_neighbours_that_never_read_hold_up_nobody(scene: Scene) -> None:
    async def attack() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(never_reads, scene)
            await trio.sleep(0.5)
            await scene.assert_served()
            await trio.to_thread.run_sync(scene.post_newer)
            await scene.assert_served()
            nursery.cancel_scope.cancel()

    trio.run(attack)


async def never_reads(scene: Scene) -> None:
    async with hostile(scene.address, grants=False) as connection:
        connection.reads = False
        hello = spoken("/multistream/1.0.0") + spoken(PROTOCOL)
        await connection.send(DATA, SYN, connection.new_stream(), len(hello), hello)
        await trio.sleep_forever()


def test_whoever_takes_nothing_is_cut_off() -> None:
    """What has to be sent waits for nobody for more than 10 s, which pass at once here."""

    async def rule() -> None:
        ours, theirs = trio.socket.socketpair()
        stream = TcpStream(trio.SocketStream(ours))
        started = trio.current_time()
        with pytest.raises(ConnectionClosedError):
            await stream.write(bytes(2**24))
        assert WRITE_SECONDS <= trio.current_time() - started < 2 * WRITE_SECONDS
        theirs.close()

    trio.run(rule, clock=MockClock(autojump_threshold=0.2))
