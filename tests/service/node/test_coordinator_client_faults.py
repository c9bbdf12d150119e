"""What a node does when replies are hostile, broken or late: every one has a limit, and only some are retried."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time

import pytest
from aiohttp import web
from ports import free_port
from prepared_replies import NODE_KEY, QUICK, RUN_ID, answers, refusal, serving
from waiting import eventually

from node.client.api import CoordinatorClient
from node.client.http import ExchangeLimits
from node.errors import BadReply, ConfigError, CoordinatorFault, Refused, Unavailable
from node.protocol.messages import (
    Lease,
    LeaseReply,
    LeaseRequest,
    Registration,
)
from node.protocol.reasons import Reason
from node.protocol.requests import open_claim, read_authorization
from shardcast.wire import encode

REGISTRATION = Registration(software="s", engine="e", instance="0f" * 16, name="n")
LEASE = Lease(lease_id="a" * 64, version=1, manifest_digest="b" * 64, slot=3, expires_at=2**40)


async def _endless(request):
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    while True:
        _endless.sent += 65536
        await response.write(bytes(65536))


async def test_attack_endless_body_is_cut_at_the_limit():
    _endless.sent = 0
    async with serving(_endless) as client:
        with pytest.raises(BadReply) as caught:
            await client.lease(LeaseRequest(held_versions=(), slots=1, instance="0f" * 16))
    assert caught.value.code == "oversized"
    assert _endless.sent < 64 * 2**20


async def test_attack_decompression_bomb_is_never_inflated():
    bomb = gzip.compress(bytes(200 * 2**20), compresslevel=1)[: 500 * 1024]
    handler = answers(lambda: web.Response(body=bomb, headers={"Content-Encoding": "gzip"}))
    async with serving(handler) as client:
        with pytest.raises(BadReply):
            await client.lease(LeaseRequest(held_versions=(), slots=1, instance="0f" * 16))


async def test_attack_a_byte_now_and_then_ends_at_the_deadline():
    async def drip(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.05)

    started = time.monotonic()
    async with serving(drip, limits=ExchangeLimits(reply_seconds=0.4)) as client:
        with pytest.raises(Unavailable):
            await client.relays(patience_seconds=0)
    assert time.monotonic() - started < 30, "it would drip for ever"


async def test_attack_a_redirect_is_not_followed_to_where_the_coordinator_likes():
    handler = answers(lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"}))
    async with serving(handler) as client:
        with pytest.raises(BadReply, match="redirects"):
            await client.relays()
    assert len(handler.seen) == 1


async def test_attack_escape_sequences_in_a_refusal_do_not_reach_the_terminal():
    handler = answers(lambda: refusal(403, "\x1b]0;owned", message="\x1b[2J\r\nINFO all is well" + "x" * 5000))
    async with serving(handler) as client:
        with pytest.raises(Refused) as caught:
            await client.register(REGISTRATION)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 300
    assert caught.value.code == "http_403"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"leases":[],"head_version":1,"retry_after_seconds":1.0,"more":1}',
        b'{"leases":[],"head_version":1,"retry_after_seconds":1e999}',
        b'{"leases":[],"leases":[],"head_version":1,"retry_after_seconds":1.0}',
        b"\xff\xfe",
    ],
)
async def test_a_malformed_reply_is_a_typed_error(body):
    async with serving(answers(body)) as client:
        with pytest.raises(BadReply):
            await client.lease(LeaseRequest(held_versions=(), slots=1, instance="0f" * 16))


async def test_more_leases_than_asked_for_are_refused():
    reply = LeaseReply(leases=(LEASE, LEASE), head_version=1, retry_after_seconds=0.5)
    async with serving(answers(encode(reply))) as client:
        with pytest.raises(BadReply):
            await client.lease(LeaseRequest(held_versions=(1,), slots=1, instance="0f" * 16))
        assert await client.lease(LeaseRequest(held_versions=(1,), slots=2, instance="0f" * 16)) == reply


async def test_a_wrong_clock_is_corrected_once_and_said(caplog):
    behind = 3600.0

    async def handler(request):
        claim = open_claim(read_authorization(request.headers["Authorization"]))[1]
        handler.count += 1
        if abs(claim.issued_at - time.time()) > 60:
            return refusal(401, Reason.CLOCK_SKEW, server_time=int(time.time()))
        return web.Response(body=b"{}")

    handler.count = 0
    async with serving(handler, clock=lambda: time.time() - behind) as client:
        await client.register(REGISTRATION)
        assert abs(client.now() - time.time()) < 60
        await client.register(REGISTRATION)
    assert handler.count == 3
    lines = [record.message for record in caplog.records if "clock" in record.message]
    assert len(lines) == 1
    assert "set it (NTP)" in lines[0]


@pytest.mark.parametrize("server_time", [0, 1, 2**53 - 1])
async def test_attack_a_coordinator_that_always_complains_of_the_clock_is_not_retried_for_ever(server_time):
    handler = answers(lambda: refusal(401, Reason.CLOCK_SKEW, server_time=server_time))
    async with serving(handler) as client:
        with pytest.raises(Refused):
            await client.register(REGISTRATION)
    assert len(handler.seen) <= 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
async def test_a_refusal_that_time_does_not_heal_is_not_retried(status):
    handler = answers(lambda: refusal(status, "some_code"))
    async with serving(handler) as client:
        with pytest.raises(Refused) as caught:
            await client.register(REGISTRATION)
    assert (len(handler.seen), caught.value.status, caught.value.code) == (1, status, "some_code")


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_honoured(status):
    handler = answers(lambda: refusal(status, "too_many_requests", headers={"Retry-After": "1"}), b"{}")
    async with serving(handler) as client:
        started = time.monotonic()
        await client.register(REGISTRATION)
    assert time.monotonic() - started >= 1


@pytest.mark.parametrize("text", ["-5", "1e9", "soon", "9" * 400, "\u0663"])
async def test_attack_a_hostile_retry_after_neither_crashes_nor_hangs(text):
    handler = answers(lambda: refusal(429, "too_many_requests", headers={"Retry-After": text}))
    async with serving(handler) as client:
        with pytest.raises(Refused) as caught:
            await client.register(REGISTRATION, patience_seconds=0)
    assert (caught.value.retry_after_seconds or 0) <= 300


async def test_attack_spreading_retries_keeps_no_node_away_for_longer_than_its_limit(monkeypatch):
    monkeypatch.setattr("node.client.calls.random.uniform", lambda low, high: 1e4 if low == 1.0 else high)
    handler = answers(lambda: refusal(429, "too_many_requests", headers={"Retry-After": "300"}), b"{}")
    async with serving(handler, limits=ExchangeLimits(max_retry_after_seconds=0.1)) as client, asyncio.timeout(30):
        await client.register(REGISTRATION)
    assert len(handler.seen) == 2


async def test_an_outage_is_two_lines_however_many_retries_it_takes(caplog):
    caplog.set_level(logging.INFO)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with CoordinatorClient(url, run_id=RUN_ID, key=NODE_KEY, backoff=QUICK) as client:
        call = asyncio.create_task(client.register(REGISTRATION))
        await eventually(lambda: client.away)
        await asyncio.sleep(0.5)  # so many retries
        assert client.away
        assert not call.done()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answers(b"{}"))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await call
        await runner.cleanup()
    assert not client.away
    lines = [record.message for record in caplog.records if record.name.startswith("node.")]
    assert len(lines) == 2
    assert "is away (connection refused)" in lines[0]
    assert "back after" in lines[1]


async def test_patience_ends_with_a_sentence_that_names_the_address():
    port = free_port()
    async with CoordinatorClient(f"http://127.0.0.1:{port}", run_id=RUN_ID, backoff=QUICK) as client:
        with pytest.raises(CoordinatorFault, match=rf"127.0.0.1:{port} cannot be reached"):
            await client.relays(patience_seconds=0.2)


async def test_a_server_that_speaks_no_http_is_unavailable():
    async def babble(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with CoordinatorClient(url, run_id=RUN_ID) as client:
            with pytest.raises(Unavailable):
                await client.relays(patience_seconds=0)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "coordinator:8000",
        "ftp://h/",
        "http://",
        "http://user:secret@h/",
        "http://h/?q=1",
        "http://[::1",
        "file:///etc",
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url):
    with pytest.raises(ConfigError):
        CoordinatorClient(url, run_id=RUN_ID)
