"""Attacks by relays and other strangers on real clients and relays, over HTTP on loopback.

A hostile relay may send anything. It must not get a wrong byte past a client or another relay, an old
version taken for the newest, memory or disk beyond the limits, or a transfer that never ends. With one
honest source beside it, the version arrives all the same.
"""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import (
    Client,
    DownloadLimits,
    FraudProof,
    Limits,
    Listener,
    Origin,
    Relay,
    SourceLimits,
    TransportLimits,
    check_fraud_proof,
    listen,
    wire,
)
from shardcast.errors import (
    BadSignature,
    CorruptChunk,
    Equivocation,
    Malformed,
    ShardcastError,
    Stale,
    TooSlow,
)
from shardcast.manifest import Head, seal_head, seal_manifest

CHUNK = 4096
CHUNKS = 24
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
RUN_ID = wire.digest(PUBLIC)

IMPATIENT: dict[str, Any] = {
    "poll_s": 0.3,
    "download_limits": DownloadLimits(race_after_s=0.1, stall_s=1.5, chunk_wait_s=0.5),
    "transport_limits": TransportLimits(answer_s=1.0, idle_s=0.5, rate_grace_s=0.3, min_bytes_per_s=2000, total_s=3.0),
}


class Node:
    """An honest node over an origin's store; each hostile one below replaces an answer."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.asked: Counter[str] = Counter()

    async def start(self) -> str:
        app = web.Application()
        for path, answer in (
            ("/v1/head", self.head),
            ("/v1/manifests/{name}", self.manifest),
            ("/v1/versions/{name}", self.manifest),
            ("/v1/payloads/{name}/{index}", self.chunk),
        ):
            app.add_routes([web.get(path, self._counted(answer))])
        self.listener: Listener = await listen(app)
        return f"http://127.0.0.1:{self.listener.port}"

    def _counted(
        self, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(request: web.Request) -> web.StreamResponse:
            self.asked[request.path.split("/")[2]] += 1
            return await answer(request)

        return handler

    async def head(self, request: web.Request) -> web.StreamResponse:
        shown = self.origin.head()
        if shown is None or shown.version <= int(request.query.get("after", -1)):
            await asyncio.sleep(float(request.query.get("wait", 0)))
            return web.Response(status=204)
        return web.Response(body=shown.envelope)

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        store = self.origin.store
        signed = store.get(int(name)) if "versions" in request.path else store.by_digest(name)
        return web.Response(status=404) if signed is None else web.Response(body=signed.envelope)

    def data(self, request: web.Request) -> bytes:
        file = self.origin.store.payload(request.match_info["name"])
        assert file is not None
        data = file.read(int(request.match_info["index"]))
        assert data is not None
        return data

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.data(request))


@dataclass
class Scene:
    folder: Path
    origin: Origin
    payload: bytes
    nodes: list[Node] = field(default_factory=list)
    _clients: list[Client] = field(default_factory=list)
    _relays: list[Relay] = field(default_factory=list)

    async def node(self, node: Node) -> str:
        url = await node.start()
        self.nodes.append(node)
        return url

    async def honest(self) -> str:
        return await self.node(Node(self.origin))

    def client(self, *urls: str, name: str = "client", **options: Any) -> Client:
        client = Client(RUN_ID, PUBLIC, urls, self.folder / name, **{**IMPATIENT, **options})
        self._clients.append(client)
        return client

    async def relay(self, *urls: str, **options: Any) -> tuple[str, Relay]:
        relay = Relay(
            urls,
            store_dir=self.folder / "relay",
            run_id=RUN_ID,
            publisher_key=PUBLIC,
            **{**IMPATIENT, **options},
        )
        self._relays.append(relay)
        return f"http://127.0.0.1:{await relay.start()}", relay

    def publish(self, version: int) -> bytes:
        payload = random.Random(version).randbytes(CHUNKS * CHUNK)
        (self.folder / "weights").write_bytes(payload)
        self.origin.publish(self.folder / "weights", version=version)
        return payload

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for relay in self._relays:
            await relay.stop()
        for node in self.nodes:
            await node.listener.stop()
        self.origin.close()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path, Origin(tmp_path / "origin", KEY, RUN_ID, chunk_bytes=CHUNK), b"")
    made.payload = made.publish(1)
    yield made
    await made.close()


async def fetched(client: Client) -> bytes:
    head = await client.wait_head(timeout_s=2)
    assert head is not None
    return (await client.fetch(head, timeout_s=8)).read_bytes()


def row(client: Client, url: str) -> dict[str, Any]:
    return next(row for row in client.sources_status() if row["url"] == url)


def head_of(origin: Origin, **changes: Any) -> bytes:
    latest = origin.store.versions()[-1]
    now = int(time.time())
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "version": latest.manifest.version,
        "manifest_digest": latest.digest,
        "issued_at": now,
        "expires_at": now + 60,
    }
    return seal_head(Head(**{**fields, **changes}), KEY)


# -- chunks


class FlipsBits(Node):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        data = bytearray(self.data(request))
        data[len(data) // 2] ^= 1
        return web.Response(body=bytes(data))


async def test_corrupt_chunks_cost_a_refetch_and_the_relay_its_standing(scene: Scene) -> None:
    hostile = FlipsBits(scene.origin)
    bad, good = await scene.node(hostile), await scene.honest()
    client = scene.client(bad, good)
    assert await fetched(client) == scene.payload
    described = row(client, bad)
    assert (described["state"], described["code"]) == ("quarantined", "corrupt_chunk")
    assert "not chunk" in described["reason"]
    assert hostile.asked["payloads"] <= SourceLimits().per_source, "quarantine takes effect at once"


async def test_corrupt_chunks_alone_yield_an_error_and_no_file(scene: Scene) -> None:
    client = scene.client(await scene.node(FlipsBits(scene.origin)))
    with pytest.raises(CorruptChunk):
        await fetched(client)
    assert not list((scene.folder / "client" / "versions").glob("*.bin"))


async def test_a_relay_never_passes_on_a_corrupt_chunk(scene: Scene) -> None:
    """One hostile node high in the tree must not poison everything under it."""
    bad, good = await scene.node(FlipsBits(scene.origin)), await scene.honest()
    url, _ = await scene.relay(bad, good)
    client = scene.client(url)
    assert await fetched(client) == scene.payload
    assert row(client, url)["state"] == "ok"


class Withholds(Node):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        return await super().chunk(request)


PATIENT: dict[str, Any] = {
    "download_limits": DownloadLimits(race_after_s=0.1, chunk_wait_s=60, stall_s=60),
    "transport_limits": TransportLimits(answer_s=60, idle_s=60),
}
"""No deadline ends an attempt here: only a race against another source can."""


async def test_withholding_is_raced_by_another_source(scene: Scene) -> None:
    bad, good = await scene.node(Withholds(scene.origin)), await scene.honest()
    started = time.monotonic()
    assert await fetched(scene.client(bad, good, **PATIENT)) == scene.payload
    assert time.monotonic() - started < 6


async def test_withholding_alone_ends_in_time(scene: Scene) -> None:
    client = scene.client(await scene.node(Withholds(scene.origin)))
    started = time.monotonic()
    with pytest.raises(TooSlow):
        await fetched(client)
    assert time.monotonic() - started < 8


class Dribbles(Node):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(CHUNK)})
        await response.prepare(request)
        for value in self.data(request):
            await response.write(bytes([value]))
            await asyncio.sleep(0.05)
        return response


async def test_a_slow_loris_relay_is_dropped_below_the_minimum_rate(scene: Scene) -> None:
    bad, good = await scene.node(Dribbles(scene.origin)), await scene.honest()
    assert await fetched(scene.client(bad, good)) == scene.payload
    alone = scene.client(bad, name="alone", transport_limits=TransportLimits(rate_grace_s=0.3))
    with pytest.raises(TooSlow, match="bytes/s"):
        await fetched(alone)


class NeverEnds(Node):
    sent = 0
    headers: ClassVar[dict[str, str]] = {}

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=self.headers)
        await response.prepare(request)
        while True:
            await response.write(bytes(65536))
            self.sent += 65536


class AnnouncesTooMuch(NeverEnds):
    headers: ClassVar[dict[str, str]] = {"Content-Length": str(2**40)}


@pytest.mark.parametrize("kind", [NeverEnds, AnnouncesTooMuch])
async def test_an_endless_body_is_cut_at_the_length_of_the_chunk(scene: Scene, kind: type[NeverEnds]) -> None:
    hostile = kind(scene.origin)
    bad, good = await scene.node(hostile), await scene.honest()
    client = scene.client(bad, good)
    assert await fetched(client) == scene.payload
    assert row(client, bad)["code"] == "oversized"
    await asyncio.sleep(0.2)
    stopped_at = hostile.sent
    await asyncio.sleep(0.2)
    assert hostile.sent == stopped_at, "the connection is closed, not drained"


class Truncates(Node):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(CHUNK)})
        await response.prepare(request)
        await response.write(self.data(request)[:1000])
        assert request.transport is not None
        request.transport.abort()
        return response


class SendsLess(Node):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.data(request)[:-1])


class SendsNothing(Node):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=204)


class SaysNo(Node):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=random.choice([403, 404, 429, 500, 503]))


BOMB = zlib.compress(bytes(4_000_000), 9).ljust(CHUNK, b"\0")
assert len(BOMB) == CHUNK


class ZipBomb(Node):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=BOMB, headers={"Content-Encoding": "deflate"})


@pytest.mark.parametrize("kind", [Truncates, SendsLess, SendsNothing, SaysNo, ZipBomb])
async def test_every_other_wrong_answer_is_survived(scene: Scene, kind: type[Node]) -> None:
    bad, good = await scene.node(kind(scene.origin)), await scene.honest()
    client = scene.client(bad, good)
    tracemalloc.start()
    try:
        assert await fetched(client) == scene.payload
        assert tracemalloc.get_traced_memory()[1] < 3_000_000, "nothing was decompressed"
    finally:
        tracemalloc.stop()
    alone = scene.client(bad, name="alone")
    with pytest.raises(ShardcastError):
        await fetched(alone)


class Redirects(Node):
    target = ""

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(self.target + request.path)

    head = manifest = chunk


async def test_a_redirect_into_the_internal_network_is_not_followed(scene: Scene) -> None:
    """A worker must not be made to send requests to addresses a relay chooses."""
    victim = Node(scene.origin)
    hostile = Redirects(scene.origin)
    hostile.target = await scene.node(victim)
    bad = await scene.node(hostile)
    client = scene.client(bad)
    with pytest.raises(ShardcastError):
        await client.wait_head(timeout_s=0.5)
    with pytest.raises(ShardcastError):
        await client.fetch_archived(1, timeout_s=2)
    assert not victim.asked


class NoHttp(Node):
    async def start(self) -> str:
        async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 1_000_000)
            await writer.drain()

        self.server = await asyncio.start_server(garbage, "127.0.0.1", 0)
        self.listener = self.server  # type: ignore[assignment]
        self.server.stop = self.stop  # type: ignore[attr-defined]
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self.server.close()


async def test_endless_response_headers_are_refused(scene: Scene) -> None:
    client = scene.client(await scene.node(NoHttp(scene.origin)))
    with pytest.raises(Malformed):
        await client.wait_head(timeout_s=1)


# -- manifests


class ForgesManifest(Node):
    async def manifest(self, request: web.Request) -> web.StreamResponse:
        latest = self.origin.store.versions()[-1]
        assert latest is not None
        forged = seal_manifest(latest.manifest, Ed25519PrivateKey.generate())
        return web.Response(body=forged.envelope)


class SwapsManifest(Node):
    """Sends another manifest that the publisher did sign."""

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.origin.store.versions()[0].envelope)


class BigManifest(Node):
    async def manifest(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(2**20))


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ForgesManifest, "wrong_signer"), (SwapsManifest, "wrong_manifest"), (BigManifest, "oversized")],
)
async def test_a_lying_manifest_is_refused_and_another_source_asked(scene: Scene, kind: type[Node], code: str) -> None:
    payload = scene.publish(2)
    limits = Limits(max_manifest_bytes=100_000)
    bad = await scene.node(kind(scene.origin))
    alone = scene.client(bad, name="alone", limits=limits)
    with pytest.raises((Malformed, BadSignature)) as caught:
        await fetched(alone)
    assert caught.value.code == code
    assert row(alone, bad)["code"] == code
    both = scene.client(bad, await scene.honest(), limits=limits)
    assert await fetched(both) == payload


async def test_a_manifest_that_promises_more_than_the_limit_takes_no_disk(scene: Scene) -> None:
    """Even the publisher's key must not be able to fill a worker's disk."""
    client = scene.client(await scene.honest(), limits=Limits(max_payload_bytes=CHUNK * CHUNKS - 1))
    with pytest.raises(Malformed) as caught:
        await fetched(client)
    assert caught.value.code == "payload_size"
    assert not list((scene.folder / "client" / "downloads").iterdir())


# -- heads


class ShowsHead(Node):
    shown = b""

    async def head(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.shown)


async def showing(scene: Scene, envelope: bytes) -> str:
    hostile = ShowsHead(scene.origin)
    hostile.shown = envelope
    return await scene.node(hostile)


async def test_rollback_is_refused_even_after_a_restart(scene: Scene) -> None:
    old = head_of(scene.origin)
    scene.publish(2)
    client = scene.client(await scene.honest())
    assert (await client.wait_head(timeout_s=2)) is not None
    await client.close()
    again = scene.client(await showing(scene, old))
    with pytest.raises(Stale) as caught:
        await again.wait_head(timeout_s=0.5)
    assert caught.value.code == "rollback"


async def test_rollback_of_a_relay_is_not_passed_on(scene: Scene) -> None:
    old = head_of(scene.origin)
    scene.publish(2)
    url, relay = await scene.relay(await scene.honest())
    client = scene.client(url)
    assert (await client.wait_head(timeout_s=2)) is not None
    relay.set_upstreams([await showing(scene, old)])
    for _ in range(100):
        if scene.nodes[-1].asked["head"] > 1:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the relay never asked")
    head = await scene.client(url, name="other").wait_head(timeout_s=2)
    assert head is not None
    assert head.version == 2


async def test_freeze_by_an_expired_head_shows(scene: Scene) -> None:
    now = int(time.time())
    client = scene.client(await showing(scene, head_of(scene.origin, issued_at=now - 200, expires_at=now - 100)))
    with pytest.raises(Stale) as caught:
        await client.wait_head(timeout_s=0.5)
    assert caught.value.code == "expired"
    assert client.highest_seen == -1


async def test_freeze_by_one_relay_is_overruled_by_another(scene: Scene) -> None:
    old = head_of(scene.origin)
    scene.publish(2)
    client = scene.client(await showing(scene, old), await scene.honest())
    head = await client.wait_head(after=1, timeout_s=2)
    assert head is not None
    assert head.version == 2


async def test_the_head_of_another_run_is_refused(scene: Scene) -> None:
    client = scene.client(await showing(scene, head_of(scene.origin, run_id="00" * 32)))
    with pytest.raises(Malformed) as caught:
        await client.wait_head(timeout_s=0.5)
    assert caught.value.code == "wrong_run"


async def test_equivocation_stops_the_client_and_leaves_the_proof(scene: Scene) -> None:
    """A publisher that shows two histories is convicted by its own signatures."""
    client = scene.client(await scene.honest())
    assert (await client.wait_head(timeout_s=2)) is not None
    client.set_sources([await showing(scene, head_of(scene.origin, manifest_digest="cd" * 32))])
    with pytest.raises(Equivocation):
        await client.wait_head(timeout_s=1)
    proof_path = scene.folder / "client" / "equivocation-1.json"
    proof = wire.decode(FraudProof, proof_path.read_bytes(), max_bytes=100_000)
    assert check_fraud_proof(proof, run_id=RUN_ID, publisher_key=PUBLIC) == 1


async def test_equivocation_towards_a_relay_is_kept_and_not_passed_on(scene: Scene) -> None:
    url, relay = await scene.relay(await scene.honest())
    client = scene.client(url)
    first = await client.wait_head(timeout_s=2)
    relay.set_upstreams([await showing(scene, head_of(scene.origin, manifest_digest="cd" * 32))])
    for _ in range(40):
        if (scene.folder / "relay" / "equivocation-1.json").exists():
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("no proof was kept")
    second = await scene.client(url, name="other").wait_head(timeout_s=2)
    assert first is not None
    assert second is not None
    assert second.manifest_digest == first.manifest_digest


async def test_garbage_and_oversized_heads_are_refused(scene: Scene) -> None:
    for envelope in (b"", b"VSW1", b"\0" * 300, bytes(10_000_000), head_of(scene.origin)[:-1]):
        client = scene.client(await showing(scene, envelope), name=f"client{len(envelope)}")
        with pytest.raises((Malformed, BadSignature)):
            await client.wait_head(timeout_s=0.4)


class AnswersAtOnce(Node):
    async def head(self, request: web.Request) -> web.StreamResponse:
        if "wait" in request.query:
            return web.Response(status=204)
        shown = self.origin.head()
        assert shown is not None
        return web.Response(body=shown.envelope)


async def test_a_long_poll_that_never_waits_does_not_make_anyone_spin(scene: Scene) -> None:
    """A relay could otherwise burn a core of every worker, or have them flood it for show."""
    hostile = AnswersAtOnce(scene.origin)
    bad = await scene.node(hostile)
    client = scene.client(bad)
    assert await client.wait_head(after=1, timeout_s=1) is None
    assert hostile.asked["head"] < 20
    hostile.asked.clear()
    await scene.relay(bad)
    await asyncio.sleep(1)
    assert hostile.asked["head"] < 40


async def test_one_bad_relay_of_three_hardly_slows_a_fetch(scene: Scene) -> None:
    good = [await scene.honest() for _ in range(2)]
    bad = await scene.node(Withholds(scene.origin))
    client = scene.client(*good, bad, **PATIENT)
    started = time.monotonic()
    assert await fetched(client) == scene.payload
    assert time.monotonic() - started < 5
