"""Chunks over bare connections: whatever a peer sends, a chunk's buffer holds its chunk, or there is an error."""

from __future__ import annotations

import asyncio
import datetime
import gc
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from waiting import eventually

from shardcast import TransportLimits
from shardcast.errors import Malformed, NetworkFault, NotServed, PeerFault, ShardcastError, TooSlow, Unreachable
from shardcast.fetch import raw_http as links
from shardcast.fetch.raw_http import MAX_FIELDS, RawRequest, ResponseHead, read_head
from shardcast.fetch.transport import Transport

NAME = "ab" * 32
BODY = bytes(range(256)) * 64
OTHER = BODY[::-1]
IMPATIENT = TransportLimits(response_s=1.0, idle_s=0.5, total_s=3.0, rate_grace_s=0.3, min_bytes_per_s=100)

Script = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = BODY, status: str = "200 OK", *fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


class Peer:
    """Answers each request, by its number, with whatever bytes a script writes; `asked` is by connection."""

    url: str

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.gone = asyncio.Event()
        self.script: Script

    def says(self, *answers: bytes) -> None:
        """The n-th answer to the n-th request, the last one to all that follow."""

        async def write(number: int, writer: asyncio.StreamWriter) -> None:
            writer.write(answers[min(number, len(answers) - 1)])
            await writer.drain()

        self.script = write

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests: list[bytes] = []
        self.asked.append(requests)
        try:
            while True:
                requests.append(await reader.readuntil(b"\r\n\r\n"))
                await self.script(sum(map(len, self.asked)) - 1, writer)
        except (OSError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            writer.close()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    made = Transport()
    yield made
    await made.close()


@pytest.fixture
async def hurried() -> AsyncIterator[Transport]:
    """For those that have to see its patience end."""
    made = Transport(patience=IMPATIENT)
    yield made
    await made.close()


async def chunk(transport: Transport, url: str, *, size: int = len(BODY)) -> bytes:
    into = bytearray(size)
    await transport.chunk(url, NAME, 0, into=memoryview(into), wait_s=0.0)
    return bytes(into)


@pytest.mark.system
@pytest.mark.parametrize(
    "patience",
    [
        TransportLimits(idle_s=1.5, min_bytes_per_s=1),
        TransportLimits(rate_grace_s=0.3, min_bytes_per_s=5000),
        TransportLimits(total_s=2.0, min_bytes_per_s=1),
    ],
    ids=["silence", "rate", "time"],
)
async def test_a_relay_is_not_blamed_for_a_pause_of_the_client(peer: Peer, patience: TransportLimits) -> None:
    """A machine that was suspended would find all of its sources too slow as it wakes."""

    async def pause(_number: int, writer: asyncio.StreamWriter) -> None:
        whole = answer()
        writer.write(whole[:4096])
        await asyncio.sleep(0.3)
        time.sleep(3.0)  # noqa: ASYNC251  (the pause)
        await asyncio.sleep(0.1)  # until the client has noticed how late it is
        writer.write(whole[4096:])

    peer.script = pause
    transport = Transport(patience=patience)
    try:
        assert await chunk(transport, peer.url) == BODY
    finally:
        await transport.close()


# -- heads


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 7", ResponseHead(200, 7, True)),
        (b"HTTP/1.1 200\r\ncontent-length:7 \t\r\nServer: \xe9", ResponseHead(200, 7, True)),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: Keep-Alive", ResponseHead(404, 0, True)),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 7", ResponseHead(200, 7, False)),
        (
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 7\r\nConnection: keep-alive",
            ResponseHead(200, 7, False),
        ),
    ],
)
def test_plain_heads_are_read(head: bytes, found: ResponseHead) -> None:
    assert read_head(head) == found


