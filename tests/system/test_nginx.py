"""docs/nginx-relay.conf, run by the nginx that is installed: what it caches, what it must not, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from locations import ROOT

from coordinator.lab.processes.layout import free_ports
from shardcast import Client, Origin, OriginServer, Payload, Relay, wire

NGINX = shutil.which("nginx", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin")
CONFIGURATION = ROOT / "docs" / "nginx-relay.conf"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
RUN_ID = wire.digest(PUBLIC)
SIZE = 50 * 4096

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt install nginx-light")


def configured(prefix: Path, port: int, upstream_port: int) -> Path:
    """The documented file with this test's addresses, in a main file that keeps to `prefix`."""
    text = CONFIGURATION.read_text()
    for documented, used in (
        ("0.0.0.0:8080", f"127.0.0.1:{port}"),
        ("127.0.0.1:8720", f"127.0.0.1:{upstream_port}"),
        ("/var/cache/nginx/relay", str(prefix / "cache")),
        ("client_header_timeout 10s", "client_header_timeout 3s"),
    ):
        assert text.count(documented) == 1, documented
        text = text.replace(documented, used)
    (prefix / "relay.conf").write_text(text)
    temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    lines = [
        "daemon off;",
        "worker_processes 1;",
        *(["user root;"] if os.geteuid() == 0 else []),
        f"pid {prefix}/nginx.pid;",
        f"error_log {prefix}/error.log warn;",
        "events { worker_connections 512; }",
        "http {",
        "access_log off;",
        *(f"{name}_temp_path {prefix}/{name};" for name in temporary),
        "include relay.conf;",
        "}",
    ]
    path = prefix / "nginx.conf"
    path.write_text("\n".join(lines))
    return path


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Front:
    """nginx in front of a relay, which follows an origin."""

    folder: Path
    server: OriginServer
    relay: str
    nginx: str
    port: int

    def publish(self, version: int) -> bytes:
        data = random.Random(version).randbytes(SIZE)
        (self.folder / "weights").write_bytes(data)
        self.server.publish(self.folder / "weights", version=version)
        return data


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """(port of nginx, port that it expects the relay at)"""
    assert NGINX is not None
    port, upstream_port = free_ports(2)
    prefix = tmp_path / "nginx"
    prefix.mkdir()
    process = subprocess.Popen([NGINX, "-p", str(prefix), "-c", str(configured(prefix, port, upstream_port))])
    try:
        deadline = time.monotonic() + 60
        while not answers(port):
            assert process.poll() is None, (prefix / "error.log").read_text()
            assert time.monotonic() < deadline, "nginx does not listen"
            time.sleep(0.02)
        yield port, upstream_port
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
async def front(tmp_path: Path, running: tuple[int, int]) -> AsyncIterator[Front]:
    port, upstream_port = running
    origin = Origin(tmp_path / "origin", KEY, RUN_ID, chunk_bytes=4096)
    server = OriginServer(origin)
    relay = Relay(
        [f"http://127.0.0.1:{server.start()}"], store_dir=tmp_path / "relay", run_id=RUN_ID, publisher_key=PUBLIC
    )
    await relay.start(port=upstream_port)
    yield Front(tmp_path, server, f"http://127.0.0.1:{upstream_port}", f"http://127.0.0.1:{port}", port)
    await relay.stop()
    await asyncio.to_thread(server.stop)
    origin.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as session:
        yield session


def name_of(weights: bytes) -> str:
    chunks = (bytes.fromhex(wire.digest(weights[at : at + 4096])) for at in range(0, SIZE, 4096))
    return Payload(chunk_bytes=4096, payload_bytes=SIZE, chunk_digests=b"".join(chunks)).digest


async def fetched(front: Front, name: str, *, after: int = -1) -> bytes:
    async with Client(RUN_ID, PUBLIC, [front.nginx], front.folder / name) as client:
        head = await client.wait_head(after=after, timeout_s=60)
        assert head is not None
        return (await client.fetch(head, timeout_s=60)).read_bytes()


async def sent_by_relay(http: aiohttp.ClientSession, front: Front) -> int:
    async with http.get(front.relay + "/v1/status") as response:
        return int((await response.json())["bytes_out"])


async def status_of(http: aiohttp.ClientSession, url: str, method: str = "GET", **options: Any) -> int:
    async with http.request(method, url, **options) as response:
        await response.read()
        return response.status


async def test_the_second_client_is_served_from_the_cache(front: Front, http: aiohttp.ClientSession) -> None:
    weights = await asyncio.to_thread(front.publish, 1)
    assert await fetched(front, "first") == weights
    before = await sent_by_relay(http, front)
    assert before > SIZE
    assert await fetched(front, "second") == weights
    assert await sent_by_relay(http, front) - before < 4096, "heads and status pages"


