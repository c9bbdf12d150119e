"""Attacks on a broadcast with deltas: one test or more for every threat, through the door that the attacker uses.

Origins, relays and clients are real and speak HTTP on loopback. The hostile relays stand in front of an honest
node and spoil some of its answers. `test_hostile_relay.py` has the attacks that need no deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import zstandard
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import (
    Client,
    Delta,
    DeltaSettings,
    DownloadLimits,
    FraudProof,
    Head,
    Listener,
    Manifest,
    Origin,
    OriginServer,
    Payload,
    Relay,
    ServerLimits,
    SignedManifest,
    SourceLimits,
    TransportLimits,
    check_fraud_proof,
    fetching,
    listen,
    wire,
)
from shardcast.delta import window_bytes_of
from shardcast.envelope import seal
from shardcast.errors import Equivocation, Malformed
from shardcast.manifest import MANIFEST_DOMAIN, MIB, seal_head, seal_manifest

CHUNK = 4096
SIZE = 100 * CHUNK
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
RUN_ID = wire.digest(PUBLIC)

IMPATIENT: dict[str, Any] = {
    "poll_s": 0.3,
    "download_limits": DownloadLimits(race_after_s=0.1, stall_s=1.0, chunk_wait_s=0.5),
    "transport_limits": TransportLimits(answer_s=0.5, idle_s=0.5, rate_grace_s=0.3, min_bytes_per_s=2000, total_s=3.0),
}
CHAINED = DeltaSettings(fold_every=1000)


class Between:
    """A hostile relay: it passes on what an honest node answers, but for what a subclass spoils."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.asked: Counter[str] = Counter()

    async def start(self) -> str:
        self._session = aiohttp.ClientSession()
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self._handle)])
        self._listener: Listener = await listen(app)
        return f"http://127.0.0.1:{self._listener.port}"

    async def stop(self) -> None:
        await self._listener.stop()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path.split("/")[2]] += 1
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return await self.honest(request.path_qs)

    async def honest(self, path: str) -> web.Response:
        async with self._session.get(self.upstream + path) as response:
            return web.Response(status=response.status, body=await response.read())


