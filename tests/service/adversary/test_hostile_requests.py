"""Hostile requests to a relay: paths that lead elsewhere, readers that do not read, and far too many of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
import tracemalloc
from pathlib import Path

import pytest
from broadcast_scene import CHUNK, KEY, RUN_ID, Scene, Shows, changed, fetched
from broadcast_swarm import raw
from waiting import eventually

from shardcast import Delta, Head, Payload, ServerLimits, wire
from shardcast.envelope import seal
from shardcast.errors import Malformed
from shardcast.manifest import MANIFEST_DOMAIN, MIB, seal_head

SENTINEL = b"the key of another run"
SOMEWHERE_ELSE = [
    "/v1/payloads/../../../sentinel/0",
    "/v1/payloads/" + "../" * 30 + "etc/passwd",
    "/v1/payloads/..%2f..%2f..%2fsentinel/0",
    "/v1/payloads/%2e%2e/%2e%2e/sentinel",
    "/v1/payloads/..%252f..%252fsentinel/0",
    "/v1/payloads/..%5c..%5csentinel/0",
    "/v1/payloads/%00/0",
    "/v1/payloads/" + "0" * 64 + "%00/0",
    "/v1/payloads/" + "0" * 64 + "/0%2f..%2f..%2fsentinel",
    "/v1/payloads/" + "0" * 64 + "/../../../sentinel",
    "/v1/payloads/" + "\u0661" * 64 + "/0",
    "/v1/payloads/" + "a" * 900 + "/0",
    "/v1/manifests/../../state.json",
    "/v1/manifests/%2e%2e%2fstate.json",
    "/v1/versions/../state.json",
    "/v1/versions/1%2f..%2f..%2fsentinel",
    "/v1/versions/0000000000000001%00.json",
    "//sentinel",
    "/../sentinel",
    "/%2e%2e/sentinel",
    "http://127.0.0.1/v1/payloads/../../sentinel",
    "*",
    "sentinel",
]


async def test_path_traversal_reaches_no_file_outside_of_a_relay(scene: Scene) -> None:
    """shardcast 0.3.2 wrote where a peer's version name pointed, and served from there."""
    url, _ = await scene.relay(scene.url)
    await fetched(scene.client(url))
    (scene.folder / "sentinel").write_bytes(SENTINEL)
    (scene.folder / "relay" / "sentinel").write_bytes(SENTINEL)
    state = (scene.folder / "relay" / "state.json").read_bytes()
    port = int(url.rsplit(":", 1)[1])
    before = {path for path in scene.folder.rglob("*") if scene.folder / "client" not in path.parents}
    for path in SOMEWHERE_ELSE:
        answer = await raw(port, f"GET {path} HTTP/1.0\r\n\r\n".encode())
        status = answer.split(b" ", 2)[1:2]
        assert status in ([b"400"], [b"404"]), (path, answer[:80])
        assert SENTINEL not in answer
        assert state not in answer
    assert {path for path in scene.folder.rglob("*") if scene.folder / "client" not in path.parents} == before


@pytest.mark.parametrize("version", ["../../escaped", "1/../../escaped", "/tmp/escaped", "1\0", -1, 2**60])
async def test_a_version_that_is_a_path_is_refused(scene: Scene, version: object) -> None:
    """Signed by the run's own key: even then a manifest names no file."""
    fields = json.loads(wire.encode(scene.signed(1).manifest))
    fields["version"] = version
    payload = json.dumps(fields, separators=(",", ":")).encode()
    envelope = seal(payload, domain=MANIFEST_DOMAIN, version=2, key=KEY)
    digest, now = wire.digest(payload), int(time.time())
    head = Head(run_id=RUN_ID, version=9, manifest_digest=digest, issued_at=now, expires_at=now + 60)
    bad, hostile = await scene.hostile(Shows)
    hostile.shown = {"/v1/head": seal_head(head, KEY), f"/v1/manifests/{digest}": envelope}
    with pytest.raises(Malformed):
        await fetched(scene.client(bad))
    await scene.relay(bad)
    await eventually(lambda: hostile.asked["manifests"] > 1)
    names = {path.name for folder in ("client", "relay") for path in (scene.folder / folder / "manifests").iterdir()}
    assert names == set()
    assert not list(scene.folder.rglob("*escaped*"))


# -- slow and many