LENGTH = b"Content-Length: 7"
HOSTILE_HEADS = {
    "another version": b"HTTP/1.0 200 OK\r\n" + LENGTH,
    "interim answer": b"HTTP/1.1 100 Continue\r\n" + LENGTH,
    "switched protocol": b"HTTP/1.1 101 Switching Protocols\r\n" + LENGTH,
    "status of four digits": b"HTTP/1.1 2000 OK\r\n" + LENGTH,
    "no status": b"HTTP/1.1\r\n" + LENGTH,
    "line end in the reason": b"HTTP/1.1 200 O\nK\r\n" + LENGTH,
    "no head": b"",
    "no length": b"HTTP/1.1 200 OK\r\nServer: x",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nContent-Length: 8",
    "the same length twice": b"HTTP/1.1 200 OK\r\n" + LENGTH + b"\r\n" + LENGTH,
    "list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 7, 7",
    "signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +7",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -7",
    "hexadecimal length": b"HTTP/1.1 200 OK\r\nContent-Length: 0x7",
    "length in other digits": "HTTP/1.1 200 OK\r\nContent-Length: \u0667".encode(),
    "empty length": b"HTTP/1.1 200 OK\r\nContent-Length:",
    "length of a thousand digits": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"7" * 1000,
    "chunked beside a length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + LENGTH,
    "chunked in hiding": b"HTTP/1.1 200 OK\r\ntransfer-encoding:\tidentity, chunked\r\n" + LENGTH,
    "compressed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n" + LENGTH,
    "upgrade": b"HTTP/1.1 200 OK\r\nUpgrade: h2c\r\n" + LENGTH,
    "folded field": b"HTTP/1.1 200 OK\r\nX: a\r\n Transfer-Encoding: chunked\r\n" + LENGTH,
    "space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 7",
    "field without a name": b"HTTP/1.1 200 OK\r\n: x\r\n" + LENGTH,
    "field without a colon": b"HTTP/1.1 200 OK\r\nX\r\n" + LENGTH,
    "bare line feed": b"HTTP/1.1 200 OK\r\nX: a\nY: b\r\n" + LENGTH,
    "bare carriage return": b"HTTP/1.1 200 OK\r\nX: a\rY: b\r\n" + LENGTH,
    "zero byte": b"HTTP/1.1 200 OK\r\nX: \0\r\n" + LENGTH,
    "too many fields": b"HTTP/1.1 200 OK\r\n" + LENGTH + b"\r\nX: y" * MAX_FIELDS,
}


@pytest.mark.parametrize("head", HOSTILE_HEADS.values(), ids=HOSTILE_HEADS)
def test_heads_that_two_parsers_may_read_differently_are_not_read(head: bytes) -> None:
    assert read_head(head) is None


@pytest.mark.parametrize("url", ["http://h/v1/x?wait=1.000", "http://[::1]:80/x", "http://a-b.example:8080/p/v1/x"])
def test_plain_urls_are_asked(url: str) -> None:
    request = RawRequest.for_url(url)
    assert request is not None
    authority, _, target = url.removeprefix("http://").partition("/")
    assert request.data.startswith(f"GET /{target} HTTP/1.1\r\nHost: {authority}\r\n".encode())
    assert request.data.count(b"\r\n\r\n") == 1
    assert request.data.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "url", ["ftp://h/x", "http://h/x\r\nX: y", "http://h\n/x", "http://h/a b", "http://u@h/x", "http://h/%0d", "/x"]
)
def test_a_url_cannot_smuggle_a_field_into_a_request(url: str) -> None:
    assert RawRequest.for_url(url) is None


# -- answers


async def test_a_head_in_single_bytes_and_one_connection_for_many_chunks(peer: Peer, transport: Transport) -> None:
    async def dribble(number: int, writer: asyncio.StreamWriter) -> None:
        data = answer(OTHER if number else BODY)
        for at in range(60):
            writer.write(data[at : at + 1])
            await asyncio.sleep(0)
        writer.write(data[60:])

    peer.script = dribble
    assert await chunk(transport, peer.url) == BODY
    assert await chunk(transport, peer.url) == OTHER
    assert [len(each) for each in peer.asked] == [2]


