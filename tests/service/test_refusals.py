"""Every refusal, through the real door: the code a stranger gets, and that nobody else pays for it."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import zstandard
from swarm import INSTANCE, Swarm, running, settle_slots, small_spec
from waiting import until

from coordinator.storage.folder_blobs import HELD_BYTES
from node.protocol.admission import Outcome
from node.protocol.messages import LeaseRequest, slot_name
from node.protocol.reasons import Reason
from node.protocol.requests import sign_request
from node.protocol.submission import Rollout
from node.submission.writer import compress, write_rollouts
from shardcast.wire import digest, encode


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Swarm]:
    spec = small_spec()
    # Honest work is admitted after each attack, and how long it is plays no part.
    spec = msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, max_new_tokens=12))
    with running(tmp_path_factory.mktemp("run"), tiny_policy_path, spec=spec) as swarm:
        yield swarm


@pytest.fixture(autouse=True)
def _still_works(swarm: Swarm) -> Iterator[None]:
    """After each attack an honest node still gets its work admitted: no refusal costs a process."""
    yield
    with swarm.home.database.write() as connection:  # the test's own leases are no longer wanted
        connection.exec_driver_sql("UPDATE leases SET expires_at = 1 WHERE state = 'active'")
    peer = swarm.peer()
    lease = peer.lease()
    receipt = swarm.judge(peer, swarm.honest(lease), lease)
    assert receipt.outcome is Outcome.ADMITTED, receipt
    with swarm.home.database.write() as connection:  # keep room for the next test's slots
        settle_slots(connection, "admitted", "used")


# --- at the door


def test_garbage_for_a_signature(swarm: Swarm) -> None:
    peer = swarm.peer()
    for header in ("", "Bearer abc", "Swarmproof", "Swarmproof !!!!", "Swarmproof " + "A" * 5000, "Swarmproof QUJD"):
        reply = peer.send("POST", "/v1/leases", b"{}", {"Authorization": header})
        assert (reply.status, reply.code) == (401, "bad_signature"), header


def test_signature_of_another_key(swarm: Swarm) -> None:
    peer = swarm.peer()
    body = encode(LeaseRequest(held_versions=(0,), slots=1, instance=INSTANCE))
    _, envelope = sign_request(peer.claim("POST", "/v1/leases", body), key=peer.key)
    forged = bytearray(envelope)
    forged[-1] ^= 1
    import base64

    header = "Swarmproof " + base64.urlsafe_b64encode(bytes(forged)).decode()
    reply = peer.send("POST", "/v1/leases", body, {"Authorization": header})
    assert (reply.status, reply.code) == (401, "bad_signature")


def test_signed_request_replayed(swarm: Swarm) -> None:
    peer = swarm.peer()
    body = encode(LeaseRequest(held_versions=(), slots=1, instance=INSTANCE))
    header, _ = sign_request(peer.claim("POST", "/v1/leases", body), key=peer.key)
    assert peer.send("POST", "/v1/leases", body, {"Authorization": header}).status == 200
    again = peer.send("POST", "/v1/leases", body, {"Authorization": header})
    assert (again.status, again.code) == (401, "replayed_request")


def test_signed_request_moved_to_another_endpoint(swarm: Swarm) -> None:
    peer = swarm.peer()
    body = encode(LeaseRequest(held_versions=(0,), slots=1, instance=INSTANCE))
    reply = peer.signed("POST", "/v1/leases", body, path="/v1/nodes")
    assert (reply.status, reply.code) == (401, "bad_signature")


def test_signed_request_of_another_run(swarm: Swarm) -> None:
    reply = swarm.peer().signed("POST", "/v1/leases", b"{}", run_id="0" * 64)
    assert (reply.status, reply.code) == (401, "wrong_run")


def test_clock_far_off_is_told_the_time(swarm: Swarm) -> None:
    reply = swarm.peer().signed("POST", "/v1/leases", b"{}", issued_at=int(time.time()) - 3600)
    assert (reply.status, reply.code) == (401, "clock_skew")
    assert abs(json.loads(reply.body)["server_time"] - time.time()) < 30


def test_unknown_identity(swarm: Swarm) -> None:
    stranger = swarm.peer(registered=False)
    body = encode(LeaseRequest(held_versions=(0,), slots=1, instance=INSTANCE))
    assert stranger.signed("POST", "/v1/leases", body).code == "unknown_identity"
    assert stranger.submit("0" * 64, b"x").code == "unknown_identity"


def test_body_swapped_after_signing(swarm: Swarm) -> None:
    peer = swarm.peer()
    body = encode(LeaseRequest(held_versions=(0,), slots=1, instance=INSTANCE))
    header, _ = sign_request(peer.claim("POST", "/v1/leases", body), key=peer.key)
    other = encode(LeaseRequest(held_versions=(0,), slots=9, instance=INSTANCE))
    reply = peer.send("POST", "/v1/leases", other, {"Authorization": header})
    assert (reply.status, reply.code) == (422, "body_mismatch")


def test_upload_swapped_after_signing(swarm: Swarm) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    path = f"/v1/submissions/{lease.lease_id}"
    header, _ = sign_request(peer.claim("PUT", path, b"a" * 100), key=peer.key)
    reply = peer.send("PUT", path, b"b" * 100, {"Authorization": header})
    assert (reply.status, reply.code) == (422, "body_mismatch")
    assert swarm.judge(peer, swarm.honest(lease), lease).outcome is Outcome.ADMITTED


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"held_versions":[0],"slots":0}', b'{"held_versions":[0], "slots":1}']
)
def test_malformed_message(swarm: Swarm, body: bytes) -> None:
    reply = swarm.peer().signed("POST", "/v1/leases", body)
    assert (reply.status, reply.code) == (400, "bad_request")


def test_deeply_nested_message(swarm: Swarm) -> None:
    reply = swarm.peer().signed("POST", "/v1/leases", b'{"held_versions":' + b"[" * 20_000)
    assert (reply.status, reply.code) == (400, "bad_request")


def test_unknown_lease(swarm: Swarm) -> None:
    reply = swarm.peer().submit("0" * 64, b"x")
    assert (reply.status, reply.code) == (404, "unknown_lease")


def test_another_nodes_lease(swarm: Swarm) -> None:
    victim, thief = swarm.peer(), swarm.peer()
    lease = victim.lease()
    reply = thief.submit(lease.lease_id, write_rollouts(swarm.honest(lease)))
    assert (reply.status, reply.code) == (403, "foreign_lease")
    assert thief.signed("POST", f"/v1/leases/{lease.lease_id}/return", b"").code == "foreign_lease"
    assert swarm.judge(victim, swarm.honest(lease), lease).outcome is Outcome.ADMITTED


@pytest.mark.parametrize("other", [{"slot": 77}, {"manifest_digest": "ab" * 32}, {"candidate": 0}])
def test_attack_work_that_is_signed_for_as_another_slots(swarm: Swarm, other: dict[str, Any]) -> None:
    """Were it judged, its evidence would convict the operator of having moved it."""
    peer = swarm.peer()
    lease = peer.lease()
    own, body = slot_name(lease), write_rollouts(swarm.honest(lease))
    reply = peer.submit(lease.lease_id, body, slot=msgspec.structs.replace(own, **other))
    assert (reply.status, reply.code) == (409, "wrong_slot")
    assert swarm.verdict(peer, peer.submit(lease.lease_id, body, slot=own)).outcome is Outcome.ADMITTED


def test_expired_lease(swarm: Swarm) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    with swarm.home.database.write() as connection:
        connection.exec_driver_sql("UPDATE leases SET expires_at = 1 WHERE lease = ?", (lease.lease_id,))
    reply = peer.submit(lease.lease_id, write_rollouts(swarm.honest(lease)))
    assert (reply.status, reply.code) == (409, "expired_lease")


def test_returned_lease(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.storage.work.OTHERS_FIRST_SECONDS", 0.0)  # there is nobody else
    with swarm.home.database.write() as connection:  # those that others gave up already go to proven nodes
        settle_slots(connection, "open", "stale")
    peer = swarm.peer()
    lease = peer.lease()
    assert peer.signed("POST", f"/v1/leases/{lease.lease_id}/return", b"").status == 200
    reply = peer.submit(lease.lease_id, b"x")
    assert (reply.status, reply.code) == (409, "expired_lease")
    again = peer.lease()
    assert (again.version, again.slot) == (lease.version, lease.slot), "an abandoned slot goes on unchanged"


def test_stale_policy(swarm: Swarm) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    with swarm.home.database.write() as connection:
        settle_slots(connection, "leased", "stale")
    reply = peer.submit(lease.lease_id, b"x")
    assert (reply.status, reply.code) == (409, "stale_policy")


def test_oversized_body_is_refused_by_its_claim(swarm: Swarm) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    limit = swarm.home.spec.limits.max_submission_bytes
    reply = peer.submit(lease.lease_id, b"x", body_bytes=limit + 1)
    assert (reply.status, reply.code) == (413, "oversized_body")


def test_endless_body_is_cut_off(swarm: Swarm) -> None:
    """A body without a declared length, that goes on past what was signed."""
    peer = swarm.peer()
    lease = peer.lease()
    path = f"/v1/submissions/{lease.lease_id}"
    header, _ = sign_request(peer.claim("PUT", path, b"a" * 1000), key=peer.key)
    where = urlsplit(swarm.url)
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(
            f"PUT {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        sent = 0
        try:
            while sent < 2**26:
                connection.sendall(b"10000\r\n" + b"a" * 0x10000 + b"\r\n")
                sent += 0x10000
        except OSError:
            pass
        connection.settimeout(10)
        answer = b""
        with contextlib.suppress(OSError):
            answer = connection.recv(4096)
    assert sent < 2**25, "the coordinator read on and on"
    assert not answer or b" 413 " in answer


def test_oversized_message(swarm: Swarm) -> None:
    reply = swarm.peer().signed("POST", "/v1/leases", b" " * (2**16 + 1))
    assert (reply.status, reply.code) == (413, "oversized_body")


def test_lease_submitted_twice(swarm: Swarm) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    body = write_rollouts(swarm.honest(lease))
    first = peer.submit(lease.lease_id, body)
    reply = peer.submit(lease.lease_id, body)
    assert (reply.status, reply.code) == (409, "duplicate_submission")
    assert json.loads(reply.body)["submission"] == json.loads(first.body)["submission"]
    assert swarm.verdict(peer, first).outcome is Outcome.ADMITTED


def test_copy_of_anothers_submission(swarm: Swarm) -> None:
    author, copyist = swarm.peer(), swarm.peer()
    lease = author.lease()
    body = write_rollouts(swarm.honest(lease))
    assert swarm.verdict(author, author.submit(lease.lease_id, body)).outcome is Outcome.ADMITTED
    reply = copyist.submit(copyist.lease().lease_id, body)
    assert (reply.status, reply.code) == (409, "duplicate_submission")
    assert json.loads(reply.body)["submission"] is None, "another node's submission is not told"


def test_copy_sent_ahead_does_not_bar_the_author(swarm: Swarm) -> None:
    """Slots can be computed by anyone, so a cheat can submit an honest node's bytes first, under a slot of its own."""
    author, cheat = swarm.peer(), swarm.peer()
    lease, other = author.lease(), cheat.lease()
    body = write_rollouts(swarm.honest(lease))
    ahead = cheat.submit(other.lease_id, body)
    assert swarm.verdict(author, author.submit(lease.lease_id, body)).outcome is Outcome.ADMITTED
    assert swarm.verdict(cheat, ahead).reason in (Reason.WRONG_PROMPT, Reason.WRONG_SEED)