class Scene:
    """An origin that publishes versions which differ little, and what is around it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._stops = folder, list[Callable[[], Any]]()
        self._weights = np.random.default_rng(0).integers(0, 2**16, SIZE // 2, dtype=np.uint16)
        self.origin = Origin(folder / "origin", KEY, RUN_ID, chunk_bytes=CHUNK, deltas=CHAINED)
        self.server = OriginServer(self.origin)
        self.url = f"http://127.0.0.1:{self.server.start()}"

    async def publish(self, version: int) -> bytes:
        at = np.random.default_rng(version).choice(len(self._weights), len(self._weights) // 20, replace=False)
        self._weights[at] += 1
        self._weights.tofile(self.folder / "weights")
        await asyncio.to_thread(self.server.publish, self.folder / "weights", version=version)
        return self._weights.tobytes()

    def signed(self, version: int) -> SignedManifest:
        signed = self.origin.store.get(version)
        assert signed is not None
        return signed

    async def hostile(self, kind: type[Between], **options: Any) -> tuple[str, Any]:
        node = kind(self.url, **options)
        url = await node.start()
        self._stops.append(node.stop)
        return url, node

    async def relay(self, *upstreams: str, name: str = "relay", **options: Any) -> tuple[str, Relay]:
        relay = Relay(
            upstreams,
            store_dir=self.folder / name,
            run_id=RUN_ID,
            publisher_key=PUBLIC,
            **{**IMPATIENT, **options},
        )
        url = f"http://127.0.0.1:{await relay.start()}"
        self._stops.append(relay.stop)
        return url, relay

    def client(self, *sources: str, name: str = "client", **options: Any) -> Client:
        client = Client(RUN_ID, PUBLIC, sources, self.folder / name, **{**IMPATIENT, **options})
        self._stops.append(client.close)
        return client

    async def client_with_version_1(self, *sources: str, **options: Any) -> Client:
        """A client that holds the base of a delta from an honest time, and has bad company from now on."""
        client = self.client(self.url, **options)
        await fetched(client)
        client.set_sources(sources)
        return client

    async def close(self) -> None:
        for stop in reversed(self._stops):
            await stop()
        await asyncio.to_thread(self.server.stop)
        self.origin.close()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    await made.publish(1)
    yield made
    await made.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        yield session


async def fetched(client: Client, *, after: int = -1) -> bytes:
    head = await client.wait_head(after=after, timeout_s=3)
    assert head is not None
    return (await client.fetch(head, timeout_s=15)).read_bytes()


async def until(condition: Callable[[], object], *, within_s: float = 8.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)


def row(rows: list[dict[str, Any]], url: str) -> dict[str, Any]:
    return next(row for row in rows if row["url"] == url)


# -- corrupt chunks


class FlipsBits(Between):
    """In the chunks of the payloads it is told."""

    spoiled: frozenset[str] = frozenset()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        answer = await self.honest(request.path_qs)
        if request.path.split("/")[-2] in self.spoiled:
            data = bytearray(answer.body)  # type: ignore[arg-type]
            data[len(data) // 2] ^= 0x10
            answer.body = bytes(data)
        return answer


async def test_a_flipped_bit_in_a_delta_costs_a_refetch_and_the_relay_its_standing(scene: Scene) -> None:
    """A delta is applied to weights that a worker holds: one bit could otherwise spoil all of them."""
    url, hostile = await scene.hostile(FlipsBits)
    client = await scene.client_with_version_1(url)
    weights = await scene.publish(2)
    hostile.spoiled = {scene.signed(2).manifest.deltas[0].payload.digest}
    head = await client.wait_head(after=1, timeout_s=3)
    assert head is not None
    fetching_it = asyncio.create_task(client.fetch(head, timeout_s=15))
    await until(lambda: row(client.sources_status(), url)["state"] == "quarantined")
    client.set_sources([url, scene.url])
    assert (await fetching_it).read_bytes() == weights
    assert client.fetched.by_delta == 1
    described = row(client.sources_status(), url)
    assert (described["state"], described["code"]) == ("quarantined", "corrupt_chunk")


async def test_a_relay_does_not_pass_on_a_corrupt_delta(scene: Scene, http: aiohttp.ClientSession) -> None:
    bad, hostile = await scene.hostile(FlipsBits)
    weights = await scene.publish(2)
    name = scene.signed(2).manifest.deltas[0].payload.digest
    hostile.spoiled = {name}
    url, relay = await scene.relay(bad)
    await until(lambda: row(relay.upstreams(), bad)["code"] == "corrupt_chunk")
    async with http.get(f"{url}/v1/payloads/{name}/0") as response:
        assert response.status == 503
    relay.set_upstreams([scene.url])
    async with http.get(f"{url}/v1/payloads/{name}/0?wait=8") as response:
        assert wire.digest(await response.read()) == scene.signed(2).manifest.deltas[0].payload.chunk_digest(0)
    assert await fetched(scene.client(url)) == weights


class SwapsPayloads(Between):
    """Sends a delta's chunk where one of the result is asked for, and the other way round."""

    scene: Scene

    async def answer(self, request: web.Request) -> web.StreamResponse:
        newest = self.scene.signed(2).manifest
        names = [newest.full.digest, newest.deltas[0].payload.digest]
        for name, other in zip(names, reversed(names), strict=True):
            if name in request.path:
                return await self.honest(f"/v1/payloads/{other}/{int(request.match_info['path'][-1]) % 2}")
        return await self.honest(request.path_qs)


class ShiftsIndices(Between):
    """Sends a valid chunk of the right payload: another one."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "/payloads/" not in request.path:
            return await self.honest(request.path_qs)
        front, index = request.path.rsplit("/", 1)
        answer = await self.honest(f"{front}/{int(index) ^ 1}")
        return answer if answer.status == 200 else await self.honest(request.path_qs)


@pytest.mark.parametrize("kind", [SwapsPayloads, ShiftsIndices])
async def test_swapped_chunks_are_refused_however_valid(scene: Scene, kind: type[Between]) -> None:
    """Every byte of it was signed, and yet the weights would be others."""
    bad, hostile = await scene.hostile(kind)
    hostile.scene = scene
    client = await scene.client_with_version_1(bad, scene.url)
    weights = await scene.publish(2)
    assert await fetched(client, after=1) == weights
    newcomer = scene.client(bad, scene.url, name="newcomer")
    assert await fetched(newcomer) == weights
    described = row(newcomer.sources_status(), bad)
    assert (described["state"], described["code"]) in {
        ("quarantined", "corrupt_chunk"),
        ("quarantined", "wrong_length"),
    }


async def test_a_quarantine_is_seen_with_its_reason(
    scene: Scene, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator has to learn which upstream lies, and how: from metrics, status page and log alike."""
    bad, hostile = await scene.hostile(FlipsBits)
    hostile.spoiled = {scene.signed(1).manifest.full.digest}
    with caplog.at_level(logging.WARNING, logger="shardcast"):
        url, relay = await scene.relay(bad)
        await until(lambda: row(relay.upstreams(), bad)["state"] == "quarantined")
    async with http.get(url + "/metrics") as response:
        figures = (await response.text()).splitlines()
    assert f'shardcast_source_quarantined{{reason="corrupt_chunk",source="{bad}"}} 1.0' in figures
    async with http.get(url + "/v1/status") as response:
        described = row((await response.json())["upstreams"], bad)
    assert (described["state"], described["code"]) == ("quarantined", "corrupt_chunk")
    assert "not chunk" in described["reason"]
    assert any(bad in line and "corrupt_chunk" in line for line in caplog.messages)