HOSTILE_ANSWERS: dict[str, tuple[bytes, type[ShardcastError], str]] = {
    "too long": (answer(BODY + b"x"), Malformed, "oversized"),
    "far too long": (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\n", Malformed, "oversized"),
    "too short": (answer(BODY[:-1]), Malformed, "wrong_length"),
    "nothing": (b"HTTP/1.1 204 No Content\r\n\r\n", Malformed, "wrong_length"),
    "nothing, with a length": (answer(b"", "204 No Content"), Malformed, "wrong_length"),
    "endless head": (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 2**20, Malformed, "malformed"),
    "endless fields": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 2**16, Malformed, "malformed"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", Malformed, "malformed"),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n" + answer()[17:], Malformed, "malformed"),
    "chunked": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4000\r\n" + BODY, Malformed, "malformed"),
    "endless chunk extensions": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1;" + b"x" * 2**16 + b"\r\n",
        Malformed,
        "malformed",
    ),
    "endless interim answers": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 5000, Malformed, "malformed"),
    "too many fields": (answer(BODY, "200 OK", *(f"X-{n}: y" for n in range(MAX_FIELDS))), Malformed, "malformed"),
    "not yet": (answer(b"{}", "503 Service Unavailable"), NotServed, "not_yet"),
    "refused": (answer(b"{}", "404 Not Found"), NotServed, "not_served"),
    "a body for what has none": (answer(BODY, "304 Not Modified"), NotServed, "not_served"),
    "refused in chunks, by a proxy": (
        b"HTTP/1.1 502 Bad Gateway\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        NotServed,
        "not_served",
    ),
    "part": (answer(BODY, "206 Partial Content", "Content-Range: bytes 0-16383/99999"), NotServed, "not_served"),
}


@pytest.mark.parametrize(("reply", "error", "code"), HOSTILE_ANSWERS.values(), ids=HOSTILE_ANSWERS)
async def test_hostile_answers_end_in_an_error_with_a_stable_code(
    peer: Peer, transport: Transport, reply: bytes, error: type[ShardcastError], code: str
) -> None:
    peer.says(reply, reply, answer())
    with pytest.raises(error) as caught:
        await chunk(transport, peer.url)
    assert caught.value.code == code


async def test_what_a_source_lacks_may_be_all_as_it_is_none(peer: Peer, transport: Transport) -> None:
    """Whoever gave --source the coordinator's address read "status 404", as of a policy that is no longer kept."""
    peer.says(answer(b"{}", "404 Not Found"))
    with pytest.raises(NotServed, match="no origin and no relay"):
        await transport.version(peer.url, 3)


async def test_a_redirect_leads_nowhere(peer: Peer, transport: Transport) -> None:
    """Or a relay could have its clients ask hosts inside their network."""
    peer.says(answer(b"", "302 Found", f"Location: {peer.url}/other"), answer())
    with pytest.raises(NotServed):
        await chunk(transport, peer.url)
    assert sum(map(len, peer.asked)) == 1


@pytest.mark.parametrize("size", [len(BODY), 100])
async def test_an_answer_smuggled_behind_another_is_dropped(peer: Peer, transport: Transport, size: int) -> None:
    """What follows a body must not answer the next request, whether it comes with the head or later."""
    peer.says(answer(BODY[:size]) + answer(OTHER[:size]), answer(BODY[:size]))
    assert await chunk(transport, peer.url, size=size) == BODY[:size]
    await asyncio.wait_for(peer.gone.wait(), 60)
    assert await chunk(transport, peer.url, size=size) == BODY[:size]
    assert [len(each) for each in peer.asked] == [1, 1]


async def test_a_refusal_keeps_its_connection(peer: Peer, transport: Transport) -> None:
    """A relay that lags refuses often: each time a new connection would cost two round trips."""
    peer.says(answer(b"{}", "503 Service Unavailable"), answer())
    with pytest.raises(NotServed):
        await chunk(transport, peer.url)
    assert await chunk(transport, peer.url) == BODY
    assert [len(each) for each in peer.asked] == [2]


# -- connections that end


@pytest.mark.parametrize("size", [0, 10, 60, len(BODY)])
async def test_an_answer_that_breaks_off_is_an_unreachable_peer(peer: Peer, transport: Transport, size: int) -> None:
    async def break_off(_: int, writer: asyncio.StreamWriter) -> None:
        writer.write(answer()[:size])
        writer.write_eof()

    peer.script = break_off
    with pytest.raises(Unreachable):
        await chunk(transport, peer.url)


