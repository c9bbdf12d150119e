"""Attacks on the coordinator that need no key: held connections, heads without an end, answers that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarm import serve, small_spec
from uvicorn.server import ServerState
from waiting import eventually, until

from coordinator.app import create_app
from coordinator.http.connections import ConnectionLimits, listening_socket, server_config
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from node.protocol.endpoints import ENDPOINTS

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BLOB_BYTES = 8 * 1024 * 1024
QUICK = ConnectionLimits(
    connections=12, connections_per_address=4, head_seconds=1.0, idle_seconds=1.0, unread_seconds=1.0
)
"""The operator's limits, with less of everything."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, Coordinator]]:
    key = Ed25519PrivateKey.generate()
    folder = tmp_path_factory.mktemp("run")
    home = create_home(folder, public_key=key.public_key().public_bytes_raw(), spec=small_spec())
    yield home, Coordinator(home, key=key)
    home.database.close()


@pytest.fixture
def url(home: tuple[Home, Coordinator]) -> Iterator[str]:
    with serve(home[1], connections=QUICK) as url:
        yield url


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def server_log() -> Iterator[list[logging.LogRecord]]:
    """What the operator reads of the running server, which keeps it from pytest's own handler."""
    kept, logger = _Kept(), logging.getLogger("uvicorn.error")
    logger.addHandler(kept)
    yield kept.records
    logger.removeHandler(kept)


def connect(url: str, source: str = "127.0.0.1", *, receive_bytes: int = 0) -> socket.socket:
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.bind((source, 0))
    connection.settimeout(60)
    connection.connect(("127.0.0.1", urlsplit(url).port))
    return connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the other side ends it."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            answer += piece
    return answer


def is_served(url: str, source: str = "127.0.0.1") -> bool:
    with connect(url, source) as connection, contextlib.suppress(OSError):
        connection.sendall(HEALTH)
        return connection.recv(1024).startswith(b"HTTP/1.1 200 ")
    return False


def drip(connection: socket.socket, start: bytes, piece: bytes, *, every: float) -> float:
    """Send `start`, then `piece` again and again; how many seconds the other side bears it (at most 60)."""
    began = time.monotonic()
    connection.settimeout(every)
    with contextlib.suppress(OSError):
        connection.sendall(start)
        while time.monotonic() - began < 60:
            with contextlib.suppress(TimeoutError):
                if not connection.recv(65536):
                    break
            connection.sendall(piece)
    return time.monotonic() - began


LORIS = {
    "silence": (b"", b""),
    "a head": (b"GET /health HTTP/1.1\r\nX-Slow: ", b"a"),
    "empty lines": (b"", b"\r\n"),
    "a second head": (HEALTH + b"GET /health HTTP/1.1\r\nX-Slow: ", b"a"),
    "a body that nobody asked for": (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", b"a"),
    "trailers": (b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
}


def test_slow_loris_loses_its_connection(url: str) -> None:
    """A byte now and then must not hold a connection: whoever has enough of them is then the only one connected."""

    def held_seconds(number: int, start: bytes, piece: bytes) -> float:
        with connect(url, f"127.0.0.{10 + number}") as connection:
            return drip(connection, start, piece, every=0.2)

    with ThreadPoolExecutor(len(LORIS)) as all_at_once:
        held = {name: all_at_once.submit(held_seconds, at, *pieces) for at, (name, pieces) in enumerate(LORIS.items())}
    assert {name: each.result() for name, each in held.items() if each.result() >= 40} == {}


@pytest.mark.system
def test_a_crowd_of_slow_loris_keeps_nobody_else_out_for_long(url: str) -> None:
    sources = [f"127.0.0.{last}" for last in range(2, 5)]
    with contextlib.ExitStack() as stack:
        for source in sources * QUICK.connections_per_address:
            stack.enter_context(connect(url, source)).sendall(b"GET / HTTP/1.1\r\n")
        assert until(lambda: is_served(url), seconds=40)


@pytest.fixture
def patient(home: tuple[Home, Coordinator]) -> Iterator[str]:
    """As many connections as with `url`, and time to count them."""
    with serve(home[1], connections=replace(QUICK, head_seconds=60.0, idle_seconds=60.0)) as url:
        yield url


def test_one_address_does_not_get_all_connections(patient: str) -> None:
    url = patient
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(url, "127.0.0.2")) for _ in range(QUICK.connections_per_address)]
        for connection in held:
            connection.sendall(b"GET / HTTP/1.1\r\n")
        assert not is_served(url, "127.0.0.2")
        assert is_served(url, "127.0.0.3")