async def test_a_head_is_never_stale(front: Front, http: aiohttp.ClientSession) -> None:
    """A cached head would be a frozen relay: workers would work on an old policy, and then stop."""
    for version in (1, 2, 3):
        weights = await asyncio.to_thread(front.publish, version)
        assert await fetched(front, "one", after=version - 1) == weights
    async with http.get(front.relay + "/v1/head") as direct, http.get(front.nginx + "/v1/head") as through:
        assert await direct.read() == await through.read()
        assert through.headers["Cache-Control"] == "no-store"


async def test_a_long_poll_ends_the_moment_a_version_appears(front: Front, http: aiohttp.ClientSession) -> None:
    await asyncio.to_thread(front.publish, 1)
    await fetched(front, "one")
    poll = asyncio.create_task(status_of(http, front.nginx + "/v1/head?after=1&wait=30"))
    await asyncio.sleep(0.5)
    assert not poll.done()
    started = time.monotonic()
    await asyncio.to_thread(front.publish, 2)
    assert await poll == 200
    assert time.monotonic() - started < 20
    assert await status_of(http, front.nginx + "/v1/head?after=2&wait=1") == 204


async def test_a_chunk_that_is_not_here_yet_is_not_remembered_as_missing(
    front: Front, http: aiohttp.ClientSession
) -> None:
    """A refusal from the cache would keep workers waiting for what the relay has had for long."""
    weights = random.Random(1).randbytes(SIZE)
    name = name_of(weights)
    assert await status_of(http, f"{front.nginx}/v1/payloads/{name}/7") == 404
    assert await asyncio.to_thread(front.publish, 1) == weights
    assert await fetched(front, "one") == weights
    async with http.get(f"{front.nginx}/v1/payloads/{name}/7?wait=5") as response:
        assert await response.read() == weights[7 * 4096 : 8 * 4096]
        assert response.headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert response.headers["X-Cache"] == "HIT", "whatever the query says"


@pytest.mark.parametrize("path", ["{0}/0%2f..%2f1", "{0}/0/../1", "{0}/%31", "{0}/1%3fwait=0", "{0}//1", "{0}/1/."])
async def test_an_odd_path_puts_no_chunk_in_anothers_place(front: Front, path: str) -> None:
    """One request of a stranger would have every worker behind this nginx quarantine it."""
    weights = await asyncio.to_thread(front.publish, 1)
    name = name_of(weights)
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(f"GET /v1/payloads/{path.format(name)} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    await asyncio.sleep(0.2)
    writer.close()
    async with Client(RUN_ID, PUBLIC, [front.nginx], front.folder / "one") as client:
        head = await client.wait_head(timeout_s=60)
        assert head is not None
        assert (await client.fetch(head, timeout_s=60)).read_bytes() == weights
        assert client.sources_status()[0]["offences"] == 0


@pytest.mark.parametrize(
    ("asked", "body", "status"),
    [
        ("POST /v1/head", b"", 405),
        ("POST /v1/head", bytes(10_000), 405),
        (f"PUT /v1/payloads/{'0' * 64}/0", bytes(10), 405),
        (f"DELETE /v1/manifests/{'0' * 64}", b"", 405),
        ("GET /v1/head", bytes(1000), 413),
        ("GET /metrics", b"", 404),
        ("GET /v1/payloads/../../etc/passwd", b"", 404),
        (f"GET /{'a' * 5000}", b"", 414),
    ],
)
async def test_what_is_no_read_never_reaches_the_relay(
    front: Front, http: aiohttp.ClientSession, asked: str, body: bytes, status: int
) -> None:
    method, path = asked.split(" ", 1)
    async with http.get(front.relay + "/v1/status") as response:
        before = (await response.json())["requests"]
    assert await status_of(http, front.nginx + path, method, data=body) == status
    async with http.get(front.relay + "/v1/status") as response:
        assert (await response.json())["requests"] - before <= 2, "status, and what the origin's news brought"


async def test_slow_loris_ends_at_nginx(front: Front) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"GET /v1/head HTTP/1.1\r\nHost: a\r\nX-A: ")
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_connections_of_one_address_are_bounded(front: Front, http: aiohttp.ClientSession) -> None:
    await asyncio.to_thread(front.publish, 1)
    await fetched(front, "one")
    polls = []
    for _ in range(64):
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"GET /v1/head?after=1&wait=20 HTTP/1.1\r\nHost: a\r\n\r\n")
        polls.append((reader, writer))
    await asyncio.sleep(0.5)
    assert await status_of(http, front.nginx + "/v1/head") == 429
    for _, writer in polls:
        writer.close()
    await asyncio.sleep(0.5)
    assert await status_of(http, front.nginx + "/v1/head") == 200
