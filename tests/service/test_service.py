"""What the coordinator serves to people and to auditors, and that nobody can make it stop serving."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from announced_relays import probe
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dated_origin import DatedOrigin
from prometheus_client.parser import text_string_to_metric_families
from swarm import Peer, Swarm, publish, running, serve, small_spec, verifying
from waiting import SECONDS, until

from coordinator.http.rate_limits import AddressLimiter
from coordinator.run.home import create_home
from coordinator.run.relays import RELAY_SECONDS
from coordinator.run.service import Coordinator
from coordinator.verifier import policy_cache
from node.protocol import merkle
from node.protocol.admission import Outcome
from node.protocol.checkpoints import Checkpoint, open_checkpoint
from node.protocol.messages import (
    LogEntry,
    RelayAnnouncement,
    VerdictEntry,
)
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import sign_request
from node.protocol.run import open_descriptor
from node.submission.writer import write_rollouts
from shardcast import Origin, OriginServer
from shardcast.errors import LocalFault
from shardcast.wire import decode, digest, encode


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Swarm]:
    with running(tmp_path_factory.mktemp("run"), tiny_policy_path) as swarm:
        peer = swarm.peer()
        lease = peer.lease()
        swarm.judge(peer, swarm.honest(lease), lease)
        other = peer.lease()
        swarm.verdict(peer, peer.submit(other.lease_id, b"not a table"))
        yield swarm


def checkpoint_of(swarm: Swarm) -> Checkpoint:
    answer = swarm.peer(registered=False).send("GET", "/v1/log/checkpoint")
    return open_checkpoint(answer.body, run_id=swarm.home.run_id, signer=swarm.home.public_key)


def test_the_descriptor_is_the_runs(swarm: Swarm) -> None:
    answer = swarm.peer(registered=False).send("GET", "/v1/run")
    descriptor, key = open_descriptor(answer.body, run_id=swarm.home.run_id, now=time.time())
    assert descriptor.spec == swarm.home.spec
    assert key == swarm.home.public_key


def test_a_receipt_is_provably_in_the_log(swarm: Swarm) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    body = write_rollouts(swarm.honest(lease))
    receipt = swarm.verdict(peer, peer.submit(lease.lease_id, body))
    checkpoint = checkpoint_of(swarm)
    where = f"/v1/log/entries?start={receipt.log_index}&end={receipt.log_index + 1}"
    (leaf,) = peer.send("GET", where).body.splitlines()
    assert merkle.leaf_hash(leaf).hex() == receipt.leaf_hash
    path = f"/v1/log/inclusion?index={receipt.log_index}&size={checkpoint.size}"
    hashes = [bytes.fromhex(text) for text in json.loads(peer.send("GET", path).body)["hashes"]]
    merkle.verify_inclusion(
        merkle.leaf_hash(leaf),
        index=receipt.log_index,
        size=checkpoint.size,
        proof=hashes,
        root_hash=checkpoint.root,
    )
    entry = decode(LogEntry, leaf, max_bytes=2**20)  # type: ignore[arg-type]
    assert isinstance(entry, VerdictEntry)
    assert peer.send("GET", f"/v1/blobs/{entry.body}").body == body
    assert digest(peer.send("GET", f"/v1/blobs/{entry.request}").body) == entry.submission


def test_the_log_extends_itself(swarm: Swarm) -> None:
    before = checkpoint_of(swarm)
    peer = swarm.peer()
    swarm.verdict(peer, peer.submit(peer.lease().lease_id, b"garbage to be logged"))
    after = checkpoint_of(swarm)
    assert after.size > before.size
    answer = peer.send("GET", f"/v1/log/consistency?first={before.size}&second={after.size}")
    merkle.verify_consistency(
        first=before.size,
        first_root=before.root,
        second=after.size,
        second_root=after.root,
        proof=[bytes.fromhex(text) for text in json.loads(answer.body)["hashes"]],
    )


def test_the_status_says_who_did_what(swarm: Swarm) -> None:
    status = json.loads(swarm.peer(registered=False).send("GET", "/v1/status").body)
    first = status["nodes"][0]
    assert (first["admitted"], first["rejected"]) == (1, 1)
    assert first["reasons"] == {"malformed_submission": 1}
    assert status["head_version"] == 0
    assert not status["finished"]


def test_prometheus_can_read_the_metrics(swarm: Swarm) -> None:
    text = swarm.peer(registered=False).send("GET", "/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    verdicts = {tuple(sample.labels.values()): sample.value for sample in families["swarmproof_verdicts"].samples}
    assert verdicts[("admitted", "")] >= 1
    assert verdicts[("rejected", "malformed_submission")] >= 1
    assert families["swarmproof_policy_version"].samples[0].value == 0
    assert any(sample.labels.get("route") == "/v1/leases" for sample in families["swarmproof_request_seconds"].samples)


def test_a_relay_is_told_about_once_it_serves_until_it_is_silent(swarm: Swarm) -> None:
    peer = swarm.peer(registered=False)
    proxy = swarm.origin_url.replace("127.0.0.1", "localhost")  # serves what the origin does, under another URL
    for url in (proxy, "http://127.0.0.1:9"):
        assert peer.signed("POST", "/v1/relays", encode(RelayAnnouncement(url=url))).status == 200
        assert url not in json.loads(peer.send("GET", "/v1/relays").body)["relays"], "nobody has seen it serve"
        probe(swarm.home, url)
        told = json.loads(peer.send("GET", "/v1/relays").body)["relays"]
        assert (url in told) == (url == proxy)
    assert peer.signed("POST", "/v1/relays", encode(RelayAnnouncement(url=proxy))).status == 200
    assert proxy not in json.loads(peer.send("GET", "/v1/relays").body)["relays"], "another URL begins anew"
    probe(swarm.home, proxy)
    coordinator = Coordinator(swarm.home, key=Ed25519PrivateKey.generate())
    assert proxy in coordinator.relays.urls(now=time.time())
    assert proxy not in coordinator.relays.urls(now=time.time() + RELAY_SECONDS + 1)


@pytest.mark.parametrize(
    "url", ["ftp://h", "http://user:secret@h", "http://h/?q", "http://h\\n", "javascript:x", "http://"]
)
def test_a_relay_that_is_no_plain_web_address_is_refused(swarm: Swarm, url: str) -> None:
    body = json.dumps({"url": url, "received": []}, separators=(",", ":")).encode()
    assert swarm.peer().signed("POST", "/v1/relays", body).code == "bad_request"


@pytest.mark.system
def test_slow_loris_does_not_keep_others_out(swarm: Swarm) -> None:
    """A hundred connections that never finish their request, and half of them never their body."""
    where = urlsplit(swarm.url)
    slow = swarm.peer()
    with contextlib.ExitStack() as stack:
        for number in range(100):
            connection = stack.enter_context(socket.create_connection((where.hostname, where.port), timeout=60))
            if number % 2:
                connection.sendall(b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nContent-Le")
            else:
                header, _ = sign_request(slow.claim("POST", "/v1/leases", b"x" * 100), key=slow.key)
                head = f"POST /v1/leases HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\nContent-Length: 100\r\n\r\n"
                connection.sendall(head.encode() + b"x")
        started = time.monotonic()
        peer = swarm.peer()
        lease = peer.lease()
        assert swarm.judge(peer, swarm.honest(lease), lease).outcome is Outcome.ADMITTED
        assert time.monotonic() - started < 30


def test_a_flood_of_identities_from_one_address_is_slowed() -> None:
    limiter = AddressLimiter(per_minute=60)
    for _ in range(60):
        limiter.check("192.0.2.1", now=100.0)
    with pytest.raises(Refusal) as refusal:
        limiter.check("192.0.2.1", now=100.5)
    assert refusal.value.reason is Reason.TOO_MANY_REQUESTS
    limiter.check("192.0.2.2", now=100.5)
    limiter.check("192.0.2.1", now=102.0)


def test_the_door_slows_a_flood_of_registrations(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    home = create_home(tmp_path, public_key=key.public_key().public_bytes_raw(), spec=small_spec())

    with serve(Coordinator(home, key=key), registrations_per_minute=20) as url:
        replies = [Peer(url, home.run_id).register() for _ in range(30)]
    assert replies[0].status == 200
    assert (replies[-1].status, replies[-1].code) == (429, "too_many_requests")
    home.database.close()


def started_again(origin: Origin, port: int) -> OriginServer:
    """A server at the port of an earlier one, which somebody's outgoing connection may have taken for a moment."""
    deadline = time.monotonic() + SECONDS
    while True:
        server = OriginServer(origin, port=port)
        try:
            server.start()
        except LocalFault:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return server


