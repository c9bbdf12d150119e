"""A run whose bodies go by an object store: what a node gains by lying about them, and what a failing store costs.

What would break for whom: an operator whose API carries every body pays for it in machines; a node whose upload is
swapped, swept or forgotten loses its work or its standing; an auditor who cannot fetch what was judged has to believe.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from object_store import Store, object_store
from overhearing import overheard
from sqlalchemy import select, update
from swarm import Peer, Reply, Swarm, running, small_spec
from waiting import until

from coordinator.errors import CorruptRead, StoreAway
from coordinator.storage import s3_blobs, uploads
from coordinator.storage.retention import remove_expired
from coordinator.storage.schema import SubmissionState, groups, leases, submissions
from coordinator.storage.schema import uploads as uploads_table
from coordinator.storage.uploads import OFFER_SECONDS, SWEPT_AFTER_SECONDS, sweep
from coordinator.training.batches import read_batch
from coordinator.training.groups import encode_group
from node.client.api import CoordinatorClient
from node.client.http import Backoff, ExchangeLimits
from node.client.object_store import put_file
from node.client.ssrf import Reach
from node.engines.torch import TorchEngine
from node.errors import Refused, StoreUnavailable
from node.joining.session import JoinSettings
from node.protocol.admission import Outcome
from node.protocol.messages import Lease, UploadReply, UploadRequest, VerdictEntry, slot_name
from node.protocol.reasons import Reason
from node.protocol.requests import sign_request
from node.submission.writer import write_rollouts
from node.worker.daemon import WorkerSettings, run_worker
from shardcast.wire import decode, digest, encode

MAGIC = b"\x28\xb5\x2f\xfd"
"""With which every submission begins."""

SPEC = small_spec()
SPEC = msgspec.structs.replace(SPEC, batch=msgspec.structs.replace(SPEC.batch, groups_per_step=200))
"""With room for the leases of every test."""

QUICK = Backoff(first_seconds=0.05, max_seconds=0.2)


@pytest.fixture(scope="module")
def swarm_and_store(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[tuple[Swarm, Store]]:
    folder = tmp_path_factory.mktemp("run")
    with object_store() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        with running(folder, tiny_policy_path, spec=SPEC, blobs_url=store.url) as swarm:
            yield swarm, store


@pytest.fixture
def store(swarm_and_store: tuple[Swarm, Store]) -> Iterator[Store]:
    store = swarm_and_store[1]
    store.calls.clear()
    yield store
    store.fault, store.strict = lambda _method, _key: None, True


@pytest.fixture
def swarm(swarm_and_store: tuple[Swarm, Store], store: Store) -> Swarm:
    return swarm_and_store[0]


def sha256_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def announce(peer: Peer, lease_id: str, body: bytes, /, **changes: object) -> Reply:
    asked = {"body": digest(body), "body_bytes": len(body), "sha256": sha256_of(body)} | changes
    return peer.signed("POST", f"/v1/uploads/{lease_id}", encode(UploadRequest(**asked)))


def put(reply: Reply, body: bytes, path: Path) -> None:
    """What a worker puts where the coordinator's offer says; raises StoreAway where the store does not take it."""
    assert reply.status == 200, reply
    path.write_bytes(body)
    url = decode(UploadReply, reply.body, max_bytes=2**16).url
    limits = ExchangeLimits()
    asyncio.run(
        put_file(url, path, body_bytes=len(body), sha256=sha256_of(body), least=Reach.THIS_MACHINE, limits=limits)
    )


def submit(peer: Peer, lease_id: str, body: bytes, /, **changes: object) -> Reply:
    path = f"/v1/submissions/{lease_id}/{sha256_of(body)}"
    header, _ = sign_request(peer.claim("PUT", path, body, **changes), key=peer.key)
    return peer.send("PUT", path, b"", {"Authorization": header})


