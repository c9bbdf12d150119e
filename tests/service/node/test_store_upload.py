"""What a hostile coordinator can make a worker do by naming an object store: one PUT, far away, and nothing else.

What would break for whom: a contributor's machine calls services on itself or on its network that trust whoever reaches
them, or tells a cloud's metadata service to hand out secrets.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from node.client.http import Exchange, ExchangeLimits
from node.client.http import Request as Asked
from node.client.object_store import put_file
from node.client.ssrf import Reach, reach_of
from node.errors import BadReply, StoreUnavailable

BODY = b"a group of completions" * 1000
SECRET = "X-Amz-Signature=0123456789abcdef"
LIMITS = ExchangeLimits(reply_seconds=30.0, least_upload_bytes_per_second=1e9)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    app = web.Application(client_max_size=2**20)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def body(tmp_path: Path) -> Path:
    path = tmp_path / "slot.rollouts"
    path.write_bytes(BODY)
    return path


async def put(url: str, body: Path, *, least: Reach = Reach.THIS_MACHINE, limits: ExchangeLimits = LIMITS) -> None:
    sha256 = hashlib.sha256(BODY).hexdigest()
    await put_file(url, body, body_bytes=len(BODY), sha256=sha256, least=least, limits=limits)


async def test_the_file_arrives_with_what_the_url_was_signed_for(body: Path) -> None:
    seen = []

    async def take(request: web.Request) -> web.Response:
        seen.append((request.method, request.raw_path, dict(request.headers), await request.read()))
        return web.Response()

    async with listening(take) as url:
        await put(f"{url}/bucket/a%2Fb?{SECRET}&X-Amz-SignedHeaders=content-length%3Bhost", body)
    ((method, path, headers, arrived),) = seen
    assert (method, arrived) == ("PUT", BODY)
    assert path == f"/bucket/a%2Fb?{SECRET}&X-Amz-SignedHeaders=content-length%3Bhost", "as it was signed"
    assert headers["x-amz-checksum-sha256"] == base64.b64encode(hashlib.sha256(BODY).digest()).decode()
    assert headers["Content-Length"] == str(len(BODY))
    named = {name.lower() for name in headers}
    assert {name for name in named if name.startswith("x-amz-")} == {
        "x-amz-checksum-sha256",
        "x-amz-sdk-checksum-algorithm",
    }, "S3 refuses what is not signed"
    assert not named & {"authorization", "cookie", "content-type", "transfer-encoding"}


NEAR = {
    "http://127.0.0.1:9/": Reach.THIS_NETWORK,
    "http://[::1]:9/": Reach.THIS_LINK,
    "http://[::ffff:127.0.0.1]:9/": Reach.INTERNET,
    "http://localhost:9/": Reach.THIS_LINK,
    "http://0.0.0.0:9/": Reach.THIS_MACHINE,
    "http://169.254.169.254/latest/api/token": Reach.THIS_NETWORK,
    "http://[fe80::1]:9/": Reach.THIS_NETWORK,
    "http://10.0.0.1:9/": Reach.INTERNET,
    "http://192.168.1.1/": Reach.INTERNET,
    "http://[fd00::1]/": Reach.INTERNET,
    "http://100.64.0.1/": Reach.INTERNET,
}


@pytest.mark.parametrize("url", NEAR)
async def test_attack_a_store_that_is_nearer_than_the_coordinator_is_not_called(url: str, body: Path) -> None:
    with pytest.raises(BadReply) as refused:
        await put(f"{url}?{SECRET}", body, least=NEAR[url])
    assert refused.value.code == "store_too_near"
    assert SECRET not in str(refused.value)


async def test_a_coordinator_on_this_machine_may_have_its_store_here(body: Path) -> None:
    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    async with listening(take) as url:
        await put(url, body, least=Reach.THIS_MACHINE)
        await put(url.replace("127.0.0.1", "localhost"), body, least=Reach.THIS_MACHINE)


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("127.0.0.2", Reach.THIS_MACHINE),
        ("::1", Reach.THIS_MACHINE),
        ("169.254.1.1", Reach.THIS_LINK),
        ("fe80::1%eth0", Reach.THIS_LINK),
        ("172.16.0.1", Reach.THIS_NETWORK),
        ("::ffff:10.0.0.1", Reach.THIS_NETWORK),
        ("224.0.0.1", Reach.NOWHERE),
        ("::", Reach.NOWHERE),
        ("8.8.8.8", Reach.INTERNET),
        ("2606:4700::1", Reach.INTERNET),
        ("store.example", None),
        ("64:ff9b::a9fe:a9fe", Reach.THIS_LINK),
        ("64:ff9b::808:808", Reach.INTERNET),
        ("2002:7f00:1::1", Reach.THIS_MACHINE),
        ("::7f00:1", Reach.THIS_MACHINE),
        ("fec0::1", Reach.THIS_NETWORK),
    ],
)
def test_how_far_an_address_is(address: str, reach: Reach | None) -> None:
    assert reach_of(address) is reach


async def test_how_far_a_coordinator_is_follows_from_what_was_called_and_not_from_a_later_look() -> None:
    """Its owner decides what its name resolves to: it could be far when it is called, and near when it is compared."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response()

    async with listening(answer) as url:
        exchange = Exchange(url.replace("127.0.0.1", "localhost"), limits=LIMITS)
        assert exchange.reach is Reach.INTERNET, "before anything is known, nothing near may be named"
        await exchange.send(Asked(method="GET", path="/", max_reply_bytes=10), body_bytes=0, headers={})
        assert exchange.reach is Reach.THIS_MACHINE
        await exchange.close()


