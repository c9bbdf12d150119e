"""The HTTP face: it must answer everyone in time whatever one of its guests does."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import time
import warnings
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from broadcast_swarm import raw
from waiting import eventually

from shardcast import ServedState, ServerLimits, listen, make_app
from shardcast.errors import LocalFault
from shardcast.manifest import MIB, seal_head, seal_manifest
from shardcast.serve.listener import Listener
from shardcast.serve.state import Announced
from shardcast.store.versions import Store

CHUNK = 4096
IDLE_S = 30.0
PAYLOAD = random.Random(5).randbytes(4 * CHUNK)


@asynccontextmanager
async def serving(
    folder: Path, publisher: Any, *, writes: Iterable[int] = range(3), **limits: Any
) -> AsyncIterator[tuple[Listener, ServedState, list[Announced]]]:
    """A server with version 1, three of its four chunks here, and the list that is its newest head."""
    store = Store(folder, run_id=publisher.run_id)
    signed = seal_manifest(publisher.manifest(PAYLOAD), publisher.key)
    store.add_manifest(signed)
    for index in writes:
        store.result(signed).write(index, PAYLOAD[index * CHUNK : (index + 1) * CHUNK])
    heads = [Announced(1, seal_head(publisher.head(manifest_digest=signed.digest), publisher.key))]
    served = ServedState(store=store, role="relay", run_id=publisher.run_id, head=lambda: heads[-1])
    served.open()
    server_limits = ServerLimits(**limits)
    listener = await listen(make_app(served, server_limits), limits=server_limits)
    try:
        yield listener, served, heads
    finally:
        await listener.stop()
        store.close()


async def test_everything_by_its_digest(tmp_path: Path, publisher: Any, http: aiohttp.ClientSession) -> None:
    async with serving(tmp_path, publisher) as (listener, served, heads):
        url = f"http://127.0.0.1:{listener.port}"
        signed = served.store.versions()[0]
        for path, expected in (
            ("/v1/head", heads[0].envelope),
            ("/v1/head?after=0&wait=5", heads[0].envelope),
            ("/v1/versions/1", signed.envelope),
            (f"/v1/manifests/{signed.digest}", signed.envelope),
            (f"/v1/payloads/{signed.manifest.full.digest}/2", PAYLOAD[2 * CHUNK : 3 * CHUNK]),
        ):
            async with http.get(url + path) as response:
                assert response.status == 200
                assert await response.read() == expected
        async with http.get(url + "/health") as response:
            assert await response.json() == {"status": "ok"}
        async with http.get(url + "/metrics") as response:
            text = await response.text()
        assert "shardcast_version 1.0" in text
        assert "shardcast_missing_chunks 1.0" in text


async def test_status_is_for_people(tmp_path: Path, publisher: Any, http: aiohttp.ClientSession) -> None:
    async with serving(tmp_path, publisher) as (listener, served, _):
        async with http.get(f"http://127.0.0.1:{listener.port}/v1/status") as response:
            status = await response.json()
        assert (status["role"], status["version"], status["run_id"]) == ("relay", 1, publisher.run_id)
        assert status["versions"] == [
            {
                "version": 1,
                "manifest_digest": served.store.versions()[0].digest,
                "result_bytes": len(PAYLOAD),
                "delta_bytes": {},
                "chunks_total": 4,
                "chunks_held": 3,
            }
        ]


REFUSED = {
    "/v1/payloads/" + "0" * 64 + "/0": (404, "unknown_chunk"),
    "/v1/payloads/" + "A" * 64 + "/0": (404, "not_found"),
    "/v1/payloads/" + "0" * 64 + "/-1": (404, "not_found"),
    "/v1/payloads/" + "0" * 64 + "/99999999": (404, "not_found"),
    "/v1/payloads/abc/0": (404, "not_found"),
    "/v1/versions/2": (404, "unknown_version"),
    "/v1/versions/-1": (404, "not_found"),
    "/v1/versions/99999999999999999": (404, "not_found"),
    "/v1/manifests/" + "0" * 64: (404, "unknown_version"),
    "/v1/head?after=x": (400, "bad_query"),
    "/v1/head?after=-1": (400, "bad_query"),
    "/v1/head?after=9007199254740992": (400, "bad_query"),
    "/v1/head?after=%D9%A1": (400, "bad_query"),
    "/v1/head?wait=nan": (400, "bad_query"),
    "/v1/head?wait=1e9": (400, "bad_query"),
    "/v1/head?wait=inf": (400, "bad_query"),
    "/": (404, "not_found"),
}


@pytest.mark.parametrize("path", REFUSED)
async def test_refusals_carry_a_code(tmp_path: Path, publisher: Any, http: aiohttp.ClientSession, path: str) -> None:
    async with (
        serving(tmp_path, publisher) as (listener, _, _),
        http.get(f"http://127.0.0.1:{listener.port}{path}") as response,
    ):
        assert (response.status, (await response.json())["code"]) == REFUSED[path]


async def test_long_poll_answers_the_moment_a_version_appears(
    tmp_path: Path, publisher: Any, http: aiohttp.ClientSession
) -> None:
    """A worker must not train on stale weights for a polling interval."""
    async with serving(tmp_path, publisher) as (listener, served, heads):
        url = f"http://127.0.0.1:{listener.port}/v1/head?after=1&wait=30"
        polls = [asyncio.create_task(http.get(url)) for _ in range(20)]
        await asyncio.sleep(0.2)
        assert not any(poll.done() for poll in polls)
        heads.append(Announced(2, b"head of version 2"))
        started = time.monotonic()
        served.announce()
        bodies = [await (await poll).read() for poll in polls]
        assert time.monotonic() - started < 15
        assert set(bodies) == {b"head of version 2"}


async def test_long_poll_ends_with_204(tmp_path: Path, publisher: Any, http: aiohttp.ClientSession) -> None:
    async with serving(tmp_path, publisher, max_wait_s=0.3) as (listener, _, _):
        started = time.monotonic()
        async with http.get(f"http://127.0.0.1:{listener.port}/v1/head?after=1&wait=900") as response:
            assert response.status == 204
        assert 0.25 < time.monotonic() - started < 60, "the server's cap holds, whatever is asked for"


async def test_a_chunk_on_its_way_is_waited_for(tmp_path: Path, publisher: Any, http: aiohttp.ClientSession) -> None:
    async with serving(tmp_path, publisher) as (listener, served, _):
        signed = served.store.versions()[0]
        url = f"http://127.0.0.1:{listener.port}/v1/payloads/{signed.manifest.full.digest}/3"
        async with http.get(url.removesuffix("3") + "4") as response:
            assert response.status == 404, "there are four"
        async with http.get(url + "?wait=0.1") as response:
            assert response.status == 503
            assert (await response.json())["code"] == "not_yet"
        asked = asyncio.create_task(http.get(url + "?wait=30"))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(served.store.result(signed).write, 3, PAYLOAD[3 * CHUNK :])
        assert await (await asked).read() == PAYLOAD[3 * CHUNK :]


async def test_a_chunk_damaged_on_disk_is_not_served(
    tmp_path: Path, publisher: Any, http: aiohttp.ClientSession
) -> None:
    async with serving(tmp_path, publisher):
        pass
    (part,) = (tmp_path / "downloads").glob("*.part")
    with part.open("r+b") as file:
        file.write(bytes(CHUNK))
    async with serving(tmp_path, publisher, writes=()) as (listener, served, _):
        url = f"http://127.0.0.1:{listener.port}/v1/payloads/{served.store.versions()[0].manifest.full.digest}"
        async with http.get(url + "/0") as response:
            assert response.status == 503
        async with http.get(url + "/1") as response:
            assert await response.read() == PAYLOAD[CHUNK : 2 * CHUNK]


async def test_idle_connections_block_nobody(tmp_path: Path, publisher: Any, http: aiohttp.ClientSession) -> None:
    """One idle connection blocked all of shardcast 0.3.2."""
    async with serving(tmp_path, publisher, idle_timeout_s=2 * IDLE_S) as (listener, _, _):
        idle = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(100)]
        started = time.monotonic()
        async with http.get(f"http://127.0.0.1:{listener.port}/v1/head") as response:
            assert response.status == 200
        assert time.monotonic() - started < IDLE_S
        for _, writer in idle:
            writer.close()


async def test_slow_loris_loses_its_connection(tmp_path: Path, publisher: Any) -> None:
    """A header that never ends must not hold a connection for ever, dribbled or not."""
    async with serving(tmp_path, publisher, idle_timeout_s=0.5) as (listener, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET /v1/head HTTP/1.1\r\nX-A: ")
        started = time.monotonic()
        while not reader.at_eof() and time.monotonic() - started < 60:
            writer.write(b"a")
            try:
                await asyncio.wait_for(reader.read(1), 0.1)
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
        assert time.monotonic() - started < 60
        writer.close()


async def test_a_reader_that_stops_reading_loses_its_connection(tmp_path: Path, publisher: Any) -> None:
    """Otherwise a few stalled readers hold files and connections for ever."""
    async with serving(tmp_path, publisher, transfer_timeout_s=2.0) as (listener, served, _):
        payload = bytes(16 * MIB)
        signed = seal_manifest(publisher.manifest(payload, version=2, chunk_bytes=16 * MIB), publisher.key)
        served.store.add_manifest(signed)
        served.store.result(signed).write(0, payload)
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port, limit=1024)
        writer.write(f"GET /v1/payloads/{signed.manifest.full.digest}/0 HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        await eventually(lambda: listener.connections == 1)
        await eventually(lambda: listener.connections == 0)
        writer.close()


async def test_connections_per_address_are_bounded(tmp_path: Path, publisher: Any) -> None:
    async with serving(tmp_path, publisher, max_connections_per_address=3) as (listener, _, _):
        kept = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(3)]
        await eventually(lambda: listener.connections == 3)
        assert await raw(listener.port, b"") == b""
        assert listener.refused == 1
        reader, writer = kept[0]
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, writer in kept:
            writer.close()
        await eventually(lambda: listener.connections == 0)
        assert b"200 OK" in await raw(listener.port, b"GET /health HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v1/head HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
        b"POST /v1/head HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000000\r\n\r\n",
        b"PUT /v1/chunks/"
        + b"0" * 64
        + b" HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
)
async def test_bodies_are_refused_unread(tmp_path: Path, publisher: Any, request_bytes: bytes) -> None:
    """Nothing is ever uploaded here: a body is a way to make the server work."""
    async with serving(tmp_path, publisher) as (listener, _, _):
        answer = await raw(listener.port, request_bytes, wait_s=60)
        assert answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 405"))


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v1/head HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /v1/head HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 100 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
async def test_oversized_and_garbled_requests_are_refused(
    tmp_path: Path, publisher: Any, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    async with serving(tmp_path, publisher) as (listener, _, _):
        assert (await raw(listener.port, request_bytes)).startswith(b"HTTP/1.0 400")
        assert caplog.records == [], "strangers must not be able to fill the log"
        assert b"200 OK" in await raw(listener.port, b"GET /health HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chunks/../../manifests/0000000000000001",
        "/v1/chunks/..%2f..%2flock",
        "/v1/chunks/%2e%2e/%2e%2e/lock",
        "/v1/chunks/" + "../" * 20 + "etc/passwd",
        "/v1/manifests/..%5c..%5clock",
        "/v1/versions/1%00",
        "/v1/versions/../../lock",
        "//etc/passwd",
        "/v1/chunks/" + "0" * 62 + "/.",
    ],
)
async def test_path_traversal_finds_nothing(tmp_path: Path, publisher: Any, path: str) -> None:
    async with serving(tmp_path, publisher) as (listener, _, _):
        answer = await raw(listener.port, f"GET {path} HTTP/1.0\r\n\r\n".encode())
        assert answer.startswith((b"HTTP/1.0 404", b"HTTP/1.1 404", b"HTTP/1.0 400", b"HTTP/1.1 400"))


async def test_relays_take_get_alone_and_say_so(tmp_path: Path, publisher: Any) -> None:
    async with serving(tmp_path, publisher) as (listener, served, _):
        payload = served.store.versions()[0].manifest.full.digest
        for path in ("/v1/head", "/v1/versions/1", f"/v1/payloads/{payload}/0", "/v1/status", "/health"):
            for method in ("HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "PATCH"):
                answer = await raw(listener.port, f"{method} {path} HTTP/1.0\r\n\r\n".encode())
                assert b" 405 " in answer.partition(b"\r\n")[0], (method, path)
                assert b"\r\nAllow: GET\r\n" in answer
                assert b"\r\nX-Content-Type-Options: nosniff\r\n" in answer
            slash = await raw(listener.port, f"GET {path}/ HTTP/1.0\r\nHost: evil.example\r\n\r\n".encode())
            assert b" 404 " in slash.partition(b"\r\n")[0]
        chunk = await raw(listener.port, f"GET /v1/payloads/{payload}/0 HTTP/1.0\r\n\r\n".encode())
        assert b"\r\nX-Content-Type-Options: nosniff\r\n" in chunk


async def test_an_occupied_port_says_so(tmp_path: Path, publisher: Any) -> None:
    async with serving(tmp_path, publisher) as (listener, served, _):
        with pytest.raises(LocalFault) as caught:
            await listen(make_app(served), port=listener.port)
        assert caught.value.code == "cannot_bind"


async def test_a_peer_that_connects_while_the_server_stops_leaves_no_open_socket(
    tmp_path: Path, publisher: Any
) -> None:
    """Each leaked descriptor of a relay that is restarted often is one fewer for its guests."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turns in range(6):
            async with serving(tmp_path, publisher) as (listener, _, _):
                await asyncio.sleep(0.02)  # until it waits for a connection
                peer = socket.create_connection(("127.0.0.1", listener.port))
                for _ in range(turns):
                    await asyncio.sleep(0)
            peer.close()
        gc.collect()  # once for all: half a second, with a whole session's objects
    assert [str(warning.message) for warning in caught] == []


async def test_a_burst_of_connections_is_counted_once_each(tmp_path: Path, publisher: Any) -> None:
    """Counting one that is just being opened twice would turn honest workers away."""
    async with serving(tmp_path, publisher, max_connections_per_address=20) as (listener, _, _):
        peers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(20)]
        await eventually(lambda: listener.connections + listener.refused == 20)
        assert (listener.connections, listener.refused) == (20, 0)
        for peer in peers:
            peer.close()