def test_upload_that_is_refused_at_its_end_leaves_no_file(swarm: Swarm) -> None:
    """The lease is given back while its upload is under way: the disk must not fill with what nobody judges."""
    peer = swarm.peer()
    lease = peer.lease()
    path, body = f"/v1/submissions/{lease.lease_id}", b"x" * (HELD_BYTES + 5000)
    header, envelope = sign_request(peer.claim("PUT", path, body), key=peer.key)
    where = urlsplit(swarm.url)
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[:-1])
        until(lambda: any(swarm.home.blobs._incoming.iterdir()))
        assert peer.submit(lease.lease_id, b"y").code == "too_many_requests", "one upload for a lease at a time"
        assert peer.signed("POST", f"/v1/leases/{lease.lease_id}/return", b"").status == 200
        connection.sendall(body[-1:])
        assert b" 409 " in connection.recv(4096)
    assert not swarm.home.blobs.path(digest(body)).exists()
    assert not swarm.home.blobs.path(digest(envelope)).exists()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/nothing",
        "/v1/blobs/../../etc/passwd",
        "/v1/blobs/" + "g" * 64,
        "/v1/receipts/" + "0" * 64,
        "/v1/receipts/x",
    ],
)
def test_nothing_there(swarm: Swarm, path: str) -> None:
    reply = swarm.peer().send("GET", path)
    assert (reply.status, reply.code) == (404, "not_found")