def uploaded(peer: Peer, lease_id: str, body: bytes, path: Path, /, **changes: object) -> Reply:
    put(announce(peer, lease_id, body, **changes), body, path)
    claimed = {"body_digest": changes["body"]} if "body" in changes else {}
    return submit(peer, lease_id, body, **claimed)


def entry_of(swarm: Swarm, index: int) -> VerdictEntry:
    answer = swarm.peer(registered=False).send("GET", f"/v1/log/entries?start={index}&end={index + 1}")
    return decode(VerdictEntry, answer.body.strip(), max_bytes=2**20)


def audited(swarm: Swarm, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    swarm.audit(folder)
    return json.loads(capsys.readouterr().out)


# -- the way of an honest body


def work_once(run_id: str, url: str, state: Path) -> None:
    settings = WorkerSettings(join=JoinSettings(run_id=run_id, coordinators=(url,)), state=state, once=True)
    joined = run_worker(settings, key=Ed25519PrivateKey.generate(), make_engine=TorchEngine, stop=asyncio.Event())
    asyncio.run(asyncio.wait_for(joined, 90))


def test_a_workers_body_never_passes_the_coordinator_and_an_audit_of_it_agrees(
    swarm: Swarm, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with overheard(swarm.url) as wire:
        work_once(swarm.home.run_id, wire.url, tmp_path / "worker")
    asked = re.findall(rb"(?:PUT|POST) (/v1/(?:uploads|submissions)/\S+) HTTP", bytes(wire.up))
    assert len(asked) == 3, "refused once, announced, submitted"
    assert MAGIC not in wire.up
    assert MAGIC not in wire.down
    carried = [call for call in store.calls if call.method == "PUT" and call.key.startswith("uploads/")]
    assert [(call.agent, call.presigned, call.status) for call in carried] == [("swarmproof", True, 200)]
    with swarm.home.database.read() as connection:
        newest = select(submissions.c.body, submissions.c.outcome, submissions.c.body_bytes)
        body, outcome, size = connection.execute(newest.order_by(submissions.c.received_at.desc())).first()
    assert outcome == Outcome.ADMITTED
    evidence = swarm.peer(registered=False).send("GET", f"/v1/blobs/{body}").body
    assert (digest(evidence), len(evidence), evidence[:4]) == (body, size, MAGIC)
    assert carried[0].body_bytes == size
    report = audited(swarm, tmp_path / "auditor", capsys)
    assert (report["problems"], report["outcome"], report["error"]) == ([], "agree", None)


def test_with_a_folder_the_same_worker_sends_its_body_to_the_coordinator(
    tmp_path: Path, tiny_policy_path: Path
) -> None:
    """The worker is told by nobody but the coordinator's answer; and the wire of the test above does see bodies."""
    with running(tmp_path / "run", tiny_policy_path) as swarm:
        with overheard(swarm.url) as wire:
            work_once(swarm.home.run_id, wire.url, tmp_path / "worker")
        peer = swarm.peer()
        lease = peer.lease()
        assert announce(peer, lease.lease_id, b"x").code == "not_found"
        assert submit(peer, lease.lease_id, b"x").code == "not_found"
    assert wire.up.count(MAGIC) == 1
    assert b"/v1/uploads" not in wire.up


def test_an_upload_is_removed_once_its_body_has_its_name(swarm: Swarm, store: Store, tmp_path: Path) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    body = write_rollouts(swarm.honest(lease))
    receipt = swarm.verdict(peer, uploaded(peer, lease.lease_id, body, tmp_path / "body"))
    assert receipt.outcome is Outcome.ADMITTED
    assert entry_of(swarm, receipt.log_index).body == digest(body)
    until(lambda: store.keys(f"uploads/{lease.lease_id}") == [])

    def forgotten() -> bool:
        with swarm.home.database.read() as connection:
            return uploads.of_lease(connection, lease.lease_id) is None

    until(forgotten)
    assert f"blobs/{digest(body)}" in store.keys("blobs/")


# -- refusals at the door


def test_a_body_that_is_sent_to_the_coordinator_is_refused_before_it_is_read(swarm: Swarm) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    path, body = f"/v1/submissions/{lease.lease_id}", b"x" * 500_000
    header, _ = sign_request(peer.claim("PUT", path, body), key=peer.key)
    where = urlsplit(swarm.url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
        head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 409 ")
    assert b"upload_first" in answer


def test_attack_another_nodes_lease_is_uploaded_for(swarm: Swarm, tmp_path: Path) -> None:
    victim, thief = swarm.peer(), swarm.peer()
    lease = victim.lease()
    assert announce(thief, lease.lease_id, b"poison").code == "foreign_lease"
    put(announce(victim, lease.lease_id, b"mine"), b"mine", tmp_path / "body")
    assert submit(thief, lease.lease_id, b"mine").code == "foreign_lease"
    assert submit(victim, lease.lease_id, b"mine").status == 202


def test_an_upload_that_is_signed_for_as_another_slots_is_refused(swarm: Swarm, tmp_path: Path) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    put(announce(peer, lease.lease_id, b"mine"), b"mine", tmp_path / "body")
    own = slot_name(lease)
    other = msgspec.structs.replace(own, slot=own.slot + 1)
    assert submit(peer, lease.lease_id, b"mine", slot=other).code == "wrong_slot"
    assert submit(peer, lease.lease_id, b"mine", slot=own).status == 202


@pytest.mark.parametrize(
    "changes", [{"sha256": "a" * 64}, {"body": "b" * 64}, {"body_bytes": 5}], ids=lambda changes: next(iter(changes))
)
def test_attack_many_bodies_for_one_lease_fill_the_store(swarm: Swarm, changes: dict[str, object]) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    first = announce(peer, lease.lease_id, b"body")
    assert announce(peer, lease.lease_id, b"body", **changes).code == "body_mismatch"
    again = announce(peer, lease.lease_id, b"body")
    first, again = (decode(UploadReply, reply.body, max_bytes=2**16).url for reply in (first, again))
    assert first.split("?")[0] == again.split("?")[0]


def test_a_body_above_the_runs_limit_gets_no_offer(swarm: Swarm) -> None:
    peer = swarm.peer()
    size = swarm.home.spec.limits.max_submission_bytes + 1
    assert announce(peer, peer.lease().lease_id, b"x", body_bytes=size).code == "oversized_body"


@pytest.mark.parametrize("announced", [True, False])
def test_what_was_not_uploaded_is_not_submitted(swarm: Swarm, announced: bool) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    if announced:
        assert announce(peer, lease.lease_id, b"never sent").status == 200
    reply = submit(peer, lease.lease_id, b"never sent")
    assert (reply.status, reply.code) == (409, "upload_first")


@pytest.mark.parametrize("other", [b"other bytes, as long", b"shorter", b"a bit longer than what was announced"])
def test_attack_other_bytes_than_were_announced_are_uploaded(
    swarm: Swarm, store: Store, tmp_path: Path, other: bytes
) -> None:
    peer = swarm.peer()
    lease, body = peer.lease(), b"what was announced.."
    with pytest.raises(StoreUnavailable, match=r"HTTP 40[03]"):
        put(announce(peer, lease.lease_id, body), other, tmp_path / "body")
    assert submit(peer, lease.lease_id, body).code == "upload_first"
    assert submit(peer, lease.lease_id, other).code == "body_mismatch"
    assert store.keys(f"uploads/{lease.lease_id}") == []


def test_attack_a_submission_claims_another_body_than_was_announced(swarm: Swarm, tmp_path: Path) -> None:
    peer = swarm.peer()
    lease, body = peer.lease(), b"announced"
    put(announce(peer, lease.lease_id, body), body, tmp_path / "body")
    for changes in ({"body_digest": "c" * 64}, {"body_bytes": 10}):
        assert submit(peer, lease.lease_id, body, **changes).code == "body_mismatch"
    assert submit(peer, lease.lease_id, body).status == 202


def test_a_submission_is_taken_once_and_a_second_one_names_it(swarm: Swarm, tmp_path: Path) -> None:
    """So a worker whose answer was lost, at whatever step, finds its receipt."""
    peer = swarm.peer()
    lease, body = peer.lease(), b"once is enough"
    taken = json.loads(uploaded(peer, lease.lease_id, body, tmp_path / "body").body)["submission"]
    for reply in (submit(peer, lease.lease_id, body), announce(peer, lease.lease_id, body)):
        assert (reply.code, json.loads(reply.body)["submission"]) == ("duplicate_submission", taken)


def test_what_is_refused_leaves_no_request_behind(swarm: Swarm, store: Store, tmp_path: Path) -> None:
    first, second = swarm.peer(), swarm.peer()
    lease = first.lease()
    body = write_rollouts(swarm.honest(lease))
    assert swarm.verdict(first, uploaded(first, lease.lease_id, body, tmp_path / "a")).outcome is Outcome.ADMITTED
    before = store.keys("blobs/")
    assert uploaded(second, second.lease().lease_id, body, tmp_path / "b").code == "duplicate_submission"
    assert store.keys("blobs/") == before


@pytest.mark.parametrize("path", ["uploads/{}", "submissions/{}/" + "a" * 64, "submissions/{}/x"])
def test_a_lease_that_nobody_has_is_refused_by_every_step(swarm: Swarm, path: str) -> None:
    peer = swarm.peer()
    method = "POST" if path.startswith("uploads") else "PUT"
    body = encode(UploadRequest(body="a" * 64, body_bytes=1, sha256="a" * 64)) if method == "POST" else b""
    assert peer.signed(method, "/v1/" + path.format("0" * 64), body).code == "unknown_lease"


# -- one signature for two files


def test_attack_signing_for_two_files_is_a_rejection_that_everybody_can_check(
    swarm: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = swarm.peer()
    body = b"not the file of that digest"
    claimed = digest(b"another file")
    receipt = swarm.verdict(peer, uploaded(peer, peer.lease().lease_id, body, tmp_path / "body", body=claimed))
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.WRONG_BODY)
    entry = entry_of(swarm, receipt.log_index)
    assert entry.body == digest(body)
    assert peer.send("GET", f"/v1/blobs/{entry.body}").body == body
    report = audited(swarm, tmp_path / "auditor", capsys)
    assert (report["problems"], report["outcome"]) == ([], "agree")
    (checked,) = [one for one in report["verdicts"] if one["log_index"] == receipt.log_index]
    assert checked["derived"] == {"outcome": "rejected", "reason": "wrong_body"}


def test_attack_signing_for_an_honest_file_as_another_one_does_not_bar_who_comes_after(
    swarm: Swarm, tmp_path: Path
) -> None:
    """Honest nodes send the same bytes for a slot: a file that was rejected for a lie about it must stay good."""
    liar, honest = swarm.peer(), swarm.peer()
    lease = liar.lease()
    body = write_rollouts(swarm.honest(lease))
    receipt = swarm.verdict(liar, uploaded(liar, lease.lease_id, body, tmp_path / "a", body="d" * 64))
    assert receipt.reason is Reason.WRONG_BODY
    while True:
        again = honest.lease()
        if again.slot == lease.slot:
            break
        mine = write_rollouts(swarm.honest(again))
        swarm.verdict(honest, uploaded(honest, again.lease_id, mine, tmp_path / "b"))
    assert swarm.verdict(honest, uploaded(honest, again.lease_id, body, tmp_path / "c")).outcome is Outcome.ADMITTED


# -- a store that fails


async def submit_as_a_worker(swarm: Swarm, peer: Peer, lease: Lease, path: Path, *, patience: float = 30.0) -> str:
    async with CoordinatorClient(swarm.url, run_id=swarm.home.run_id, key=peer.key, backoff=QUICK) as client:
        return await client.submit(lease, path, patience_seconds=patience)


def once(fault: str, method: str, prefix: str) -> object:
    """A fault that happens to the first request of its kind."""
    left = [fault]

    def decide(asked: str, key: str) -> str | None:
        return left.pop() if left and asked == method and key.startswith(prefix) else None

    return decide


@pytest.mark.parametrize(
    ("fault", "method", "prefix"),
    [
        ("away", "PUT", "uploads/"),
        ("silent", "PUT", "uploads/"),
        ("away", "HEAD", "uploads/"),
        ("silent", "HEAD", "uploads/"),
        ("away", "PUT", "blobs/"),
        ("silent", "PUT", "blobs/"),
    ],
)
def test_a_failure_at_any_step_costs_a_worker_a_retry_and_no_work(
    swarm: Swarm, store: Store, tmp_path: Path, *, fault: str, method: str, prefix: str
) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    path = tmp_path / "slot.rollouts"
    path.write_bytes(write_rollouts(swarm.honest(lease)))
    store.fault = once(fault, method, prefix)
    submission = asyncio.run(submit_as_a_worker(swarm, peer, lease, path))
    receipt = swarm.verdict(peer, Reply(202, json.dumps({"submission": submission}).encode()))
    assert receipt.outcome is Outcome.ADMITTED


def test_a_worker_whose_patience_ends_says_that_it_is_the_store(swarm: Swarm, store: Store, tmp_path: Path) -> None:
    peer = swarm.peer()
    path = tmp_path / "slot.rollouts"
    path.write_bytes(b"x")
    store.fault = lambda method, _key: "away" if method == "PUT" else None
    with pytest.raises(StoreUnavailable, match=r"The run's object store does not take the file \(HTTP 503\)"):
        asyncio.run(submit_as_a_worker(swarm, peer, peer.lease(), path, patience=1.0))


def test_the_coordinator_says_503_while_the_store_is_away_and_uses_nothing_up(
    swarm: Swarm, store: Store, tmp_path: Path
) -> None:
    peer = swarm.peer()
    lease, body = peer.lease(), b"patience"
    put(announce(peer, lease.lease_id, body), body, tmp_path / "body")
    store.fault = lambda _method, _key: "away"
    reply = submit(peer, lease.lease_id, body)
    assert (reply.status, reply.code) == (503, "unavailable")
    assert swarm.peer().ask(slots=1) is not None, "what needs no store goes on"
    assert peer.send("GET", f"/v1/blobs/{swarm.home.spec.digest}").status == 503
    store.fault = lambda _method, _key: None
    assert submit(peer, lease.lease_id, body).status == 202
    assert peer.send("GET", f"/v1/blobs/{swarm.home.spec.digest}").body == encode(swarm.home.spec)


@pytest.mark.system
def test_a_verifier_waits_for_the_store_and_blames_nobody(swarm: Swarm, store: Store, tmp_path: Path) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    body = write_rollouts(swarm.honest(lease))
    put(announce(peer, lease.lease_id, body), body, tmp_path / "body")
    store.fault = lambda method, _key: "away" if method == "GET" else None
    reply = submit(peer, lease.lease_id, body)
    submission = json.loads(reply.body)["submission"]
    time.sleep(4)
    with swarm.home.database.read() as connection:
        row = connection.execute(select(submissions).where(submissions.c.submission == submission)).one()
    assert row.outcome is None
    assert row.attempts <= 1, "that the store is away is no attempt"
    store.fault = lambda _method, _key: None
    assert swarm.verdict(peer, reply).outcome is Outcome.ADMITTED


@pytest.mark.system
def test_a_store_that_sends_corrupted_bytes_for_a_while_costs_no_work(
    swarm: Swarm, store: Store, tmp_path: Path
) -> None:
    """As with an answer of 500: neither is the body of one deferred for the others', nor is an attempt used up."""
    peer, other = swarm.peer(), swarm.peer()
    lease, good = peer.lease(), other.lease()
    body, good_body = (write_rollouts(swarm.honest(each)) for each in (lease, good))
    path = f"uploads/{lease.lease_id}"
    store.fault = lambda method, key: "corrupt" if method == "GET" and key.startswith(path) else None
    reply = uploaded(peer, lease.lease_id, body, tmp_path / "body")
    assert swarm.verdict(other, uploaded(other, good.lease_id, good_body, tmp_path / "good")).outcome == "admitted"
    until(lambda: sum(call.method == "GET" and call.key.startswith(path) for call in list(store.calls)) > 6)
    with swarm.home.database.read() as connection:
        row = connection.execute(select(submissions).where(submissions.c.lease == lease.lease_id)).one()
    assert row.outcome is None
    assert row.attempts <= 1
    store.fault = lambda _method, _key: None
    assert swarm.verdict(peer, reply).outcome is Outcome.ADMITTED


def test_evidence_that_the_store_sends_corrupted_ends_before_its_end(swarm: Swarm, store: Store) -> None:
    """An auditor who got all of it would call the run a forger; one whose answer was cut off asks again."""
    name = swarm.home.spec.digest
    peer = swarm.peer(registered=False)
    store.fault = lambda method, _key: "corrupt" if method == "GET" else None
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        peer.send("GET", f"/v1/blobs/{name}")
    store.fault = lambda _method, _key: None
    assert peer.send("GET", f"/v1/blobs/{name}").body == encode(swarm.home.spec)


def test_a_trainer_waits_for_a_store_that_sends_a_group_corrupted(swarm: Swarm, store: Store, tmp_path: Path) -> None:
    """What it waits for is an OSError, as a full disk is; a verifier is asked once the group is damaged for good."""
    peer = swarm.peer()
    lease = peer.lease()
    reply = uploaded(peer, lease.lease_id, write_rollouts(swarm.honest(lease)), tmp_path / "body")
    receipt = swarm.verdict(peer, reply)
    with swarm.home.database.write() as connection:
        connection.execute(update(groups).where(groups.c.submission == receipt.submission).values(step=7))
        blob = connection.execute(select(groups.c.blob).where(groups.c.step == 7)).scalar_one()
    store.fault = lambda method, key: "corrupt" if (method, key) == ("GET", f"blobs/{blob}") else None
    with pytest.raises(CorruptRead):
        read_batch(swarm.home, 7, stop=threading.Event())
    store.fault = lambda _method, _key: None
    (group,) = read_batch(swarm.home, 7, stop=threading.Event()) or []
    assert encode_group(msgspec.structs.replace(group, environment=None)) == swarm.home.blobs.get(blob, max_bytes=2**20)
    with swarm.home.database.write() as connection:
        connection.execute(update(groups).where(groups.c.step == 7).values(step=None))


def test_a_store_that_swapped_what_was_uploaded_convicts_nobody_and_the_slot_is_done_again(
    swarm: Swarm, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s3_blobs, "CORRUPT_SECONDS", 1.0)
    peer = swarm.peer()
    lease = peer.lease()
    body = write_rollouts(swarm.honest(lease))
    put(announce(peer, lease.lease_id, body), body, tmp_path / "body")
    key = f"uploads/{lease.lease_id}/{sha256_of(body)}"
    store.fault = lambda method, asked: "away" if (method, asked) == ("GET", key) else None
    reply = submit(peer, lease.lease_id, body)
    store.replace(key, body[::-1])
    store.fault = lambda _method, _key: None
    receipt = swarm.verdict(peer, reply)
    assert (receipt.outcome, receipt.reason) == (Outcome.INDETERMINATE, Reason.VERIFIER_FAILED)
    said = [one.getMessage() for one in caplog.records if "cannot be decided" in one.getMessage()]
    assert said
    assert all(lease.lease_id in each for each in said)
    assert not any(one.exc_info for one in caplog.records if one.name.startswith("coordinator.verifier"))
    again = peer.lease()
    # On a slow machine slots that others let lapse come first, and a node gets only so many.
    while again.slot != lease.slot:
        peer = swarm.peer()
        again = peer.lease()
    receipt = swarm.verdict(peer, uploaded(peer, again.lease_id, body, tmp_path / "again"))
    assert receipt.outcome is Outcome.ADMITTED, "the same file, which honest work is for a slot, is taken again"


# -- what comes to nothing


def aged(swarm: Swarm, lease_id: str) -> None:
    with swarm.home.database.write() as connection:
        row = update(uploads_table).where(uploads_table.c.lease == lease_id)
        connection.execute(row.values(asked_at=uploads_table.c.asked_at - SWEPT_AFTER_SECONDS - 1))


def test_an_upload_for_a_lease_that_ended_is_refused_and_swept(swarm: Swarm, store: Store, tmp_path: Path) -> None:
    peer = swarm.peer()
    lease, body = peer.lease(), b"too late"
    reply = announce(peer, lease.lease_id, body)
    assert peer.signed("POST", f"/v1/leases/{lease.lease_id}/return", b"").status == 200
    put(reply, body, tmp_path / "body")
    assert submit(peer, lease.lease_id, body).code == "expired_lease"
    assert announce(peer, lease.lease_id, body).code == "expired_lease"
    home = swarm.home
    sweep(home.database, home.blobs, now=time.time())
    assert store.keys(f"uploads/{lease.lease_id}"), "its offer may still be taken up"
    aged(swarm, lease.lease_id)
    assert sweep(home.database, home.blobs, now=time.time()) == 1
    assert store.keys(f"uploads/{lease.lease_id}") == []
    assert sweep(home.database, home.blobs, now=time.time()) == 0


def test_what_may_still_be_submitted_or_sent_is_not_swept(swarm: Swarm, store: Store, tmp_path: Path) -> None:
    """A worker that has a slot for hours, and found the coordinator away, would have to upload it all again."""
    peer = swarm.peer()
    lease, body = peer.lease(), b"of a long slot"
    put(announce(peer, lease.lease_id, body), body, tmp_path / "body")
    aged(swarm, lease.lease_id)
    for left, stays in ((60.0, True), (60.0 - OFFER_SECONDS, True), (-1.0 - OFFER_SECONDS, False)):
        now = time.time()
        with swarm.home.database.write() as connection:
            connection.execute(update(leases).where(leases.c.lease == lease.lease_id).values(expires_at=now + left))
        sweep(swarm.home.database, swarm.home.blobs, now=now)
        assert bool(store.keys(f"uploads/{lease.lease_id}")) == stays, left


def test_what_waits_for_a_verdict_is_never_swept(swarm: Swarm, store: Store, tmp_path: Path) -> None:
    """Verifiers may be behind by more than an hour."""
    peer = swarm.peer()
    lease = peer.lease()
    body = write_rollouts(swarm.honest(lease))
    store.fault = lambda method, _key: "away" if method == "GET" else None
    reply = uploaded(peer, lease.lease_id, body, tmp_path / "body")
    aged(swarm, lease.lease_id)
    with swarm.home.database.write() as connection:
        connection.execute(update(leases).where(leases.c.lease == lease.lease_id).values(expires_at=0.0))
    sweep(swarm.home.database, swarm.home.blobs, now=time.time())
    assert store.keys(f"uploads/{lease.lease_id}")
    store.fault = lambda _method, _key: None
    assert swarm.verdict(peer, reply).outcome is Outcome.ADMITTED
    until(lambda: store.keys(f"uploads/{lease.lease_id}") == [])


def test_what_a_killed_verifier_left_is_swept(swarm: Swarm, store: Store, tmp_path: Path) -> None:
    peer = swarm.peer()
    lease, body = peer.lease(), b"judged, and not removed"
    mine = f"uploads/{lease.lease_id}"  # what an earlier test left may be removed just now
    store.fault = lambda method, key: "away" if method == "DELETE" and key.startswith(mine) else None
    swarm.verdict(peer, uploaded(peer, lease.lease_id, body, tmp_path / "body"))
    until(lambda: sum(c.method == "DELETE" and c.key.startswith(mine) for c in list(store.calls)) >= s3_blobs.ATTEMPTS)
    store.fault = lambda _method, _key: None
    assert store.keys(mine)
    aged(swarm, lease.lease_id)
    with swarm.home.database.read() as connection:
        states = connection.execute(select(submissions.c.state).where(submissions.c.lease == lease.lease_id))
        assert states.scalars().all() == [SubmissionState.DONE]
    assert sweep(swarm.home.database, swarm.home.blobs, now=time.time()) == 1
    assert store.keys(mine) == []


def test_expired_evidence_leaves_the_bucket_although_it_was_away_and_others_files_stay(
    swarm: Swarm, store: Store, tmp_path: Path
) -> None:
    """An operator pays for the bucket, and what is marked as removed would never be looked at again."""
    peer, other, home = swarm.peer(), swarm.peer(), swarm.home
    lease = peer.lease()
    mine, body = f"uploads/{lease.lease_id}", b"junk of long ago"
    store.fault = lambda method, key: "away" if method == "DELETE" and key.startswith(mine) else None
    name = swarm.verdict(peer, uploaded(peer, lease.lease_id, body, tmp_path / "body")).submission
    until(lambda: sum(c.method == "DELETE" and c.key.startswith(mine) for c in list(store.calls)) >= s3_blobs.ATTEMPTS)
    waiting = other.lease()
    put(announce(other, waiting.lease_id, b"of now"), b"of now", tmp_path / "other")
    files = {f"blobs/{digest(body)}"}
    before, now = set(store.keys()), time.time() + 1

    store.fault = lambda method, _key: "away" if method == "DELETE" else None
    with pytest.raises(StoreAway):
        remove_expired(home.database, home.blobs, spec=home.spec, before=now)
    assert set(store.keys()) == before
    store.fault = lambda _method, _key: None
    remove_expired(home.database, home.blobs, spec=home.spec, before=now)
    assert files <= before - set(store.keys())
    for removed in (name, digest(body)):
        reply = peer.send("GET", f"/v1/blobs/{removed}")
        assert (reply.status, reply.code) == (410, "evidence_expired")
    assert peer.send("GET", f"/v1/blobs/{home.spec.digest}").body == encode(home.spec)
    aged(swarm, lease.lease_id)
    sweep(home.database, home.blobs, now=time.time())
    assert store.keys(mine) == [], "the upload behind it, which its verifier could not remove"
    assert submit(other, waiting.lease_id, b"of now").status == 202


def test_a_worker_that_remembers_a_store_goes_on_without_one(tmp_path: Path, tiny_policy_path: Path) -> None:
    with running(tmp_path / "run", tiny_policy_path) as swarm:
        peer = swarm.peer()
        path = tmp_path / "slot"
        path.write_bytes(b"x")

        async def remembering() -> str:
            async with CoordinatorClient(swarm.url, run_id=swarm.home.run_id, key=peer.key, backoff=QUICK) as client:
                client._submitting._by_store = True
                return await client.submit(peer.lease(), path)

        assert len(asyncio.run(remembering())) == 64


def test_a_refusal_that_no_retry_heals_ends_the_call(swarm: Swarm, tmp_path: Path) -> None:
    peer = swarm.peer()
    lease = msgspec.structs.replace(peer.lease(), lease_id="0" * 64)
    path = tmp_path / "slot"
    path.write_bytes(b"x")
    with pytest.raises(Refused) as refused:
        asyncio.run(submit_as_a_worker(swarm, peer, lease, path))
    assert refused.value.code == Reason.UNKNOWN_LEASE