@pytest.mark.system
def test_half_open_connections_of_all_addresses_keep_no_newcomer_out(patient: str) -> None:
    """Each takes a minute to time out here, and costs its sender nothing: the longest waiting makes room."""
    url = patient
    with contextlib.ExitStack() as stack:
        held = []
        for number in range(QUICK.connections):
            held.append(stack.enter_context(connect(url, f"127.0.1.{number + 1}")))
            held[-1].sendall(b"GET / HTTP/1.1\r\n" if number % 2 else b"")
        assert is_served(url, "127.0.2.1")
        assert everything(held[0]) == b""
        held[1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            held[1].recv(1)


@pytest.mark.parametrize("head", [b"POST /v1/nodes HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", HEALTH])
def test_attack_requests_without_their_end_or_with_none_after_them_keep_no_newcomer_out(
    patient: str, head: bytes
) -> None:
    """A body of which nothing more comes needs neither a key nor a signature, and would hold a place for 30 s."""
    url = patient
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(url, f"127.0.1.{number + 1}")) for number in range(QUICK.connections)]
        for connection in held:
            connection.sendall(head)
            if head is HEALTH:
                assert connection.recv(1024).startswith(b"HTTP/1.1 200 ")
        assert until(lambda: is_served(url, "127.0.2.1"), seconds=20)


@pytest.mark.system
def test_whoever_holds_most_half_open_connections_makes_room(patient: str) -> None:
    """An idle worker's connection, though it has waited longest, is not what a flood pushes out."""
    url, flood = patient, [f"127.0.0.{number}" for number in (2, 3, 4)]
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(connect(url, "127.0.1.1"))
        for number in range(60):
            stack.enter_context(connect(url, flood[number % 3])).sendall(b"GET /")
        assert is_served(url, "127.0.2.1")
        idle.sendall(HEALTH)
        assert idle.recv(1024).startswith(b"HTTP/1.1 200 ")


def test_all_addresses_together_do_not_get_more_connections_than_there_are(home: tuple[Home, Coordinator]) -> None:
    """Those with a request under way are not ended for a newcomer."""
    name = home[0].blobs.put(random.Random(1).randbytes(BLOB_BYTES))
    asks = f"GET /v1/blobs/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with serve(home[1], connections=replace(QUICK, unread_seconds=60.0)) as url, contextlib.ExitStack() as stack:
        for number in range(QUICK.connections):
            reader = stack.enter_context(connect(url, f"127.0.1.{number + 1}", receive_bytes=4096))
            reader.sendall(asks)
            assert reader.recv(1)
        assert not is_served(url, "127.0.2.1")


@contextlib.asynccontextmanager
async def serving_here(coordinator: Coordinator, limits: ConnectionLimits) -> AsyncIterator[tuple[str, ServerState]]:
    """Serve in the test's own event loop, which it can hold up."""
    config = server_config(create_app(coordinator), limits)
    config.load()
    loop, state = asyncio.get_running_loop(), ServerState()
    listening = listening_socket("127.0.0.1", 0)

    def accept() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

    async with await loop.create_server(accept, sock=listening):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", state


async def test_a_request_that_came_while_the_server_was_busy_is_answered_on_an_idle_connection(
    home: tuple[Home, Coordinator],
) -> None:
    async with serving_here(home[1], QUICK) as (url, state):
        with connect(url) as worker:
            worker.sendall(HEALTH)
            await eventually(lambda: any(one.timeout_keep_alive_task for one in state.connections))
            (held,) = state.connections
            worker.sendall(HEALTH)
            held.timeout_keep_alive_handler()  # due, and called before the request is read
            answers = await asyncio.to_thread(everything, worker)  # until the connection is closed as idle
    assert answers.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.system