@pytest.mark.parametrize(
    "path", ["/v1/log/entries?start=-1&end=5", "/v1/log/inclusion?index=x&size=1", "/v1/log/entries"]
)
def test_parameters_out_of_bounds(swarm: Swarm, path: str) -> None:
    reply = swarm.peer().send("GET", path)
    assert (reply.status, reply.code) == (400, "bad_request")


def test_proof_for_a_log_that_never_was(swarm: Swarm) -> None:
    assert swarm.peer().send("GET", "/v1/log/inclusion?index=0&size=999999").code == "not_found"


# --- verdicts


def change(rollouts: list[Rollout], row: int = 1, **values: object) -> list[Rollout]:
    """`rollouts` with one row changed."""
    return [msgspec.structs.replace(r, **values) if i == row else r for i, r in enumerate(rollouts)]


def rejected(swarm: Swarm, tamper: Callable[[list[Rollout]], list[Rollout] | bytes]) -> Reason | None:
    """The reason for which the tampered work of an honest node is rejected."""
    peer = swarm.peer()
    lease = peer.lease()
    made = tamper(swarm.honest(lease))
    body = made if isinstance(made, bytes) else write_rollouts(made)
    receipt = swarm.verdict(peer, peer.submit(lease.lease_id, body))
    assert receipt.outcome is Outcome.REJECTED, receipt
    assert receipt.reason is not None
    assert receipt.reason.advice
    return receipt.reason