# -- stale versions


class Shows(Between):
    """Has answers of its own for some paths."""

    shown: dict[str, bytes]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (body := self.shown.get(request.path)) is not None:
            return web.Response(body=body)
        return await self.honest(request.path_qs)


def shown(signed: SignedManifest) -> dict[str, bytes]:
    """What a node answers whose newest version is this one."""
    now = int(time.time())
    version = signed.manifest.version
    head = Head(run_id=RUN_ID, version=version, manifest_digest=signed.digest, issued_at=now, expires_at=now + 60)
    paths = (f"/v1/manifests/{signed.digest}", f"/v1/versions/{version}")
    return {"/v1/head": seal_head(head, KEY), **dict.fromkeys(paths, signed.envelope)}


def changed(signed: SignedManifest, **changes: Any) -> SignedManifest:
    """A manifest that the publisher signs, though it made it otherwise."""
    fields = {name: getattr(signed.manifest, name) for name in Manifest.__struct_fields__}
    return seal_manifest(Manifest(**{**fields, **changes}), KEY)


def payload_of(data: bytes) -> Payload:
    digests = (bytes.fromhex(wire.digest(data[at : at + CHUNK])) for at in range(0, len(data), CHUNK))
    return Payload(chunk_bytes=CHUNK, payload_bytes=len(data), chunk_digests=b"".join(digests))


async def test_a_manifest_of_the_old_schema_is_refused(scene: Scene) -> None:
    """The first schema listed a delta's chunks as the version's own: to take one for the other is to load a delta."""
    signed = scene.signed(1)
    payload = wire.encode(signed.manifest)
    old = seal(payload, domain=MANIFEST_DOMAIN, version=1, key=KEY)
    url, hostile = await scene.hostile(Shows)
    hostile.shown = {f"/v1/manifests/{signed.digest}": old}
    client = scene.client(url)
    with pytest.raises(Malformed, match="version"):
        await fetched(client)
    assert list((scene.folder / "client" / "manifests").iterdir()) == []


# -- withholding


class Withholds(Between):
    """Serves everything but the payloads, or the old manifests, that it is told: it never answers for those."""

    def __init__(self, upstream: str, *, kept: Callable[[str], bool], status: int | None = None) -> None:
        super().__init__(upstream)
        self._kept, self._status = kept, status

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self._kept(request.path):
            return await self.honest(request.path_qs)
        if self._status is None:
            await asyncio.sleep(3600)
        return web.Response(status=self._status or 500)


@pytest.mark.parametrize("status", [None, 404, 500, 503])
async def test_withheld_deltas_cost_seconds_and_not_the_version(scene: Scene, status: int | None) -> None:
    deltas = set[str]()
    url, _ = await scene.hostile(Withholds, kept=lambda path: path.split("/")[-2] in deltas, status=status)
    client = await scene.client_with_version_1(url, source_limits=SourceLimits(max_backoff_s=0.3))
    weights = await scene.publish(2)
    deltas |= {delta.payload.digest for delta in scene.signed(2).manifest.deltas}
    started = time.monotonic()
    assert await fetched(client, after=1) == weights
    assert time.monotonic() - started < 8
    assert (client.fetched.by_delta, client.fetched.in_full) == (0, 2)