async def test_a_connection_closed_while_idle_costs_no_error(peer: Peer, transport: Transport) -> None:
    """A server may close it just as it is used again, which is no fault of either."""

    async def close_at_the_second(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            raise ConnectionResetError
        writer.write(answer())

    peer.script = close_at_the_second
    assert await chunk(transport, peer.url) == BODY
    assert await chunk(transport, peer.url) == BODY
    assert [len(each) for each in peer.asked] == [2, 1]


async def test_idle_connections_are_given_up(peer: Peer, transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server lends each address only so many."""
    monkeypatch.setattr(links, "IDLE_S", 0.05)
    peer.says(answer())
    await chunk(transport, peer.url)
    await asyncio.wait_for(peer.gone.wait(), 60)


@pytest.mark.parametrize("sent", [0, 1, 60, 5000])
async def test_silence_at_any_point_ends_in_time(peer: Peer, hurried: Transport, sent: int) -> None:
    async def stop(_: int, writer: asyncio.StreamWriter) -> None:
        writer.write(answer()[:sent])
        await asyncio.sleep(3600)

    peer.script = stop
    async with asyncio.timeout(60):
        with pytest.raises(TooSlow):
            await chunk(hurried, peer.url)


async def test_a_head_that_dribbles_ends_in_time(peer: Peer, hurried: Transport) -> None:
    async def dribble(_: int, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 200 OK\r\nX: " if not sent else b"y")
            sent.append(1)
            await asyncio.sleep(0.05)

    sent: list[int] = []
    peer.script = dribble
    async with asyncio.timeout(60):
        with pytest.raises(TooSlow):
            await chunk(hurried, peer.url)


async def test_nothing_is_written_to_a_buffer_that_was_given_up(peer: Peer, transport: Transport) -> None:
    """A chunk that lost its race must not write into the buffer's next one."""
    given_up = asyncio.Event()

    async def halves(_: int, writer: asyncio.StreamWriter) -> None:
        writer.write(answer()[:5000])
        await given_up.wait()
        writer.write(answer()[5000:])
        await writer.drain()

    peer.script = halves
    into = bytearray(len(BODY))
    task = asyncio.create_task(transport.chunk(peer.url, NAME, 0, into=memoryview(into), wait_s=0.0))
    await eventually(lambda: any(into))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    into[:] = bytes(len(BODY))
    given_up.set()
    await asyncio.wait_for(peer.gone.wait(), 60)
    assert not any(into)


async def test_a_request_given_up_while_it_connects_leaves_no_connection(peer: Peer, transport: Transport) -> None:
    """Chunks are asked of several sources at once: a loser's socket must not stay open until garbage is collected."""

    def connections() -> list[object]:
        ours = [one for one in psutil.Process().net_connections("tcp") if one.raddr]
        return [one for one in ours if one.raddr.port == urlsplit(peer.url).port]

    peer.says(b"")
    gc.disable()
    try:
        for iterations in range(12):
            task = asyncio.create_task(chunk(transport, peer.url))
            for _ in range(iterations):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: not connections(), seconds=20)
    finally:
        gc.enable()


@pytest.mark.parametrize("host", ["2130706433", "256.256.256.256", "127.1"])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_name_that_only_one_library_takes_is_its_owners_fault(
    peer: Peer, hurried: Transport, scheme: str, host: str
) -> None:
    """Anybody may announce such a relay: as a fault of this machine it would end the fetch, of every worker."""
    peer.says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    url = f"{scheme}://{host}:{peer.url.rpartition(':')[2]}"
    for ask in (chunk(hurried, url), hurried.manifest(url, NAME), hurried.head(url, after=-1, wait_s=0.0)):
        with pytest.raises((NetworkFault, PeerFault)):
            await ask


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_a_port_that_cannot_be_is_a_source_s_fault(transport: Transport, host: str) -> None:
    with pytest.raises(NetworkFault):
        await chunk(transport, f"http://{host}:65536")


# -- other ways


async def test_a_proxy_of_the_environment_is_not_used(
    peer: Peer, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    peer.says(answer())
    assert await chunk(transport, peer.url) == BODY


@pytest.fixture
def self_signed(tmp_path: Path) -> ssl.SSLContext:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(hours=1))
    pem = (
        builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    (tmp_path / "pem").write_bytes(
        pem
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem")
    return context


async def test_https_is_asked_over_tls_and_a_stranger_s_certificate_refused(
    peer: Peer, transport: Transport, self_signed: ssl.SSLContext
) -> None:
    peer.says(answer())
    server = await asyncio.start_server(peer.serve, "localhost", 0, ssl=self_signed)
    with pytest.raises(Unreachable, match="certificate"):
        await chunk(transport, f"https://localhost:{server.sockets[0].getsockname()[1]}")
    assert not any(peer.asked)
    server.close()