def test_malformed_submission(swarm: Swarm) -> None:
    table = b"PAR1 this is not a table PAR1" + bytes(40)
    assert rejected(swarm, lambda _: table) is Reason.MALFORMED_SUBMISSION


def test_wrong_schema(swarm: Swarm) -> None:
    def with_a_reward(rollouts: list[Rollout]) -> bytes:
        content = msgspec.msgpack.decode(zstandard.decompress(write_rollouts(rollouts)))
        return compress(msgspec.msgpack.encode(content | {"reward": 1.0}))

    assert rejected(swarm, with_a_reward) is Reason.WRONG_SCHEMA


def test_group_with_a_bad_draw_left_out(swarm: Swarm) -> None:
    assert rejected(swarm, lambda rollouts: rollouts[:-1]) is Reason.WRONG_GROUP_SIZE


def test_changed_prompt(swarm: Swarm) -> None:
    assert rejected(swarm, lambda r: change(r, prompt_ids=[*r[1].prompt_ids[:-1], 7])) is Reason.WRONG_PROMPT


def test_own_choice_of_seed(swarm: Swarm) -> None:
    assert rejected(swarm, lambda r: change(r, seed=bytes(16))) is Reason.WRONG_SEED


def test_rows_in_another_order(swarm: Swarm) -> None:
    assert rejected(swarm, lambda r: [r[1], r[0], *r[2:]]) is Reason.WRONG_SEED


@pytest.mark.parametrize("token", [128, -1, 2**31 - 1])
def test_token_out_of_range(swarm: Swarm, token: int) -> None:
    def tamper(r: list[Rollout]) -> list[Rollout]:
        return change(r, completion_ids=[token, *r[1].completion_ids[1:]])

    assert rejected(swarm, tamper) is Reason.TOKEN_OUT_OF_RANGE


def test_tokens_after_eos(swarm: Swarm) -> None:
    def tamper(r: list[Rollout]) -> list[Rollout]:
        return change(r, completion_ids=[1, *r[1].completion_ids[1:]])

    assert rejected(swarm, tamper) in (Reason.TOKENS_AFTER_EOS, Reason.WRONG_TOKEN)


def test_padding_after_eos(swarm: Swarm) -> None:
    def tamper(r: list[Rollout]) -> list[Rollout]:
        tokens = [5, 1, 0, 0, 0]
        return change(r, completion_ids=tokens, logprobs=[-1.0] * 5)

    assert rejected(swarm, tamper) is Reason.TOKENS_AFTER_EOS


