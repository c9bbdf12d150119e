"""What a node does with what a coordinator, a broken proxy or an attacker in its place sends it."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from node.coordinator_client import CoordinatorClient
from node.errors import BadReply, ConfigError, CoordinatorFault, Refused, Unavailable
from node.exchange import Backoff, ExchangeLimits
from node.identity import node_id
from node.protocol.admission import Outcome
from node.protocol.messages import (
    MESSAGE_VERSION,
    RECEIPT_DOMAIN,
    ErrorReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Receipt,
    Registration,
    SubmissionReply,
)
from node.protocol.reasons import Reason
from node.protocol.requests import check_claim, open_claim, read_authorization
from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, Descriptor, EnvironmentSpec, RunSpec, run_id_of
from shardcast.envelope import seal
from shardcast.wire import digest, encode

RUN_KEY = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
NODE_KEY = Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\3" * 32)
RUN_ID = run_id_of(RUN_KEY.public_key().public_bytes_raw())
DESCRIPTOR = Descriptor(
    run_id=RUN_ID,
    spec=RunSpec(name="test", environments=(EnvironmentSpec(name="arithmetic"),)),
    relays=(),
    issued_at=1,
    expires_at=2**40,
)
QUICK = Backoff(first_seconds=0.01, max_seconds=0.05)
LEASE = Lease(lease_id="a" * 64, version=1, manifest_digest="b" * 64, slot=3, expires_at=2**40)


def sealed_descriptor(descriptor=DESCRIPTOR, key=RUN_KEY):
    return seal(encode(descriptor), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=key)


def sealed_receipt(key=RUN_KEY, **changes):
    receipt = Receipt(
        run_id=RUN_ID,
        submission="c" * 64,
        node=node_id(NODE_KEY),
        version=1,
        slot=3,
        outcome=Outcome.ADMITTED,
        reason=None,
        detail="",
        tokens=5,
        log_index=2,
        leaf_hash="d" * 64,
    )
    receipt = structs.replace(receipt, **changes)
    return seal(encode(receipt), domain=RECEIPT_DOMAIN, version=MESSAGE_VERSION, key=key)


def refusal(status, code, *, headers=None, server_time=0, message="No.", submission=None):
    reply = ErrorReply(code=code, message=message, server_time=server_time, submission=submission)
    return web.Response(status=status, body=encode(reply), headers=headers)


def answers(*replies):
    """A handler that gives one reply after the other and then repeats the last; `seen` counts the requests."""

    async def handler(request):
        handler.seen.append(request)
        handler.bodies.append(await request.read())
        reply = replies[min(len(handler.seen), len(replies)) - 1]
        return reply() if callable(reply) else web.Response(body=reply)

    handler.seen, handler.bodies = [], []
    return handler


@asynccontextmanager
async def serving(handler, **client_arguments):
    """A real server that answers everything with `handler`, and a client of it."""
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        defaults = {"run_id": RUN_ID, "key": NODE_KEY, "backoff": QUICK}
        async with CoordinatorClient(url, **(defaults | client_arguments)) as client:
            yield client
    finally:
        await runner.cleanup()


async def test_a_signed_request_passes_the_coordinators_checks():
    handler = answers(b"{}", b"{}")
    registration = Registration(software="veriswarm", engine="torch")
    async with serving(handler) as client:
        await client.register(registration)
        await client.return_lease("a" * 64)
    for request, body, path in zip(
        handler.seen, handler.bodies, ["/v1/nodes", f"/v1/leases/{'a' * 64}/return"], strict=True
    ):
        signer, claim = open_claim(read_authorization(request.headers["Authorization"]))
        check_claim(claim, run_id=RUN_ID, method=request.method, path=path, now=time.time())
        assert signer.hex() == node_id(NODE_KEY)
        assert request.path == path
        assert (claim.body_digest, claim.body_bytes) == (digest(body), len(body))
    assert handler.bodies == [encode(registration), b""]


async def test_a_retried_request_is_signed_anew_or_it_would_be_refused_as_a_replay():
    handler = answers(lambda: web.Response(status=503), lambda: web.Response(status=502, text="<html>"), b"{}")
    async with serving(handler) as client:
        await client.register(Registration(software="s", engine="e"))
    assert len({request.headers["Authorization"] for request in handler.seen}) == 3


async def test_a_submission_is_streamed_from_its_file_and_named_by_its_signature(tmp_path):
    body = tmp_path / "slot.parquet"
    body.write_bytes(bytes(range(256)) * 4096 * 3)

    async def handler(request):
        assert request.content_length == 3 * 2**20
        assert blake3(await request.read()).digest() == blake3(body.read_bytes()).digest()
        envelope = read_authorization(request.headers["Authorization"])
        assert open_claim(envelope)[1].body_digest == digest(body.read_bytes())
        return web.Response(status=202, body=encode(SubmissionReply(submission=digest(envelope))))

    async with serving(handler) as client:
        assert len(await client.submit("a" * 64, body)) == 64


async def test_a_refused_upload_is_heard_although_the_coordinator_never_reads_it(tmp_path):
    body = tmp_path / "slot.parquet"
    body.write_bytes(bytes(32 * 2**20))

    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        said = encode(ErrorReply(code="expired_lease", message="Too late.", server_time=0))
        head = b"HTTP/1.1 409 Conflict\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(said)
        writer.write(head + said)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with CoordinatorClient(url, run_id=RUN_ID, key=NODE_KEY) as client:
            with pytest.raises(Refused) as caught:
                await client.submit("a" * 64, body)
    assert (caught.value.code, caught.value.status) == ("expired_lease", 409)


async def test_a_duplicate_names_the_submission_that_was_stored(tmp_path):
    (tmp_path / "body").write_bytes(b"x")
    handler = answers(lambda: refusal(409, "duplicate_submission", submission="e" * 64))
    async with serving(handler) as client:
        with pytest.raises(Refused) as caught:
            await client.submit("a" * 64, tmp_path / "body")
    assert caught.value.submission == "e" * 64


async def test_an_acknowledgement_of_another_submission_is_refused(tmp_path):
    (tmp_path / "body").write_bytes(b"x")
    async with serving(answers(encode(SubmissionReply(submission="f" * 64)))) as client:
        with pytest.raises(BadReply):
            await client.submit("a" * 64, tmp_path / "body")


async def test_the_descriptor_is_taken_only_from_the_runs_own_key():
    other = run_id_of(OTHER_KEY.public_key().public_bytes_raw())
    forgeries = {
        "another run's": sealed_descriptor(key=OTHER_KEY),
        "another run's, renamed": sealed_descriptor(structs.replace(DESCRIPTOR, run_id=other)),
        "expired": sealed_descriptor(structs.replace(DESCRIPTOR, expires_at=1000)),
        "tampered": sealed_descriptor()[:-1] + b"\0",
        "another message": seal(encode(DESCRIPTOR), domain=RECEIPT_DOMAIN, version=1, key=RUN_KEY),
        "no envelope": b"<html>Log in to the hotel's network</html>",
    }
    for name, forgery in forgeries.items():
        async with serving(answers(forgery)) as client:
            with pytest.raises(BadReply, match="--run-id"):
                await client.descriptor()
            assert client.run_key is None, name
    async with serving(answers(sealed_descriptor())) as client:
        assert await client.descriptor() == DESCRIPTOR
        assert client.run_key == RUN_KEY.public_key().public_bytes_raw()


@pytest.mark.parametrize(
    "receipt",
    [
        sealed_receipt(key=OTHER_KEY),
        sealed_receipt(submission="d" * 64),
        sealed_receipt(node=node_id(OTHER_KEY)),
        sealed_receipt(run_id="0" * 64),
        sealed_descriptor(),
        b"",
    ],
)
async def test_a_receipt_that_the_run_did_not_sign_for_this_submission_counts_for_nothing(receipt):
    async with serving(answers(sealed_descriptor(), receipt)) as client:
        await client.descriptor()
        with pytest.raises(BadReply):
            await client.receipt("c" * 64, wait_seconds=0)


async def test_a_receipt_is_waited_for():
    handler = answers(sealed_descriptor(), lambda: web.Response(status=202, body=b"{}"), sealed_receipt())
    async with serving(handler) as client:
        await client.descriptor()
        assert await client.receipt("c" * 64, wait_seconds=2.5) is None
        receipt, envelope = await client.receipt("c" * 64, wait_seconds=2.5)
    assert handler.seen[1].query["wait"] == "2.5"
    assert (receipt.tokens, envelope) == (5, sealed_receipt())


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
            await client.lease(LeaseRequest(held_versions=(), slots=1))
    assert caught.value.code == "oversized"
    assert _endless.sent < 64 * 2**20


async def test_attack_decompression_bomb_is_never_inflated():
    bomb = gzip.compress(bytes(200 * 2**20), compresslevel=1)[: 500 * 1024]
    handler = answers(lambda: web.Response(body=bomb, headers={"Content-Encoding": "gzip"}))
    async with serving(handler) as client:
        with pytest.raises(BadReply):
            await client.lease(LeaseRequest(held_versions=(), slots=1))


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
    assert time.monotonic() - started < 5


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
            await client.register(Registration(software="s", engine="e"))
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
            await client.lease(LeaseRequest(held_versions=(), slots=1))


async def test_more_leases_than_asked_for_are_refused():
    reply = LeaseReply(leases=(LEASE, LEASE), head_version=1, retry_after_seconds=0.5)
    async with serving(answers(encode(reply))) as client:
        with pytest.raises(BadReply):
            await client.lease(LeaseRequest(held_versions=(1,), slots=1))
        assert await client.lease(LeaseRequest(held_versions=(1,), slots=2)) == reply


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
        await client.register(Registration(software="s", engine="e"))
        assert abs(client.now() - time.time()) < 2
        await client.register(Registration(software="s", engine="e"))
    assert handler.count == 3
    lines = [record.message for record in caplog.records if "clock" in record.message]
    assert len(lines) == 1
    assert "set it (NTP)" in lines[0]


@pytest.mark.parametrize("server_time", [0, 1, 2**53 - 1])
async def test_attack_a_coordinator_that_always_complains_of_the_clock_is_not_retried_for_ever(server_time):
    handler = answers(lambda: refusal(401, Reason.CLOCK_SKEW, server_time=server_time))
    async with serving(handler) as client:
        with pytest.raises(Refused):
            await client.register(Registration(software="s", engine="e"))
    assert len(handler.seen) <= 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
async def test_a_refusal_that_time_does_not_heal_is_not_retried(status):
    handler = answers(lambda: refusal(status, "some_code"))
    async with serving(handler) as client:
        with pytest.raises(Refused) as caught:
            await client.register(Registration(software="s", engine="e"))
    assert (len(handler.seen), caught.value.status, caught.value.code) == (1, status, "some_code")


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_honoured(status):
    handler = answers(lambda: refusal(status, "too_many_requests", headers={"Retry-After": "1"}), b"{}")
    async with serving(handler) as client:
        started = time.monotonic()
        await client.register(Registration(software="s", engine="e"))
    assert time.monotonic() - started >= 1


@pytest.mark.parametrize("text", ["-5", "1e9", "soon", "9" * 400, "\u0663"])
async def test_attack_a_hostile_retry_after_neither_crashes_nor_hangs(text):
    handler = answers(lambda: refusal(429, "too_many_requests", headers={"Retry-After": text}))
    async with serving(handler) as client:
        with pytest.raises(Refused) as caught:
            await client.register(Registration(software="s", engine="e"), patience_seconds=0)
    assert (caught.value.retry_after_seconds or 0) <= 300


async def test_an_outage_is_two_lines_however_many_retries_it_takes(caplog, unused_tcp_port):
    caplog.set_level(logging.INFO)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with CoordinatorClient(url, run_id=RUN_ID, key=NODE_KEY, backoff=QUICK) as client:
        call = asyncio.create_task(client.register(Registration(software="s", engine="e")))
        await asyncio.sleep(0.5)
        assert client.away
        assert not call.done()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answers(b"{}"))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
        await call
        await runner.cleanup()
    assert not client.away
    lines = [record.message for record in caplog.records if record.name.startswith("node.")]
    assert len(lines) == 2
    assert "is away (connection refused)" in lines[0]
    assert "back after" in lines[1]


async def test_patience_ends_with_a_sentence_that_names_the_address(unused_tcp_port):
    async with CoordinatorClient(f"http://127.0.0.1:{unused_tcp_port}", run_id=RUN_ID, backoff=QUICK) as client:
        with pytest.raises(CoordinatorFault, match=rf"127.0.0.1:{unused_tcp_port} cannot be reached"):
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