async def test_a_reader_is_not_blamed_for_a_pause_of_the_server(home: tuple[Home, Coordinator]) -> None:
    """A machine that was suspended would otherwise end every answer under way as it wakes."""
    body = random.Random(3).randbytes(BLOB_BYTES)
    name = home[0].blobs.put(body)
    async with serving_here(home[1], replace(QUICK, unread_seconds=1.5)) as (url, state):
        with connect(url, receive_bytes=4096) as reader:
            reader.sendall(f"GET /v1/blobs/{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            await eventually(lambda: any(one.flow.write_paused for one in state.connections))
            time.sleep(3.0)  # noqa: ASYNC251  (the pause)
            await asyncio.sleep(0.2)  # until the server has noticed how late it is
            answer = await asyncio.to_thread(everything, reader)
    assert answer.endswith(body)


def test_who_asks_and_never_reads_holds_nothing_for_ever(home: tuple[Home, Coordinator], url: str) -> None:
    """uvicorn waits for ever for such a reader, with a file open, and its own closing waits for it, too."""
    name = home[0].blobs.put(random.Random(1).randbytes(BLOB_BYTES))
    asks = f"GET /v1/blobs/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(QUICK.connections_per_address):
            stack.enter_context(connect(url, "127.0.0.2", receive_bytes=4096)).sendall(asks)
        assert not is_served(url, "127.0.0.2")
        assert until(lambda: is_served(url, "127.0.0.2"), seconds=60)


def test_who_never_reads_many_short_answers_holds_nothing_for_ever(home: tuple[Home, Coordinator]) -> None:
    """Requests one after the other on one connection, each with a short answer, until the answers fill all buffers."""
    asks = b"GET /v1/run HTTP/1.1\r\nHost: x\r\n\r\n" * 500
    limits = replace(QUICK, connections_per_address=1)
    with serve(home[1], connections=limits) as url, connect(url, receive_bytes=4096) as connection:
        connection.sendall(asks)
        assert not is_served(url)
        assert until(lambda: is_served(url), seconds=60)


@pytest.mark.system
def test_a_slow_reader_who_goes_on_reading_gets_all(home: tuple[Home, Coordinator]) -> None:
    limits = replace(QUICK, unread_seconds=4.0)
    body = random.Random(2).randbytes(BLOB_BYTES // 4)
    name = home[0].blobs.put(body)
    with serve(home[1], connections=limits) as url, connect(url, receive_bytes=65536) as connection:
        connection.sendall(f"GET /v1/blobs/{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer, began = b"", time.monotonic()
        while piece := connection.recv(65536):
            answer += piece
            time.sleep(max(0.0, began + len(answer) / 225_000 - time.monotonic()))
    assert answer.endswith(body)
    assert time.monotonic() - began > 2 * limits.unread_seconds


@pytest.mark.parametrize(
    "attack",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(4000)),
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 40_000,
        b"GET /" + b"a" * 40_000,
        b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: a\r\n" * 8000,
        b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 40_000,
    ],
    ids=["fields", "a field", "a target", "trailers", "a chunk's extension"],
)
def test_a_head_without_end_is_cut_off(url: str, attack: bytes) -> None:
    """What is kept of a head is the coordinator's memory, times all connections."""
    with connect(url) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(attack)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") or not answer


@pytest.mark.parametrize("before", [b"", HEALTH, HEALTH + HEALTH], ids=["first", "second", "third"])
@pytest.mark.parametrize(
    "fields", [b"a:\r\n" * 4000, b"a:\n" * 4000, b"X: " + b"a" * 40_000 + b"\r\n"], ids=["fields", "bare", "a field"]
)
def test_a_whole_head_that_is_too_long_is_not_read(url: str, before: bytes, fields: bytes) -> None:
    """It arrives at once, so that nothing of it is ever incomplete; and 256 KB of fields take 0.3 s, of everybody's."""
    with connect(url) as connection:
        connection.sendall(before + b"GET /health HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n")
        answers = everything(connection)
    assert answers.count(b"HTTP/1.1 200 ") == before.count(b"GET")
    assert b"HTTP/1.1 400 " in answers


@pytest.mark.parametrize("method", [b"POST /v1/leases", b"GET /health"])
def test_a_body_in_tiny_chunks_is_cut_off(url: str, method: bytes) -> None:
    """Each costs as much as a whole one: 0.3 MB of them keep the one thread that serves everybody busy for a second."""
    with connect(url) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(
                method + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 5000
            )
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") or not answer


def test_a_body_in_chunks_is_taken(url: str) -> None:
    with connect(url) as connection:
        pieces = b"".join(b"400\r\n" + b" " * 1024 + b"\r\n" for _ in range(60)) + b"1\r\n \r\n" * 40 + b"0\r\n\r\n"
        connection.sendall(b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 401 "), "it was read to its end, and nobody had signed it"


@pytest.mark.parametrize(
    "attack",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\n Host: x\r\n\r\n",
    ],
    ids=["TLS", "HTTP/0.9", "two lengths", "length and chunks", "two hosts", "a folded field"],
)
def test_what_is_not_http_gets_an_error_reply(url: str, attack: bytes) -> None:
    """A proxy in front reads such requests otherwise (request smuggling); and it must not fill the operator's log."""
    with server_log() as told, connect(url) as connection:
        connection.sendall(attack)
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["code"] == "bad_request"
    assert b"connection: close" in head.lower()
    assert not told


PAGES = (
    *("/", "/audit", "/find", "/nodes/{node}", "/submissions/{submission}"),
    *("/health-line", "/v1/events", "/v1/events/now", "/openapi.json"),
)
METHODS_BY_PATH = {
    **{path: {"GET"} for path in PAGES},
    **{path: {one.method for one in ENDPOINTS if one.path == path} for path in (each.path for each in ENDPOINTS)},
}
METHODS = ("GET", "PUT", "POST", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PATCH", "DELETE", "QUERY", "BREW", "get")


def ask(url: str, method: str, path: str, *fields: str) -> tuple[int, dict[str, str], bytes]:
    """Status, header fields and body of the answer to one request."""
    head = "\r\n".join((f"{method} {path} HTTP/1.1", "Connection: close", *(fields or ("Host: x",)), "\r\n"))
    with connect(url) as connection:
        connection.sendall(head.encode())
        answer, _, body = everything(connection).partition(b"\r\n\r\n")
    status, *lines = answer.decode().split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}, body


def test_what_is_done_at_a_path_cannot_be_done_by_another_method(url: str) -> None:
    """A cache or a firewall in front treats methods differently; what slips through must not be answered at all."""
    for template, taken in METHODS_BY_PATH.items():
        path = re.sub("{[a-z0-9_]+}", "ab" * 32, template)
        for method in METHODS:
            if method in taken:
                continue
            status, fields, body = ask(url, method, path)
            assert (status, fields["allow"]) == (405, ", ".join(sorted(taken))), (method, path)
            if method == "HEAD":
                assert not body
            else:
                assert json.loads(body)["code"] == "method_not_allowed"


def test_a_slash_at_the_end_leads_nobody_to_a_host_that_the_client_named(url: str) -> None:
    """The redirect's Location would be made of the Host header, which a cache in front may serve to others."""
    for template, taken in METHODS_BY_PATH.items():
        if template == "/":
            continue
        path = re.sub("{[a-z0-9_]+}", "ab" * 32, template)
        status, fields, body = ask(url, min(taken), path + "/", "Host: evil.example")
        assert (status, fields.get("location")) == (404, None), path
        assert json.loads(body)["code"] == "not_found"


def test_no_answer_is_taken_for_another_type_than_it_says(home: tuple[Home, Coordinator], url: str) -> None:
    """What a stranger uploaded is served from the page's own origin: a browser must not sniff a script in it."""
    script = home[0].blobs.put(b"<script src='/v1/blobs/'></script>")
    style = re.search(rb'href="(/assets/[^"]+)"', ask(url, "GET", "/")[2])
    assert style is not None
    for method, path, expected in (
        ("GET", "/", 200),
        ("GET", style[1].decode(), 200),
        ("GET", f"/v1/blobs/{script}", 200),
        ("GET", "/v1/status", 200),
        ("GET", "/v1/log/checkpoint", 200),
        ("GET", "/metrics", 200),
        ("GET", "/nothing", 404),
        ("POST", "/", 405),
        ("POST", "/v1/leases", 401),
        ("GET", "/v1/run?after=x", 400),
        ("GET", "/find?q=" + "ab" * 32, 200),
        ("not\x00HTTP", "/", 400),
    ):
        status, fields, _ = ask(url, method, path)
        assert (status, fields.get("x-content-type-options")) == (expected, "nosniff"), path


def test_a_websocket_is_not_offered(url: str) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    with connect(url) as connection:
        connection.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 404 ")


def test_nobody_waits_for_a_client_that_has_gone(home: tuple[Home, Coordinator], url: str) -> None:
    """A wait of 30 seconds costs its sender a packet; left behind by the thousand, they would be everybody's wait."""
    submission = "ab" * 32
    with home[0].database.write() as connection:
        insert_waiting(connection, submission)
    asks = f"GET /v1/receipts/{submission}?wait=30 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    for _ in range(QUICK.connections_per_address):
        with connect(url, "127.0.0.2") as connection:
            connection.sendall(asks)
            with pytest.raises(TimeoutError):
                connection.settimeout(0.5)
                connection.recv(1)
    assert until(lambda: receipts_answered(url) == QUICK.connections_per_address, seconds=20)


def receipts_answered(url: str) -> int:
    """How many requests for receipts are over, by the coordinator's own count."""
    with connect(url) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        figures = everything(connection).decode()
    lines = [line for line in figures.splitlines() if line.startswith("swarmproof_request_seconds_count{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if "/v1/receipts/" in line)


def insert_waiting(connection: object, submission: str) -> None:
    """A submission that nobody will ever judge."""
    run = connection.exec_driver_sql  # type: ignore[attr-defined]
    node, lease = "cd" * 32, "ef" * 32
    run(
        f"INSERT INTO nodes (node, software, engine, registered_at, seen_at, admitted, rejected, tokens, "
        f"rejected_streak, not_before) VALUES ('{node}', '', '', 0, 0, 0, 0, 0, 0, 0)"
    )
    run("INSERT INTO slots (id, version, number, state, opened_at) VALUES (1, 0, 0, 'submitted', 0)")
    columns = "lease, slot_id, node, state, issued_at, expires_at"
    run(f"INSERT INTO leases ({columns}) VALUES ('{lease}', 1, '{node}', 'submitted', 0, 0)")
    run(
        f"INSERT INTO submissions (submission, lease, slot_id, node, request, body, body_bytes, received_at, state, "
        f"attempts) VALUES ('{submission}', '{lease}', 1, '{node}', '', '', 0, 0, 'queued', 0)"
    )


def test_what_nobody_foresaw_is_told_to_the_log_alone(tmp_path: Path) -> None:
    """A stack trace tells a stranger which files and which queries there are."""
    key = Ed25519PrivateKey.generate()
    home = create_home(tmp_path, public_key=key.public_key().public_bytes_raw(), spec=small_spec())
    with home.database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE log_entries RENAME TO stolen")
    with serve(Coordinator(home, key=key)) as url, server_log() as told, connect(url) as connection:
        connection.sendall(b"GET /v1/log/checkpoint HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = everything(connection).partition(b"\r\n\r\n")
        assert is_served(url)
    home.database.close()
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"\r\nx-content-type-options: nosniff\r\n" in head
    reply = json.loads(body)
    assert reply["code"] == "internal_error"
    for inside in (b"log_entries", b"sqlite", b"raceback", b"SELECT", str(tmp_path).encode(), b".py"):
        assert inside not in body
    assert any(record.exc_info and "log_entries" in str(record.exc_info[1]) for record in told)