@pytest.mark.parametrize("location", ["http://127.0.0.1:9/", "http://169.254.169.254/", "file:///etc/passwd"])
async def test_attack_a_redirect_is_not_followed(location: str, body: Path) -> None:
    async def redirect(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=307, headers={"Location": location})

    async with listening(redirect) as url:
        with pytest.raises(StoreUnavailable, match="HTTP 307"):
            await put(url, body)


URLS = ["ftp://h/x", "http:///x", "http://user:password@h/x", "http://h/x#fragment", "http://h:0/x", "http://h:99999/"]


@pytest.mark.parametrize(
    "url",
    [*URLS, "http://[::1/x", "http://h/\n", "http://h/é", "javascript:x", ""],
)
async def test_attack_what_is_no_web_address_is_not_called(url: str, body: Path) -> None:
    with pytest.raises(BadReply) as refused:
        await put(url, body)
    assert refused.value.code == "bad_store_url"


async def test_attack_an_endless_answer_is_not_read(body: Path) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        await request.read()
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        while True:
            await response.write(bytes(65536))
            sent += 65536

    async with listening(endless) as url:
        await put(url, body)
    assert sent < 64 * 2**20, "of its answer the status counts"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"\x00\xff\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
async def test_attack_a_store_that_answers_nothing_or_nonsense_is_away(body: Path, said: bytes) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        writer.write(said)
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        started = time.monotonic()
        while not begun.is_set():  # a busy machine may need the half second to get there
            with pytest.raises(StoreUnavailable) as away:
                await put(f"http://127.0.0.1:{port}/x?{SECRET}", body, limits=replace(LIMITS, reply_seconds=0.5))
        await ended.wait()
    assert time.monotonic() - started < 60
    assert SECRET not in str(away.value)


@pytest.mark.parametrize("status", [400, 403, 500, 503])
async def test_a_refusal_is_one_sentence_without_the_url(
    status: int, body: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def refuse(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=status, text="<Error>\x1b[2J</Error>")

    async with listening(refuse) as url:
        with pytest.raises(StoreUnavailable) as away:
            await put(f"{url}/x?{SECRET}", body)
    assert str(away.value) == f"The run's object store does not take the file (HTTP {status})."
    assert SECRET not in "".join(record.getMessage() for record in caplog.records if record.name.startswith("node"))


async def test_a_store_that_nobody_reaches_is_away_and_its_url_is_not_quoted(body: Path) -> None:
    with pytest.raises(StoreUnavailable) as away:
        await put(f"http://127.0.0.1:9/x?{SECRET}", body)
    assert "connection refused" in str(away.value)
    assert SECRET not in str(away.value)
    assert away.value.__cause__ is None
