"""More requests than a coordinator can answer: those are turned away first that cost nobody his work."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from actors import Actors, spec_of
from prepared_replies import RUN_KEY
from sqlalchemy import select
from swarm import INSTANCE, Peer, Reply, running, serve, worker_thread
from waiting import until

from coordinator.http import load_shedding, service, signed_requests
from coordinator.http.connections import ConnectionLimits
from coordinator.http.load_shedding import RequestClass, class_of
from coordinator.http.rate_limits import TooManyRequests
from coordinator.http.write_queue import ReadQueue
from coordinator.run.home import create_home
from coordinator.run.service import Coordinator
from coordinator.storage.schema import submissions
from node.protocol import endpoints
from node.protocol.endpoints import Endpoint
from node.protocol.messages import LeaseRequest, SubmissionReply
from shardcast.wire import decode, encode

T = TypeVar("T")
LIMITS = {kind: limit for limit, kind in enumerate(RequestClass, 1)}


def test_what_costs_nobody_his_work_is_turned_away_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an upload that was is taken the next time."""
    queues = list[Sized]()
    shedder = load_shedding.LoadShedder
    monkeypatch.setattr(load_shedding, "MOST_WAITING", LIMITS)
    monkeypatch.setattr(service, "LoadShedder", lambda writes: queues.append(writes) or shedder(writes))
    home = create_home(tmp_path, public_key=RUN_KEY.public_key().public_bytes_raw(), spec=spec_of())
    Actors(home).publish(0)
    with serve(Coordinator(home, key=RUN_KEY)) as url, ThreadPoolExecutor(4) as threads:
        one, other, new, late = (Peer(url, home.run_id) for _ in range(4))
        for peer in (one, other):
            assert peer.register().status == 200
        leased = [(peer, peer.lease().lease_id) for peer in (one, other)]
        asks: dict[RequestClass, list[Callable[[], Reply]]] = {
            RequestClass.JOIN: [new.register, late.register],
            RequestClass.WORK: [lambda: ask(one), lambda: ask(other)],
            RequestClass.DELIVERY: [
                lambda peer=peer, lease=lease: peer.submit(lease, peer.node.encode()) for peer, lease in leased
            ],
        }
        waiting = []
        with home.database.write():  # holds up everybody else's
            waiting.append(threads.submit(Peer(url, home.run_id).register))
            until(lambda: len(queues[0]) == 1)
            assert refused_for(url, "/v1/status") == "5"
            for number, (first, second) in enumerate(asks.values(), 2):
                waiting.append(threads.submit(first))
                until(lambda number=number: len(queues[0]) == number)
                assert second().status == 429
                assert refused_for(url, "/v1/status") == "5"
            assert one.send("GET", "/health").status == 200
            # Else every page that is open would say that the run has stopped.
            assert one.send("GET", "/health-line").status == 200
        assert [answer.result().status for answer in waiting] == [200, 200, 200, 202]
        assert asks[RequestClass.DELIVERY][1]().status == 202
    home.database.close()


