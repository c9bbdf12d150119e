"""Requests that a proxy in front may read otherwise: refused as a whole, so that none can hide within another."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.server import ServerState

from coordinator.http.connections import server_config
from coordinator.http.request_guard import FREE_FRAMING_BYTES, MAX_AHEAD_BYTES, MAX_FIELDS, MAX_FRAMING_BYTES

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /shown HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = POST + b"Connection: close\r\n"


class Echo:
    """A server that says what it was asked, and keeps that."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.running = self.most_running = self.read = 0
        self.port = 0

    async def __call__(self, request: Request) -> Response:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        body = (await request.body()).decode("latin-1")
        self.read += 1
        await asyncio.sleep(0.01)
        self.running -= 1
        self.asked.append({"method": request.method, "path": request.url.path, "body": body} | dict(request.headers))
        return JSONResponse(self.asked[-1])

    async def answers(self, *pieces: bytes) -> tuple[list[int], bytes]:
        """Statuses of all answers to `pieces`, and everything that came until the server closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        said = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]], said


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo, app = Echo(), FastAPI()
    app.add_route("/{path:path}", echo.__call__, methods=["GET", "POST", "PUT", "BREW"])
    config = server_config(app)
    config.load()
    state = ServerState()

    def accept() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

    async with await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0) as server:
        echo.port = server.sockets[0].getsockname()[1]
        yield echo


def of_fields(*fields: bytes) -> Iterator[bytes]:
    for field in fields:
        yield POST + field + b"\r\n\r\n"


MALFORMED_HEADS = (
    b"POST /shown HTTP/1.1\r\n\r\n",
    b"\r\n" + POST + b"\r\n",
    b"POST /shown HTTP/1.1\nHost: x\n\n",
    b"POST /shown HTTP/1.1\r\n Host: x\r\n\r\n",
    b"POST /shown HTTP/2.0\r\nHost: x\r\n\r\n",
    b"POST /shown HTTP/0.9\r\nHost: x\r\n\r\n",
    b"POST /shown\r\nHost: x\r\n\r\n",
    b"POST  /shown HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /shown\thttp/1.1\r\nHost: x\r\n\r\n",
    b"POST http://x/shown HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /shown#part HTTP/1.1\r\nHost: x\r\n\r\n",
    b"P\xc3\x96ST /shown HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /shown HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    *of_fields(b"Host: y", b"A : b", b": b", b"A", b"A: b\r\n folded", b"A: b ", b"A: b\x00", b"A: b\x7f", b"A: b\rc"),
    *of_fields(b"Content-Length: 3\r\nContent-Length: 3", b"Content-Length: 3, 3", b"Content-Length: +3"),
    *of_fields(
        b"Content-Length:",
        b"Content-Length: 0x3",
        b"Content-Length: -1",
        b"Content-Length: " + b"0" * 5000 + b"3",
        b"Content-Length: " + b"9" * 30,
    ),
    *of_fields(b"Content-Length: 3\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked"),
    *of_fields(b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: identity"),
    *of_fields(b"Transfer-Encoding: \x0bchunked", b"Transfer-Encoding:"),
    *of_fields(b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3"),
    *of_fields(b"\r\n".join([b"A: b"] * MAX_FIELDS)),
)


@pytest.mark.parametrize("head", MALFORMED_HEADS, ids=lambda head: repr(head[:60])[2:-1])
async def test_attack_a_head_that_another_server_may_read_otherwise_hides_no_request(echo: Echo, head: bytes) -> None:
    statuses, said = await echo.answers(head + HIDDEN)
    assert statuses == [400]
    assert json.loads(said.partition(b"\r\n\r\n")[2])["code"] == "bad_request"
    await asyncio.sleep(0.02)
    assert echo.most_running == 0, "what is refused is not begun"


@pytest.mark.parametrize(
    "body",
    [
        *(b"3 \r\nabc\r\n0\r\n\r\n", b"3\nabc\r\n0\r\n\r\n", b"3\r\nabc\n0\r\n\r\n", b"3\r\nabcd\r\n0\r\n\r\n"),
        *(b"0x3\r\nabc\r\n0\r\n\r\n", b"-3\r\nabc\r\n0\r\n\r\n", b"f" * 17 + b"\r\nabc\r\n0\r\n\r\n"),
        *(b"3;a\x01\r\nabc\r\n0\r\n\r\n", b"0\r\nA : b\r\n\r\n", b"0\r\n\rX"),
        b"1\r\na\r\n" * (FREE_FRAMING_BYTES // 5) + b"0\r\n\r\n",
        b"3;" + b"a" * FREE_FRAMING_BYTES + b"\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\n" + b"A: b\r\n" * (FREE_FRAMING_BYTES // 5) + b"\r\n",
    ],
    ids=lambda body: repr(body[:40])[2:-1],
)
async def test_attack_chunks_that_another_server_may_read_otherwise_are_refused(echo: Echo, body: bytes) -> None:
    statuses, _ = await echo.answers(CHUNKED + body)
    assert statuses == [400]
    await asyncio.sleep(0.02)
    assert echo.read == 0, "nobody is given a body that is refused"


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
async def test_requests_of_one_connection_are_answered_one_after_the_other(echo: Echo, piece_bytes: int) -> None:
    requests = (
        POST + b"Content-Length: 3\r\n\r\nabc",
        b"BREW /a%20b?c=d HTTP/1.1\r\nHost: x\r\nEmpty: \r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        LAST + b"Transfer-Encoding: Chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nHost: y\r\n\r\n",
    )
    sent = b"".join(requests)
    statuses, _ = await echo.answers(*(sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)))
    assert statuses == [200, 200, 200]
    assert [(each["method"], each["path"], each["body"]) for each in echo.asked] == [
        *(("POST", "/shown", "abc"), ("BREW", "/a b", ""), ("POST", "/shown", "abcde"))
    ]
    assert [each["host"] for each in echo.asked] == ["x"] * 3, "a trailer is no field"
    assert echo.most_running == 1


async def test_a_connection_is_kept_after_chunks(echo: Echo) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    for _ in range(2):
        writer.write(CHUNKED + b"3\r\nabc\r\n0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" not in head
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
    writer.close()


@pytest.mark.parametrize("behind", [HIDDEN, b"\x00" * 1000])
async def test_what_comes_with_the_end_of_chunks_is_not_read(echo: Echo, behind: bytes) -> None:
    """llhttp does not tell where it begins: whoever sent it is told that the connection ends, and may ask again."""
    statuses, said = await echo.answers(CHUNKED + b"3\r\nabc\r\n0\r\n\r\n" + behind)
    assert statuses == [200]
    assert b"connection: close" in said
    assert [each["path"] for each in echo.asked] == ["/shown"]


async def test_a_request_of_http_1_0_is_answered_without_an_interim_response(echo: Echo) -> None:
    statuses, said = await echo.answers(b"POST /shown HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na")
    assert statuses == [200]
    assert b"connection: close" in said


async def test_attack_what_is_malformed_behind_an_early_answer_gets_none_of_its_own(echo: Echo) -> None:
    """A proxy would take it for the answer to the next request, another client's."""
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    writer.write(b"DELETE" + CHUNKED.removeprefix(b"POST"))  # 405, before the body is read
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 405 ")
    await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
    writer.write(b"3\r\nabcd\r\n")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_attack_a_long_body_buys_no_long_trailer(echo: Echo) -> None:
    """httptools joins what it is fed of one field: 16 MiB of trailer would hold the event loop for 20 s."""
    body = b"%x\r\n" % (8 * 2**20) + bytes(8 * 2**20) + b"\r\n0\r\nA: " + b"a" * 2 * MAX_FRAMING_BYTES
    statuses, _ = await echo.answers(CHUNKED + body)
    assert statuses == [400]


async def test_attack_requests_sent_ahead_fill_no_memory(echo: Echo) -> None:
    """Each request that asks for its body has reading go on; each takes some 100 bytes and lets in 256 KiB."""
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    writer.write((POST + b"Content-Length: 1\r\n\r\na") * (4 * MAX_AHEAD_BYTES // 50))
    said = bytearray()
    with contextlib.suppress(ConnectionResetError):  # it ends with much unread
        while piece := await asyncio.wait_for(reader.read(2**16), 5):
            said += piece
    writer.close()
    assert 0 < said.count(b"HTTP/1.1 200 ") < 20, "the connection ends, and whoever sent them may ask again"


async def test_a_trailer_does_not_end_the_connection_without_a_word(echo: Echo) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    writer.write(CHUNKED + b"3\r\nabc\r\n0\r\nConnection: close\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"connection: close" not in head
    await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
    writer.write(HIDDEN)
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()
