"""What a node does with what a coordinator, a broken proxy or an attacker in its place sends it."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from blake3 import blake3
from msgspec import structs
from prepared_replies import (
    DESCRIPTOR,
    LEASE,
    NODE_KEY,
    OTHER_KEY,
    REGISTRATION,
    RUN_ID,
    RUN_KEY,
    answers,
    refusal,
    sealed_descriptor,
    sealed_receipt,
    serving,
)

from node.client.api import CoordinatorClient
from node.errors import BadReply, Refused
from node.keys.identity import node_id
from node.protocol.messages import RECEIPT_DOMAIN, ErrorReply, SubmissionReply, slot_name
from node.protocol.requests import check_claim, open_claim, read_authorization
from node.protocol.run import run_id_of
from shardcast.envelope import seal
from shardcast.wire import digest, encode


async def test_a_signed_request_passes_the_coordinators_checks():
    handler = answers(b"{}", b"{}")
    async with serving(handler) as client:
        await client.register(REGISTRATION)
        await client.return_lease("a" * 64)
    for request, body, path in zip(
        handler.seen, handler.bodies, ["/v1/nodes", f"/v1/leases/{'a' * 64}/return"], strict=True
    ):
        signer, claim = open_claim(read_authorization(request.headers["Authorization"]))
        check_claim(claim, run_id=RUN_ID, method=request.method, path=path, now=time.time())
        assert signer.hex() == node_id(NODE_KEY)
        assert request.path == path
        assert (claim.body_digest, claim.body_bytes) == (digest(body), len(body))
    assert handler.bodies == [encode(REGISTRATION), b""]


async def test_a_retried_request_is_signed_anew_or_it_would_be_refused_as_a_replay():
    handler = answers(lambda: web.Response(status=503), lambda: web.Response(status=502, text="<html>"), b"{}")
    async with serving(handler) as client:
        await client.register(REGISTRATION)
    assert len({request.headers["Authorization"] for request in handler.seen}) == 3


async def test_a_submission_is_streamed_from_its_file_and_named_by_its_signature(tmp_path):
    body = tmp_path / "slot.rollouts"
    body.write_bytes(bytes(range(256)) * 4096 * 3)

    async def handler(request):
        assert request.content_length == 3 * 2**20
        assert blake3(await request.read()).digest() == blake3(body.read_bytes()).digest()
        envelope = read_authorization(request.headers["Authorization"])
        claim = open_claim(envelope)[1]
        assert (claim.body_digest, claim.slot) == (digest(body.read_bytes()), slot_name(LEASE))
        return web.Response(status=202, body=encode(SubmissionReply(submission=digest(envelope))))

    async with serving(handler) as client:
        assert len(await client.submit(LEASE, body)) == 64


async def test_a_refused_upload_is_heard_although_the_coordinator_never_reads_it(tmp_path):
    body = tmp_path / "slot.rollouts"
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
                await client.submit(LEASE, body)
    assert (caught.value.code, caught.value.status) == ("expired_lease", 409)


async def test_a_duplicate_names_the_submission_that_was_stored(tmp_path):
    (tmp_path / "body").write_bytes(b"x")
    handler = answers(lambda: refusal(409, "duplicate_submission", submission="e" * 64))
    async with serving(handler) as client:
        with pytest.raises(Refused) as caught:
            await client.submit(LEASE, tmp_path / "body")
    assert caught.value.submission == "e" * 64


async def test_an_acknowledgement_of_another_submission_is_refused(tmp_path):
    (tmp_path / "body").write_bytes(b"x")
    async with serving(answers(encode(SubmissionReply(submission="f" * 64)))) as client:
        with pytest.raises(BadReply):
            await client.submit(LEASE, tmp_path / "body")


async def test_the_descriptor_is_taken_only_from_the_runs_own_key():
    other = run_id_of(OTHER_KEY.public_key().public_bytes_raw())
    forgeries = {
        "another run's": sealed_descriptor(key=OTHER_KEY),
        "another run's, renamed": sealed_descriptor(structs.replace(DESCRIPTOR, run_id=other)),
        "expired": sealed_descriptor(structs.replace(DESCRIPTOR, expires_at=1000)),
        "tampered": sealed_descriptor()[:-1] + bytes([sealed_descriptor()[-1] ^ 1]),
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