def test_a_worker_whose_upload_was_turned_away_hands_in_the_same_group_later(
    tmp_path: Path, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal would cost it a slot's work, just when there is most to do."""
    turned_away = list[str]()

    class Overloaded(load_shedding.LoadShedder):
        def check(self, method: str, path: str) -> None:
            if "/submissions/" in path and len(turned_away) < 2:
                turned_away.append(path.rpartition("/")[2])
                raise TooManyRequests("Too many write.", retry_after_seconds=1)
            super().check(method, path)

    monkeypatch.setattr(service, "LoadShedder", Overloaded)
    with running(tmp_path / "run", tiny_policy_path) as swarm:
        with worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker") as status:
            until(lambda: int(str(status().get("admitted", 0))) >= 2)
        with swarm.home.database.read() as connection:
            handed_in = set(connection.execute(select(submissions.c.lease)).scalars())
    assert len(turned_away) == 2
    assert set(turned_away) <= handed_in
    assert status()["rejected"] == 0


@pytest.mark.parametrize("path", ["/v1/submissions/{}", "/v1/leases/{}/return", "/v1/leases"])
def test_attack_requests_of_keys_that_nobody_registered_deny_leases_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Each would wait for a write, as a delivery counts as leased work, and be refused after that."""
    queues = list[Sized]()
    shedder = load_shedding.LoadShedder
    monkeypatch.setattr(load_shedding, "MOST_WAITING", LIMITS)
    monkeypatch.setattr(signed_requests, "STRANGERS_WAITING", 1)
    monkeypatch.setattr(service, "LoadShedder", lambda writes: queues.append(writes) or shedder(writes))
    home = create_home(tmp_path, public_key=RUN_KEY.public_key().public_bytes_raw(), spec=spec_of())
    Actors(home).publish(0)
    with serve(Coordinator(home, key=RUN_KEY)) as url, ThreadPoolExecutor(8) as threads:
        worker, idle = Peer(url, home.run_id), Peer(url, home.run_id)
        assert {worker.register().status, idle.register().status} == {200}
        lease = worker.lease().lease_id
        body = encode(LeaseRequest(held_versions=(), slots=1, instance=INSTANCE)) if path.endswith("leases") else b""
        method = "PUT" if "submissions" in path else "POST"
        with home.database.write():  # holds up everybody else's
            honest = [threads.submit(Peer(url, home.run_id).register)]
            until(lambda: len(queues[0]) == 1)
            strangers = [
                threads.submit(Peer(url, home.run_id).signed, method, path.format(lease), body)
                for _ in range(LIMITS[RequestClass.WORK])
            ]
            assert {one.result(timeout=60).code for one in strangers} <= {"unknown_identity"}
            assert idle.submit(lease, b"").code == "foreign_lease"  # nor does a key that anybody may register
            honest.append(threads.submit(ask, worker))
            until(lambda: len(queues[0]) == 2)
        assert [one.result(timeout=60).status for one in honest] == [200, 200]
    home.database.close()


def test_leases_that_were_let_in_together_leave_the_uploads_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage all come at once, and each finds a short queue."""
    writes, reads, looked_up = list[Sized](), list[object](), threading.Event()
    shedder = load_shedding.LoadShedder

    class LateReads(ReadQueue):
        async def run(self, job: Callable[[], T], *, is_last: bool = False) -> T:
            reads.append(job)
            await asyncio.to_thread(looked_up.wait, 60)
            return await super().run(job, is_last=is_last)

    monkeypatch.setattr(load_shedding, "MOST_WAITING", LIMITS)
    monkeypatch.setattr(signed_requests, "STRANGERS_WAITING", 1)
    monkeypatch.setattr(service, "LoadShedder", lambda queue: writes.append(queue) or shedder(queue))
    monkeypatch.setattr(service, "ReadQueue", LateReads)
    home = create_home(tmp_path, public_key=RUN_KEY.public_key().public_bytes_raw(), spec=spec_of())
    Actors(home).publish(0)
    with serve(Coordinator(home, key=RUN_KEY)) as url, ThreadPoolExecutor(8) as threads:
        peers = [Peer(url, home.run_id) for _ in range(4)]
        assert {peer.register().status for peer in peers} == {200}
        *idle, worker = peers
        lease = worker.lease().lease_id
        with home.database.write():  # holds up everybody else's
            threads.submit(Peer(url, home.run_id).register)
            until(lambda: len(writes[0]) == 1)
            leases = [threads.submit(ask, peer) for peer in idle]
            until(lambda: len(reads) == len(idle))
            looked_up.set()
            until(lambda: len(writes[0]) == LIMITS[RequestClass.WORK])
            delivery = threads.submit(worker.submit, lease, b"a group")
            until(lambda: len(writes[0]) == LIMITS[RequestClass.DELIVERY])
        assert sorted(one.result(timeout=60).status for one in leases) == [200, 200, 429]
        assert delivery.result(timeout=60).status == 202
    home.database.close()


def test_attack_long_polls_for_a_verdict_leave_connections_to_everybody_else(tmp_path: Path) -> None:
    """A submission's id is public, and a connection on which an answer is due is never ended to make room."""
    home = create_home(tmp_path, public_key=RUN_KEY.public_key().public_bytes_raw(), spec=spec_of())
    Actors(home).publish(0)
    limits = ConnectionLimits(connections=8)
    with serve(Coordinator(home, key=RUN_KEY), connections=limits) as url, ExitStack() as polls:
        worker = Peer(url, home.run_id)
        assert worker.register().status == 200
        submitted = worker.submit(worker.lease().lease_id, b"no group")
        submission = decode(SubmissionReply, submitted.body, max_bytes=2**20).submission
        path = f"/v1/receipts/{submission}"
        for _ in range(4):
            poll = polls.enter_context(closing(HTTPConnection(url.removeprefix("http://"))))
            poll.request("GET", f"{path}?wait=20")
        refused = until(lambda: refusal_of(worker.send("GET", f"{path}?wait=0.01")))
        assert refused == "too_many_requests"
        assert worker.send("GET", path).status == 202, "who does not wait is answered"
        assert ask(worker).status == 200
        polls.close()
        until(lambda: worker.send("GET", f"{path}?wait=0.01").status == 202)
    home.database.close()


@pytest.mark.parametrize(
    ("head", "body", "keeps"),
    [
        ("GET /v1/status", None, True),
        ("POST /v1/leases", b"12345", True),
        ("POST /v1/leases", b"123", False),
        ("PUT /v1/submissions/x", b"", False),
        ("POST /v1/nodes", b"12345", False),
    ],
    ids=["no body", "whole body", "attack half a body", "body to come", "new node"],
)
def test_who_is_shed_keeps_the_connection_unless_a_body_is_unread_or_the_retry_is_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, body: bytes | None, keeps: bool
) -> None:
    """A new connection costs both sides as much as the refusal; the rest of a body is never taken for a request."""
    monkeypatch.setattr(load_shedding.LoadShedder, "is_waited_for", lambda *_: True)
    home = create_home(tmp_path, public_key=RUN_KEY.public_key().public_bytes_raw(), spec=spec_of())
    fields = "Host: x\r\n" + ("" if body is None else "Content-Length: 5\r\n")
    request = f"{head} HTTP/1.1\r\n{fields}\r\n".encode() + (body or b"")
    with serve(Coordinator(home, key=RUN_KEY)) as url, closing(socket.socket()) as client:
        client.settimeout(60)
        client.connect(("127.0.0.1", urlsplit(url).port))
        for _ in range(2 if keeps else 1):
            client.sendall(request)
            answer = HTTPResponse(client)
            answer.begin()
            assert answer.status == 429
            assert answer.will_close is not keeps
            assert b"too_many_requests" in answer.read()
        if not keeps:
            assert client.recv(1) == b""
    home.database.close()