def test_stopping_early(swarm: Swarm) -> None:
    def tamper(r: list[Rollout]) -> list[Rollout]:
        return change(r, completion_ids=[5, 6], logprobs=[-1.0, -1.0])

    assert rejected(swarm, tamper) is Reason.UNFINISHED


def test_empty_completion(swarm: Swarm) -> None:
    assert rejected(swarm, lambda r: change(r, completion_ids=[], logprobs=[], proofs=[])) is Reason.EMPTY_COMPLETION


def test_longer_than_the_cap(swarm: Swarm) -> None:
    def tamper(r: list[Rollout]) -> list[Rollout]:
        cap = swarm.home.spec.sampling.max_new_tokens
        return change(r, completion_ids=[5] * (cap + 1), logprobs=[-1.0] * (cap + 1))

    assert rejected(swarm, tamper) in (Reason.TOO_LONG, Reason.WRONG_SCHEMA)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0])
def test_logprob_that_no_probability_has(swarm: Swarm, value: float) -> None:
    def tamper(r: list[Rollout]) -> list[Rollout]:
        return change(r, logprobs=[value, *r[1].logprobs[1:]])

    assert rejected(swarm, tamper) is Reason.LOGPROB_NOT_FINITE


def test_forged_logprobs(swarm: Swarm) -> None:
    def tamper(r: list[Rollout]) -> list[Rollout]:
        return change(r, logprobs=[x - 0.01 for x in r[1].logprobs])

    assert rejected(swarm, tamper) is Reason.WRONG_LOGPROB


def test_logprobs_left_out(swarm: Swarm) -> None:
    assert rejected(swarm, lambda r: change(r, logprobs=r[1].logprobs[:-1])) is Reason.WRONG_LOGPROB_COUNT


@pytest.mark.parametrize("count", ["none", "fewer", "more"])
def test_missing_or_extra_proofs(swarm: Swarm, count: str) -> None:
    def tamper(r: list[Rollout]) -> list[Rollout]:
        proofs = r[1].proofs
        return change(r, proofs={"none": [], "fewer": proofs[:-1], "more": [*proofs, proofs[0]]}[count])

    assert rejected(swarm, tamper) in (Reason.WRONG_PROOF_COUNT, Reason.WRONG_SCHEMA)


def test_null_proofs(swarm: Swarm) -> None:
    """The all-zero proof that the reference implementation writes in place of an error, and crashes on."""

    def tamper(r: list[Rollout]) -> list[Rollout]:
        return change(r, proofs=[bytes(len(proof)) for proof in r[1].proofs])

    assert rejected(swarm, tamper) is Reason.MALFORMED_PROOF


def test_short_proof(swarm: Swarm) -> None:
    assert rejected(swarm, lambda r: change(r, proofs=[p[:-2] for p in r[1].proofs])) is Reason.MALFORMED_PROOF


def test_constant_proof(swarm: Swarm) -> None:
    """A constant polynomial, which published limits accept on ordinary activations."""

    def tamper(r: list[Rollout]) -> list[Rollout]:
        forged = bytes.fromhex("ffd9405b") + bytes(254)
        return change(r, proofs=[forged for _ in r[1].proofs])

    assert rejected(swarm, tamper) is Reason.PROOF_MISMATCH


def test_proofs_of_another_row(swarm: Swarm) -> None:
    def tamper(r: list[Rollout]) -> list[Rollout]:
        return (
            change(r, proofs=r[2].proofs)
            if len(r[2].proofs) == len(r[1].proofs)
            else change(r, proofs=[r[2].proofs[0]] * len(r[1].proofs))
        )

    assert rejected(swarm, tamper) is Reason.PROOF_MISMATCH


def test_rejected_slot_goes_to_somebody_else_unchanged(swarm: Swarm) -> None:
    cheat, other = swarm.peer(), swarm.peer()
    lease = cheat.lease()
    swarm.verdict(cheat, cheat.submit(lease.lease_id, b"nothing of worth" + lease.lease_id.encode()))
    assert all(next_.slot != lease.slot for next_ in cheat.ask(slots=3).leases), "not to the node that failed it"
    again = other.lease()
    assert (again.version, again.slot) == (lease.version, lease.slot)
    assert swarm.judge(other, swarm.honest(again), again).outcome is Outcome.ADMITTED