async def slow_reader(port: int, path: str) -> socket.socket:
    """Asks, and reads next to nothing of the answer."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(peer, ("127.0.0.1", port))
    await loop.sock_sendall(peer, f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    return peer


async def test_slow_readers_of_a_large_manifest_take_no_memory(scene: Scene) -> None:
    """Megabytes for each of a thousand connections would be the end of a small relay."""
    limits = ServerLimits(transfer_timeout_s=2.0)
    _, relay = await scene.relay(scene.url, server_limits=limits)
    digests = random.Random(0).randbytes(32 * 2**17)
    large = Payload(chunk_bytes=CHUNK, payload_bytes=CHUNK * 2**17, chunk_digests=digests)
    signed = changed(scene.signed(1), version=2, full=large)
    relay._store.add_manifest(signed, only_manifest=True)
    listener = relay._listener
    assert listener is not None
    readers = list[socket.socket]()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(30):
            readers.append(await slow_reader(listener.port, f"/v1/manifests/{signed.digest}"))
        await asyncio.sleep(0.5)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < len(signed.envelope) * 4, "of thirty copies"
    await eventually(lambda: listener.connections < 5)
    for reader in readers:
        reader.close()


def descriptors_of(suffix: str) -> int:
    """How many of this process are of files whose names end so."""
    targets = list[str]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of the listing
            targets.append(link.readlink().name)
    return sum(target.endswith(suffix) for target in targets)


async def test_slow_readers_of_a_deltas_chunks_hold_no_descriptors(scene: Scene) -> None:
    """A chunk in sending keeps its file open: for as long as the reader likes, were there no deadline."""
    limits = ServerLimits(transfer_timeout_s=1.0)
    _, relay = await scene.relay(scene.url, server_limits=limits)
    data = bytes(8 * MIB)
    digests = bytes.fromhex(wire.digest(data))
    large = Payload(chunk_bytes=len(data), payload_bytes=len(data), chunk_digests=digests)
    full = Payload(chunk_bytes=len(data), payload_bytes=2 * len(data), chunk_digests=digests + bytes(32))
    way = Delta(base="00" * 32, base_version=0, payload=large)
    signed = changed(scene.signed(1), version=2, full=full, deltas=(way,))
    relay._store.add_manifest(signed, only_manifest=True)
    file = relay._store.delta(signed, 0)
    file.write(0, data)
    file.finish()
    listener = relay._listener
    assert listener is not None
    readers = [await slow_reader(listener.port, f"/v1/payloads/{large.digest}/0") for _ in range(40)]
    await eventually(lambda: descriptors_of(".delta") > 0)
    await eventually(lambda: descriptors_of(".delta") == 0)
    for reader in readers:
        reader.close()


async def test_slow_loris_does_not_keep_a_relay_from_its_readers(scene: Scene) -> None:
    """A hundred headers that never end, while a version with deltas goes through."""
    url, _ = await scene.relay(scene.url, server_limits=ServerLimits(idle_timeout_s=0.6))
    client = scene.client(url)
    await fetched(client)
    port = int(url.rsplit(":", 1)[1])
    dribblers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    for _, writer in dribblers:
        writer.write(b"GET /v1/payloads/00")
    weights = await scene.publish(2)
    assert await fetched(client, after=1) == weights
    assert client.fetched.by_delta == 1
    ends = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in dribblers)), 60)
    assert len(ends) == 100, "each was cut off"
    for _, writer in dribblers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_flood_of_connections_from_one_address_leaves_room_for_others(scene: Scene) -> None:
    """On loopback every address of 127/8 is one's own: the flood comes from 127.0.0.2."""
    limits = ServerLimits(max_connections=60, max_connections_per_address=20)
    url, relay = await scene.relay(scene.url, server_limits=limits)
    port = int(url.rsplit(":", 1)[1])
    flood = [socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) for _ in range(200)]
    listener = relay._listener
    assert listener is not None
    await eventually(lambda: listener.refused == 180)
    assert await fetched(scene.client(url)) == (scene.folder / "weights").read_bytes()
    assert listener.connections <= 20 + 16 + 4
    for peer in flood:
        peer.close()


@pytest.mark.parametrize(
    "asked", [b"", b"GET /v1/head?after=9&wait=30 HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["idle", "waiting"]
)
async def test_connections_from_a_handful_of_addresses_leave_room_for_others(scene: Scene, asked: bytes) -> None:
    """Each holds what an address may, so that all are taken: who has most gives way, and not who comes."""
    limits = ServerLimits(max_connections=60, max_connections_per_address=20, idle_timeout_s=300.0)
    url, relay = await scene.relay(scene.url, server_limits=limits)
    port = int(url.rsplit(":", 1)[1])
    addresses = [f"127.0.0.{number}" for number in range(2, 8)]
    flood = [
        socket.create_connection(("127.0.0.1", port), source_address=(address, 0))
        for address in addresses
        for _ in range(20)
    ]
    for peer in flood:
        peer.sendall(asked)
    listener = relay._listener
    assert listener is not None
    await eventually(lambda: listener.connections + listener.refused >= 120)
    assert await fetched(scene.client(url)) == (scene.folder / "weights").read_bytes()
    await eventually(lambda: listener.connections <= 60)
    for peer in flood:
        peer.close()