def refusal_of(reply: Reply) -> str:
    return "" if reply.status == 202 else reply.code


def ask(peer: Peer) -> Reply:
    return peer.signed("POST", "/v1/leases", encode(LeaseRequest(held_versions=(), slots=1, instance=INSTANCE)))


def refused_for(url: str, path: str) -> str | None:
    """The seconds for which a GET is told to stay away."""
    with pytest.raises(HTTPError) as caught:
        urllib.request.urlopen(url + path, timeout=60)
    with caught.value as error:
        assert error.code == 429
        return error.headers["Retry-After"]


def test_each_class_is_shed_before_connections_run_out() -> None:
    """A worker with leased work would be closed unanswered, and not told when to come again."""
    limits = [load_shedding.MOST_WAITING[kind] for kind in RequestClass]
    assert limits[0] > load_shedding.STRANGERS_WAITING
    assert limits == sorted(limits)
    assert limits[-1] < ConnectionLimits().connections


def test_every_endpoint_is_of_the_class_of_what_it_is_for() -> None:
    """A new one that was forgotten would be shed with the leased work, or with the pages."""
    declared = [one for one in vars(endpoints).values() if isinstance(one, Endpoint)]
    found = {kind: {one.path for one in declared if class_of(one.method, one.path) is kind} for kind in RequestClass}
    assert found[RequestClass.JOIN] == {"/v1/nodes", "/v1/relays"}
    assert found[RequestClass.WORK] == {"/v1/leases", "/v1/receipts/{submission}", "/v1/relays", "/v1/policy"}
    assert found[RequestClass.DELIVERY] == {
        "/v1/leases/{lease_id}/return",
        "/v1/submissions/{lease_id}",
        "/v1/submissions/{lease_id}/{sha256}",
        "/v1/uploads/{lease_id}",
    }
    assert {one.path for one in declared if class_of(one.method, one.path) is None} == {
        "/health",
        "/metrics",
        "/v1/run",
    }