def test_a_verifier_without_the_policy_waits_and_blames_nobody(
    tmp_path: Path, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier's only source is away while submissions arrive; then it comes back."""
    monkeypatch.setattr(policy_cache, "PATIENCE_SECONDS", 0.5)
    with running(tmp_path / "a", tiny_policy_path) as swarm:
        peer = swarm.peer()
        lease = peer.lease()
        body = write_rollouts(swarm.honest(lease))
    key = Ed25519PrivateKey.generate()
    home = create_home(tmp_path / "b", public_key=key.public_key().public_bytes_raw(), spec=small_spec())
    origin = DatedOrigin(tmp_path / "origin", key, home.run_id)
    server = OriginServer(origin)
    port = server.start()
    publish(home, origin, server, tiny_policy_path, version=0)
    server.stop()
    source = f"http://127.0.0.1:{port}"

    with serve(Coordinator(home, key=key)) as url, verifying(home, source=source, state=tmp_path / "verifier"):
        peer = Peer(url, home.run_id)
        peer.register()
        reply = peer.submit(peer.lease().lease_id, body)
        submission = json.loads(reply.body)["submission"]
        assert peer.send("GET", f"/v1/receipts/{submission}?wait=1").status == 202
        again = started_again(origin, port)
        until(lambda: peer.send("GET", f"/v1/receipts/{submission}?wait=5").status == 200)  # the policy can be had
        again.stop()
    origin.close()
    home.database.close()


def test_made_up_methods_do_not_fill_the_metrics(swarm: Swarm) -> None:
    where = urlsplit(swarm.url)
    for number in range(20):
        with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
            connection.sendall(f"M{number} /v1/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            connection.recv(4096)
    assert b'method="M' not in swarm.peer(registered=False).send("GET", "/metrics").body


def test_a_burst_of_status_requests_is_answered(swarm: Swarm) -> None:
    """A request that needed two connections of the pool could wait for ever on others that do, too."""
    peer = swarm.peer(registered=False)
    with ThreadPoolExecutor(80) as pool:
        replies = list(pool.map(lambda _: peer.send("GET", "/v1/status").status, range(160)))
    assert replies == [200] * 160
    assert peer.send("GET", "/health").status == 200
