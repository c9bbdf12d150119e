"""Bombs: what is small when it arrives must not take a node's memory, and what is signed must not take its disk."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from pathlib import Path

import aiohttp
import pytest
import zstandard
from broadcast_scene import CHUNK, SIZE, Scene, Shows, changed, fetched, payload_of, shown
from waiting import eventually

from shardcast import Delta, Limits, Payload
from shardcast.codec.delta import window_bytes_of
from shardcast.errors import Malformed
from shardcast.manifest import MIB


def delta_file(result_bytes: int, change: bytes) -> bytes:
    """A delta of one window with this change."""
    window_bytes = window_bytes_of(CHUNK)
    assert result_bytes <= window_bytes
    numbers = (result_bytes, window_bytes)
    return b"SCDELTA1" + b"".join(n.to_bytes(8, "little") for n in numbers) + len(change).to_bytes(4, "little") + change


def segment(mode: int, words: int, body: bytes) -> bytes:
    """A change of one segment of single bytes."""
    head = bytes([mode, 1]) + words.to_bytes(4, "little") + len(body).to_bytes(4, "little")
    return (1).to_bytes(2, "little") + head + body


def zeros_frame(size: int, *, said: int) -> bytes:
    """A zstd frame of `size` zeros whose header says `said`: single segment, 8 bytes of content size (RFC 8878)."""
    piece = bytes(1 << 20)
    packer = zstandard.ZstdCompressor(level=3, write_content_size=False).compressobj()
    frame = b"".join(packer.compress(piece) for _ in range(size >> 20)) + packer.flush()
    header = zstandard.frame_header_size(frame)
    return frame[:4] + bytes([0b1110_0000]) + said.to_bytes(8, "little") + frame[header:]


BOMBS = {
    "says what it holds": segment(
        2, SIZE, (len(f := zeros_frame(256 * MIB, said=256 * MIB))).to_bytes(4, "little") + f
    ),
    "says less than it holds": segment(
        2, SIZE, (len(f := zeros_frame(256 * MIB, said=SIZE))).to_bytes(4, "little") + f
    ),
    "says more than there is memory": segment(
        3, SIZE, (len(f := zeros_frame(MIB, said=2**62))).to_bytes(4, "little") + f
    ),
    "a set of more numbers than there are": segment(1, SIZE, b"\x01" + b"\xff\xff\xff\xff" * 2 + b"\x00" * 40),
    "a change that is larger than its window": segment(1, 2**21, b"\x00" * 100),
}


@pytest.mark.parametrize("kind", BOMBS)
async def test_a_decompression_bomb_under_the_publishers_key_falls_back_to_full(scene: Scene, kind: str) -> None:
    """Whoever has the run's key must still not be able to take a worker's memory."""
    client = await scene.client_with_version_1()
    weights = await scene.publish(2)
    bomb = delta_file(SIZE, BOMBS[kind])
    assert len(bomb) < SIZE
    way = Delta(base=scene.signed(1).manifest.result_digest, base_version=1, payload=payload_of(bomb))
    signed = changed(scene.signed(2), deltas=(way,))
    url, hostile = await scene.hostile(Shows)
    name = way.payload.digest
    chunks = {f"/v1/payloads/{name}/{at // CHUNK}": bomb[at : at + CHUNK] for at in range(0, len(bomb), CHUNK)}
    hostile.shown = {**shown(signed), **chunks}
    client.set_sources([url])
    tracemalloc.start()
    try:
        assert await fetched(client, after=1) == weights
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    finally:
        tracemalloc.stop()
    assert client.fetched.in_full == 2
    assert client.fetched.bytes_in > SIZE + len(bomb), "the bomb was fetched, and refused"


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


async def test_a_disk_bomb_is_refused_by_the_quota_of_a_relay(scene: Scene, http: aiohttp.ClientSession) -> None:
    """A signed manifest of 64 GiB takes nothing, and what was served before goes on being served."""
    url, relay = await scene.relay(scene.url, quota_bytes=4 * SIZE)
    weights = (scene.folder / "weights").read_bytes()
    assert await fetched(scene.client(url)) == weights
    size = 64 * 1024 * MIB
    digests = random.Random(0).randbytes(32 * (size // (16 * MIB)))
    huge = Payload(chunk_bytes=16 * MIB, payload_bytes=size, chunk_digests=digests)
    bad, hostile = await scene.hostile(Shows)
    hostile.shown = shown(changed(scene.signed(1), version=2, previous=scene.signed(1).digest, full=huge))
    relay.set_upstreams([bad])
    await eventually(lambda: hostile.asked["manifests"] > 0)
    await asyncio.sleep(0.2)
    assert on_disk(scene.folder / "relay") < 2 * SIZE
    async with http.get(f"{url}/v1/payloads/{huge.digest}/0") as response:
        assert response.status == 404
    assert await fetched(scene.client(url, name="late")) == weights


async def test_deltas_count_against_the_quota_of_a_relay(scene: Scene) -> None:
    """Small versions with deltas, one after the other, must not fill a relay's disk by and by."""
    quota = 2 * SIZE + SIZE // 2
    _, relay = await scene.relay(scene.url, quota_bytes=quota)
    for version in range(2, 9):
        await scene.publish(version)
        await eventually(lambda: relay._store.is_whole(version))  # noqa: B023  called before the next version
        assert relay._store.planned_bytes <= quota
    payloads = sum(on_disk(scene.folder / "relay" / part) for part in ("versions", "deltas", "downloads"))
    assert payloads <= quota + 64 * CHUNK, "but for blocks that are partly filled"


async def test_a_chain_that_exceeds_the_quota_does_not_keep_a_relay_from_the_newest(scene: Scene) -> None:
    """Deltas to versions in between want room, too: where there is none, the version is fetched in full."""
    url, relay = await scene.relay(scene.url, quota_bytes=2 * SIZE + SIZE // 4)
    await fetched(scene.client(url))
    relay.set_upstreams([])
    for version in (2, 3, 4):
        weights = await scene.publish(version)
    relay.set_upstreams([scene.url])
    assert await fetched(scene.client(url, name="late"), after=3) == weights


async def test_a_manifest_that_promises_more_than_the_limit_takes_no_disk(scene: Scene) -> None:
    """Even the publisher's key must not be able to fill a worker's disk."""
    client = scene.client(await scene.honest(), limits=Limits(max_payload_bytes=SIZE - 1))
    with pytest.raises(Malformed) as caught:
        await fetched(client)
    assert caught.value.code == "payload_size"
    assert not list((scene.folder / "client" / "downloads").iterdir())