async def test_withheld_old_manifests_do_not_hold_up_who_is_far_behind(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain is found by asking for each manifest in between; every answer could be late."""
    monkeypatch.setattr(fetching, "ROUTE_S", 1.0)
    url, hostile = await scene.hostile(Withholds, kept=lambda path: "/versions/" in path)
    client = await scene.client_with_version_1(url, transport_limits=TransportLimits(answer_s=30))
    for version in range(2, 8):
        weights = await scene.publish(version)
    started = time.monotonic()
    assert await fetched(client, after=1) == weights
    assert time.monotonic() - started < 8
    assert hostile.asked["versions"] > 0


async def test_withheld_deltas_do_not_pile_up_work_at_a_relay(scene: Scene, http: aiohttp.ClientSession) -> None:
    """It tries again with every poll: what still hangs from the last time must not be joined by more."""
    deltas = set[str]()
    bad, _ = await scene.hostile(Withholds, kept=lambda path: path.split("/")[-2] in deltas)
    for version in (2, 3):
        weights = await scene.publish(version)
        deltas |= {delta.payload.digest for delta in scene.signed(version).manifest.deltas}
    url, _ = await scene.relay(bad, poll_s=0.05)
    assert await fetched(scene.client(url)) == weights
    await asyncio.sleep(1.5)
    passing_on = [task for task in asyncio.all_tasks() if "_pass_on" in repr(task.get_coro())]
    assert len(passing_on) <= 1, "one for each version that lacks deltas"
    async with http.get(url + "/health") as response:
        assert response.status == 200


class Dawdles(Between):
    """Every chunk comes, at just above the minimum rate."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        answer = await self.honest(request.path_qs)
        if "/payloads/" not in request.path:
            return answer
        slow = web.StreamResponse(headers={"Content-Length": str(len(answer.body))})  # type: ignore[arg-type]
        await slow.prepare(request)
        for start in range(0, CHUNK, 256):
            await slow.write(answer.body[start : start + 256])  # type: ignore[index]
            await asyncio.sleep(0.1)  # 2,560 bytes/s, where 2,000 are asked for
        return slow


async def test_a_relay_just_above_the_minimum_rate_hardly_slows_a_fetch(scene: Scene) -> None:
    """All chunks from it would take 160 s; none of them is late enough to be an error."""
    bad, hostile = await scene.hostile(Dawdles)
    client = scene.client(bad, scene.url)
    started = time.monotonic()
    assert len(await fetched(client)) == SIZE
    assert hostile.asked["payloads"] > 0
    assert time.monotonic() - started < 8


# -- two histories


async def test_equivocation_about_nothing_but_the_deltas_is_equivocation(scene: Scene) -> None:
    """The weights are the same, but what a log entry names by digest is not."""
    await scene.publish(2)
    client = scene.client(scene.url)
    await fetched(client)
    other = changed(scene.signed(2), deltas=())
    assert other.manifest.result_digest == scene.signed(2).manifest.result_digest
    url, hostile = await scene.hostile(Shows)
    hostile.shown = shown(other)
    client.set_sources([url])
    with pytest.raises(Equivocation):
        await client.wait_head(after=2, timeout_s=2)
    proof = wire.decode(FraudProof, (scene.folder / "client" / "equivocation-2.json").read_bytes(), max_bytes=1_000_000)
    assert check_fraud_proof(proof, run_id=RUN_ID, publisher_key=PUBLIC) == 2


# -- bombs


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
    await until(lambda: hostile.asked["manifests"] > 0)
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
        await until(lambda: relay._store.is_whole(version))  # noqa: B023  called before the next version
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


# -- paths


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


async def raw(port: int, request: bytes, *, wait_s: float = 5.0) -> bytes:
    """What the server answers to these exact bytes, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(100_000), wait_s)
    finally:
        writer.close()


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
    await until(lambda: hostile.asked["manifests"] > 1)
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
    await until(lambda: listener.connections < 5)
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
    await until(lambda: descriptors_of(".delta") == len(readers))
    await until(lambda: descriptors_of(".delta") == 0)
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
    ends = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in dribblers)), 6)
    assert len(ends) == 100, "each was cut off"
    for _, writer in dribblers:
        writer.close()


async def test_a_flood_of_connections_from_one_address_leaves_room_for_others(scene: Scene) -> None:
    """On loopback every address of 127/8 is one's own: the flood comes from 127.0.0.2."""
    limits = ServerLimits(max_connections=60, max_connections_per_address=20)
    url, relay = await scene.relay(scene.url, server_limits=limits)
    port = int(url.rsplit(":", 1)[1])
    flood = [socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) for _ in range(200)]
    listener = relay._listener
    assert listener is not None
    await until(lambda: listener.refused == 180)
    assert await fetched(scene.client(url)) == (scene.folder / "weights").read_bytes()
    assert listener.connections <= 20 + 16 + 4
    for peer in flood:
        peer.close()
