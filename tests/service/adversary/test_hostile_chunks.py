"""Hostile answers where a chunk is asked for: none of them gets a wrong byte past a client or another relay.

With one honest source beside the liar, the version arrives all the same.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tracemalloc
import zlib
from typing import ClassVar

import aiohttp
import pytest
from aiohttp import web
from broadcast_scene import CHUNK, IMPATIENT, Between, Scene, fetched, row
from waiting import eventually

from shardcast import SourceLimits, wire
from shardcast.errors import CorruptChunk, Malformed, ShardcastError


class FlipsBits(Between):
    """In all chunks, or in those of the payloads it is told."""

    spoiled: frozenset[str] | None = None

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        answer = await self.honest(request.path_qs)
        if self.spoiled is None or request.path.split("/")[-2] in self.spoiled:
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
    head = await client.wait_head(after=1, timeout_s=60)
    assert head is not None
    fetching_it = asyncio.create_task(client.fetch(head, timeout_s=60))
    await eventually(lambda: row(client.sources_status(), url)["state"] == "quarantined")
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
    await eventually(lambda: row(relay.upstreams(), bad)["code"] == "corrupt_chunk")
    async with http.get(f"{url}/v1/payloads/{name}/0") as response:
        assert response.status == 503
    relay.set_upstreams([scene.url])
    async with http.get(f"{url}/v1/payloads/{name}/0?wait=8") as response:
        assert wire.digest(await response.read()) == scene.signed(2).manifest.deltas[0].payload.chunk_digest(0)
    assert await fetched(scene.client(url)) == weights


async def test_corrupt_chunks_cost_a_refetch_and_the_relay_its_standing(scene: Scene) -> None:
    (bad, hostile), good = await scene.hostile(FlipsBits), await scene.honest()
    client = scene.client(bad, good)
    assert await fetched(client) == scene.weights
    described = row(client.sources_status(), bad)
    assert (described["state"], described["code"]) == ("quarantined", "corrupt_chunk")
    assert "digest mismatch" in described["reason"]
    assert hostile.asked["payloads"] <= SourceLimits().per_source, "quarantine takes effect at once"


async def test_a_relay_never_passes_on_a_corrupt_chunk(scene: Scene) -> None:
    """One hostile node high in the tree must not poison everything under it."""
    (bad, _), good = await scene.hostile(FlipsBits), await scene.honest()
    url, _ = await scene.relay(bad, good)
    client = scene.client(url)
    assert await fetched(client) == scene.weights
    assert row(client.sources_status(), url)["state"] == "ok"


class SwapsPayloads(Between):
    """Sends a delta's chunk where one of the result is asked for, and the other way round."""

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
    bad, _ = await scene.hostile(kind)
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
        await eventually(lambda: row(relay.upstreams(), bad)["state"] == "quarantined")
    async with http.get(url + "/metrics") as response:
        figures = (await response.text()).splitlines()
    assert f'shardcast_source_quarantined{{reason="corrupt_chunk",source="{bad}"}} 1.0' in figures
    async with http.get(url + "/v1/status") as response:
        described = row((await response.json())["upstreams"], bad)
    assert (described["state"], described["code"]) == ("quarantined", "corrupt_chunk")
    assert "digest mismatch" in described["reason"]
    assert any(bad in line and "corrupt_chunk" in line for line in caplog.messages)


class NeverEnds(Between):
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
    (bad, hostile), good = await scene.hostile(kind), await scene.honest()
    client = scene.client(bad, good)
    assert await fetched(client) == scene.weights
    assert row(client.sources_status(), bad)["code"] == ("malformed" if kind is NeverEnds else "oversized")
    for _ in range(50):
        before = hostile.sent
        await asyncio.sleep(0.2)
        if hostile.sent == before:
            break
    else:
        pytest.fail("the connection is drained, not closed")


class Truncates(Between):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(CHUNK)})
        await response.prepare(request)
        await response.write((await self.data(request))[:1000])
        assert request.transport is not None
        request.transport.abort()
        return response


class SendsLess(Between):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=(await self.data(request))[:-1])


class SendsNothing(Between):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=204)


class SaysNo(Between):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=random.choice([403, 404, 429, 500, 503]))


BOMB = zlib.compress(bytes(4_000_000), 9).ljust(CHUNK, b"\0")
assert len(BOMB) == CHUNK


class ZipBomb(Between):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=BOMB, headers={"Content-Encoding": "deflate"})


WRONG = [Truncates, SendsLess, SendsNothing, SaysNo, ZipBomb]


@pytest.mark.parametrize("kind", WRONG)
async def test_every_other_wrong_answer_is_survived(scene: Scene, kind: type[Between]) -> None:
    (bad, _), good = await scene.hostile(kind), await scene.honest()
    client = scene.client(bad, good)
    tracemalloc.start()
    try:
        assert await fetched(client) == scene.weights
        assert tracemalloc.get_traced_memory()[1] < 3_000_000, "nothing was decompressed"
    finally:
        tracemalloc.stop()


async def test_wrong_answers_alone_yield_an_error_and_no_file(scene: Scene) -> None:
    async def assert_fails(kind: type[Between]) -> None:
        bad, _ = await scene.hostile(kind)
        with pytest.raises(CorruptChunk if kind is FlipsBits else ShardcastError):
            await fetched(scene.client(bad, name=kind.__name__, **IMPATIENT))
        assert not list((scene.folder / kind.__name__ / "versions").glob("*.bin")), kind

    await asyncio.gather(*map(assert_fails, [FlipsBits, *WRONG]))


class Redirects(Between):
    target = ""

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(self.target + request.path)

    head = manifest = chunk


async def test_a_redirect_into_the_internal_network_is_not_followed(scene: Scene) -> None:
    """A worker must not be made to send requests to addresses a relay chooses."""
    bad, hostile = await scene.hostile(Redirects)
    hostile.target, victim = await scene.hostile(Between)
    client = scene.client(bad)
    with pytest.raises(ShardcastError):
        await client.wait_head(timeout_s=0.5)
    with pytest.raises(ShardcastError):
        await client.fetch_archived(1, timeout_s=2)
    assert not victim.asked


class NoHttp(Between):
    async def start(self) -> str:
        async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 1_000_000)
            await writer.drain()

        self.server = await asyncio.start_server(garbage, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self.server.close()


async def test_endless_response_headers_are_refused(scene: Scene) -> None:
    client = scene.client((await scene.hostile(NoHttp))[0])
    with pytest.raises(Malformed):
        await client.wait_head(timeout_s=1)
